"""From the answers of one round to its figures. The definitions are those of docs/bench.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from firsttoken_runtime.measure.client import Sample
from firsttoken_runtime.measure.figures import Better, Figure, row
from firsttoken_runtime.measure.load import Round
from firsttoken_runtime.measure.statistics import mean, quantile

# What the server's account has that is no part of the time to first token.
_NOT_TTFT = ("total_ms", "predicted_ms", "predicted_per_token_ms", "prompt_per_token_ms")
_QUANTILES = (("P50", 0.5), ("P95", 0.95), ("P99", 0.99))


@dataclass(frozen=True)
class Slo:
    """Limits in milliseconds that a good request keeps; None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def kept(self, sample: Sample) -> bool:
        """Limits are inclusive; an answer of one token has no TPOT to miss, as in `vllm bench serve`."""
        limits = (
            (self.ttft_ms, sample.ttft_ms),
            (self.tpot_ms, sample.tpot_ms or 0.0),
            (self.e2e_ms, sample.total_ms),
        )
        return all(limit is None or value <= limit for limit, value in limits)

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("E2E", self.e2e_ms))
        return ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits if limit is not None)


def round_figures(scenario: str, done: Round, slo: Slo) -> list[Figure]:
    """The figures of one round, one value each; no latencies when nothing succeeded."""

    def one(figure: str, value: float, unit: str, better: Better | None = None) -> Figure:
        return row(scenario, figure, [value], unit, better)

    samples = done.samples
    found = [
        *_latency(scenario, "TTFT", [sample.ttft_ms for sample in samples]),
        *_account(scenario, samples),
        *_latency(scenario, "TPOT", [tpot for sample in samples if (tpot := sample.tpot_ms) is not None]),
        *_latency(scenario, "ITL", [gap for sample in samples for gap in sample.gaps_ms]),
        *_latency(scenario, "E2E", [sample.total_ms for sample in samples]),
    ]
    seconds = max(done.seconds, 1e-9)
    output = sum(output_tokens(sample) for sample in samples)
    found.append(one("requests", len(samples) / seconds, "requests/s"))
    found.append(one("output", output / seconds, "tokens/s"))
    prompts = [sample.prompt_tokens for sample in samples if sample.prompt_tokens is not None]
    if prompts and len(prompts) == len(samples):
        found.append(one("input and output", (sum(prompts) + output) / seconds, "tokens/s"))
    ended = len(done.outcomes)
    if slo and ended:
        good = sum(slo.kept(sample) for sample in samples)
        found.append(one("goodput", good / seconds, "requests/s"))
        found.append(one("requests within the SLO", 100 * good / ended, "%", Better.HIGHER))
    if ended:
        found.append(one("failed requests", ended - len(samples), "requests", Better.LOWER))
    found += _lateness(scenario, done)
    if prompts:
        found.append(one("prompt, mean", mean(prompts), "tokens"))
        found.append(one("prompt, longest", max(prompts), "tokens"))
    if samples:
        found.append(one("answer, mean", output / len(samples), "tokens"))
        found.append(one("tokens per chunk", output / sum(sample.chunks for sample in samples), "tokens"))
    cached = [sample.cached_tokens for sample in samples if sample.cached_tokens is not None]
    if cached and prompts:
        found.append(one("cached share of prompts", 100 * sum(cached) / sum(prompts), "%"))
    return found


def output_tokens(sample: Sample) -> int:
    """As the server counts them; the chunks of text where it does not."""
    return sample.output_tokens if sample.output_tokens is not None else sample.chunks


def errors(rounds: Iterable[Round]) -> dict[str, int]:
    """Failed requests by kind, the most frequent first."""
    kinds = Counter(outcome.error for done in rounds for outcome in done.outcomes if outcome.error)
    return dict(kinds.most_common())


def _latency(scenario: str, name: str, values: Sequence[float]) -> list[Figure]:
    if not values:
        return []
    found = [row(scenario, f"{name} {label}", [quantile(values, q)]) for label, q in _QUANTILES]
    return [*found, row(scenario, f"{name} mean", [mean(values)])]


def _account(scenario: str, samples: Sequence[Sample]) -> list[Figure]:
    """The server's parts of TTFT as means, because means add up; and what is left of the client's TTFT."""
    accounts = [_parts(sample.timings) for sample in samples if sample.timings]
    accounts = [account for account in accounts if account]
    if not accounts or len(accounts) < len(samples):
        return []
    names = [name for name in accounts[0] if all(name in account for account in accounts)]
    found = [
        row(scenario, f"server: {_words(name)}, mean", [mean([account[name] for account in accounts])])
        for name in names
    ]
    if "ttft_ms" in names:
        outside = mean(
            [sample.ttft_ms - account["ttft_ms"] for sample, account in zip(samples, accounts, strict=True)]
        )
        found.append(row(scenario, "outside the server (network and client), mean", [outside]))
    return found


def _parts(timings: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in timings.items()
        if name.endswith("_ms")
        and name not in _NOT_TTFT
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


def _words(name: str) -> str:
    return name.removesuffix("_ms").replace("_", " ").replace("ttft", "TTFT")


def _lateness(scenario: str, done: Round) -> list[Figure]:
    late = [value for outcome in done.outcomes if (value := outcome.lateness_ms) is not None]
    if not late:
        return []
    quantiles = (("P50", 0.5), ("P99", 0.99), ("worst", 1.0))
    return [row(scenario, f"client lateness {label}", [quantile(late, q)]) for label, q in quantiles]


def warnings(scenario: str, figures: Iterable[Figure], cold: bool, template_tokens: int = 0) -> list[str]:
    """What makes the figures of a load doubtful, in words.

    template_tokens: of the chat template, which all prompts share and a server may well have cached.
    """
    value = {entry.figure: entry.median for entry in figures if entry.scenario == scenario}
    found = []
    late, ttft = value.get("client lateness P99", 0.0), value.get("TTFT P50", math.inf)
    if late > max(10.0, 0.05 * ttft):
        found.append(
            f"the client sent late (P99 {late:.0f} ms): it, not only the server, shaped these figures; lower "
            "the rate, or run it on a machine with free cores"
        )
    share = value.get("cached share of prompts", 0.0)
    if cold and share > 1 and share / 100 * value["prompt, mean"] > template_tokens:
        found.append(
            f"{share:.0f} % of the prompt tokens came from the prefix cache "
            "although no prompt shares a beginning with another: these figures are not cold"
        )
    if (per_chunk := value.get("tokens per chunk", 1.0)) > 1.2:
        found.append(f"a chunk of text brings {per_chunk:.1f} tokens: ITL is per chunk; TPOT is per token")
    return found
