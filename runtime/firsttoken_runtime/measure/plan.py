"""What a round will send and when, decided before it starts: pure, and the same for the same seed.

Lengths and arrival times come from the seed alone, so that every round, and every run with that seed, offers
the same load: what differs between rounds is the server's doing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from firsttoken_runtime.measure.lengths import Lengths, parse_lengths
from firsttoken_runtime.measure.prompts import Prefix, Text
from firsttoken_runtime.measure.traces import BLOCK_TOKENS, Arrival

_PROMPT, _OUTPUT = parse_lengths("512"), parse_lengths("64")


class Cache(StrEnum):
    """State of the prefix cache that the prompts make: COLD shares nothing, WARM a prefix that was sent
    before.
    """

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True)
class Load:
    """The load of a round.

    Either `rate` (requests/s, Poisson), or `trace` with `rate_scale` (2 is twice as fast), or `concurrency`
    (closed loop). requests: most per round. duration_seconds: no request is sent later than that, None
    without a limit. rows: lengths to draw from instead of the two distributions. prefixes, prefix_tokens:
    shared prefixes of a WARM cache and their length; a trace with blocks brings its own.
    """

    rate: float | None = None
    trace: tuple[Arrival, ...] = ()
    rate_scale: float = 1.0
    concurrency: int | None = None
    requests: int = 50
    duration_seconds: float | None = None
    prompt_tokens: Lengths = _PROMPT
    output_tokens: Lengths = _OUTPUT
    rows: tuple[Arrival, ...] = ()
    cache: Cache = Cache.COLD
    prefixes: int = 1
    prefix_tokens: int = 256


@dataclass(frozen=True)
class Planned:
    """One request. at_seconds: after the round's start, None in a closed loop. cut: shortened to fit the
    model.
    """

    at_seconds: float | None
    text: Text
    output_tokens: int
    cut: bool = False


def plan_round(load: Load, seed: int, number: int, max_tokens: int | None = None) -> list[Planned]:
    """The requests of round `number` (from 0), in the order they are sent.

    max_tokens: longest prompt and answer together that the model takes; longer ones are cut.
    """
    arrivals = _arrivals(load, random.Random(f"{seed} arrivals"))  # noqa: S311 - not for secrets
    choice = random.Random(f"{seed} prefixes")  # noqa: S311 - not for secrets
    limit = float("inf") if load.duration_seconds is None else load.duration_seconds
    planned = []
    for index, (at_seconds, arrival) in enumerate(arrivals[: load.requests]):
        if at_seconds is not None and at_seconds > limit:
            break
        prompt, output = _fit(arrival.prompt_tokens, arrival.output_tokens, max_tokens)
        prefixes = _prefixes(load, arrival, prompt, number, choice)
        cut = (prompt, output) != (arrival.prompt_tokens, arrival.output_tokens)
        planned.append(Planned(at_seconds, Text(prompt, ("request", number, index), prefixes), output, cut))
    return planned


def priming(load: Load, number: int) -> list[Text]:
    """What to send before round `number` so that the shared prefixes are in the cache."""
    if load.cache is Cache.COLD or any(arrival.blocks for arrival in load.trace):
        return []
    return [Text(prefix.tokens + 8, ("prime", number, prefix.name), (prefix,)) for prefix in _shared(load)]


def _arrivals(load: Load, source: random.Random) -> Sequence[tuple[float | None, Arrival]]:
    if load.trace:
        return [(arrival.at_seconds / load.rate_scale, arrival) for arrival in load.trace]
    found: list[tuple[float | None, Arrival]] = []
    at_seconds = 0.0
    for _ in range(load.requests):
        if load.rows:
            drawn = source.choice(load.rows)
        else:
            drawn = Arrival(0.0, load.prompt_tokens.draw(source), load.output_tokens.draw(source))
        found.append((None if load.rate is None else at_seconds, drawn))
        at_seconds += source.expovariate(load.rate or 1.0)
    return found


def _fit(prompt: int, output: int, most: int | None) -> tuple[int, int]:
    """Both lengths cut so that together they are at most `most`: the answer to half of it, the prompt to the
    rest.
    """
    if most is None or prompt + output <= most:
        return prompt, output
    output = min(output, max(most // 2, 1))
    return max(min(prompt, most - output), 1), output


def _prefixes(
    load: Load, arrival: Arrival, prompt_tokens: int, number: int, choice: random.Random
) -> tuple[Prefix, ...]:
    if load.cache is Cache.COLD:
        return ()
    if arrival.blocks:
        full = arrival.blocks[: (prompt_tokens - 1) // BLOCK_TOKENS]
        return tuple(Prefix(("block", number, block), BLOCK_TOKENS) for block in full)
    shared = choice.choice(_shared(load))
    return (shared,) if shared.tokens < prompt_tokens else ()


def _shared(load: Load) -> list[Prefix]:
    return [Prefix(("shared", index), load.prefix_tokens) for index in range(load.prefixes)]
