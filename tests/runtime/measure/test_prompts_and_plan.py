"""What is sent and when: exact lengths, cold and shared prefixes, the same load for the same seed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.measure.lengths import parse_lengths
from firsttoken_runtime.measure.plan import Cache, Load, plan_round, priming
from firsttoken_runtime.measure.prompts import TAG_WORDS, Prefix, Prompts, Text, WordRate
from firsttoken_runtime.measure.statistics import mean
from firsttoken_runtime.measure.traces import Arrival
from firsttoken_runtime.measure.words import WORDS

pytestmark = pytest.mark.asyncio


async def uneven(text: str) -> int:
    """A tokenizer with two tokens for long words, and one at the beginning of every text."""
    return 1 + sum(2 if len(word) > 6 else 1 for word in text.split())


def shared_words(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=False)
    return next(
        (index for index, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other))
    )


async def test_the_words_are_words() -> None:
    assert len(set(WORDS)) == len(WORDS) > 400
    assert all(word.isalpha() and word.islower() for word in WORDS)


@pytest.mark.parametrize("tokens", [1, 2, 7, 32, 513, 1500])
async def test_a_prompt_has_the_length_asked_for_where_the_server_counts(tokens: int) -> None:
    prompts = Prompts(0, "run", WordRate(1, 1.1), uneven)
    found = await uneven(await prompts.of(tokens))
    assert found == max(tokens, 2) or abs(found - tokens) <= 1  # a long last word may be one too many


async def test_a_chat_template_counts_too() -> None:
    prompts = Prompts(0, "run", WordRate(), count=words, fixed_tokens=9)
    assert len((await prompts.of(40)).split()) == 31


async def words(text: str) -> int:
    return len(text.split())


async def test_without_a_tokenizer_the_rate_of_the_first_answers_decides() -> None:
    rate = WordRate.of((20, 25), (120, 145))
    assert (rate.fixed, rate.per_word) == (pytest.approx(1.0), pytest.approx(1.2))
    text = await Prompts(0, "run", rate).of(601)
    assert len(text.split()) == 500


async def test_every_prompt_is_new_from_its_first_words() -> None:
    prompts = Prompts(0, "run")
    texts = [await prompts.of(50) for _ in range(200)]
    assert (
        len({text.split(" ", 3)[0] + text.split(" ", 3)[1] + text.split(" ", 3)[2] for text in texts}) > 195
    )
    assert len(set(texts)) == 200


async def test_another_run_starts_differently_and_goes_on_the_same() -> None:
    one, other = [await Prompts(5, run).of(60) for run in ("monday", "tuesday")]
    assert one.split()[:TAG_WORDS] != other.split()[:TAG_WORDS]
    assert one.split()[TAG_WORDS:] == other.split()[TAG_WORDS:]
    assert await Prompts(5, "monday").of(60) == one
    assert await Prompts(6, "monday").of(60) != one


async def test_texts_share_exactly_the_prefix_they_name() -> None:
    prompts = Prompts(0, "run", count=words)
    prefix = Prefix("system", 40)
    one, other = [await prompts.write(Text(60, own, (prefix,))) for own in (1, 2)]
    assert len(one.split()) == len(other.split()) == 60
    assert 40 <= shared_words(one, other) < 43


async def test_prefixes_follow_each_other() -> None:
    prompts = Prompts(0, "run", count=words)
    first, second, third = (Prefix(("block", name), 20) for name in (1, 2, 3))
    texts = [
        await prompts.write(Text(50, name, prefixes))
        for name, prefixes in (("a", (first, second)), ("b", (first, second)), ("c", (first, third)))
    ]
    assert 40 <= shared_words(texts[0], texts[1]) < 43
    assert 20 <= shared_words(texts[0], texts[2]) < 23


async def test_every_round_offers_the_same_load_in_other_words() -> None:
    load = Load(rate=3.0, requests=20, prompt_tokens=parse_lengths("lognormal:300:200"))
    first, second = plan_round(load, 7, 0), plan_round(load, 7, 1)
    shape = [(entry.at_seconds, entry.text.tokens, entry.output_tokens) for entry in first]
    assert shape == [(entry.at_seconds, entry.text.tokens, entry.output_tokens) for entry in second]
    assert not {entry.text.own for entry in first} & {entry.text.own for entry in second}
    assert shape != [(e.at_seconds, e.text.tokens, e.output_tokens) for e in plan_round(load, 8, 0)]


async def test_poisson_arrivals_have_their_rate() -> None:
    times = [entry.at_seconds or 0.0 for entry in plan_round(Load(rate=5.0, requests=4000), 1, 0)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    # Of an exponential distribution the share below the mean is 1 - 1/e.
    assert sum(gap < 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)


async def test_a_closed_loop_plans_no_times() -> None:
    assert {entry.at_seconds for entry in plan_round(Load(concurrency=2, requests=5), 0, 0)} == {None}


TRACE = (Arrival(0.0, 100, 10), Arrival(4.0, 3000, 20), Arrival(9.0, 50, 5))


@pytest.mark.parametrize(("scale", "times"), [(1.0, [0, 4, 9]), (2.0, [0, 2, 4.5]), (0.5, [0, 8, 18])])
async def test_a_trace_is_replayed_at_its_scale(scale: float, times: list[float]) -> None:
    planned = plan_round(Load(trace=TRACE, rate_scale=scale), 0, 0)
    assert [entry.at_seconds for entry in planned] == times
    assert [entry.text.tokens for entry in planned] == [100, 3000, 50]


async def test_a_round_is_bounded_by_count_and_by_time() -> None:
    assert len(plan_round(Load(trace=TRACE, requests=2), 0, 0)) == 2
    assert len(plan_round(Load(trace=TRACE, duration_seconds=5.0), 0, 0)) == 2


async def test_what_the_model_cannot_hold_is_cut_and_marked() -> None:
    planned = plan_round(Load(trace=TRACE), 0, 0, max_tokens=1000)
    assert [entry.cut for entry in planned] == [False, True, False]
    assert planned[1].text.tokens + planned[1].output_tokens == 1000


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 3000))
async def test_cut_lengths_always_fit(prompt: int, output: int, most: int) -> None:
    entry = plan_round(Load(trace=(Arrival(0.0, prompt, output),)), 0, 0, most)[0]
    assert 1 <= entry.text.tokens <= prompt
    assert 1 <= entry.output_tokens <= output
    assert entry.text.tokens + entry.output_tokens <= most


async def test_a_warm_cache_shares_prefixes_that_are_sent_before() -> None:
    load = Load(rate=1.0, requests=30, cache=Cache.WARM, prefixes=3, prefix_tokens=128)
    used = {entry.text.prefixes for entry in plan_round(load, 0, 4)}
    primed = {text.prefixes for text in priming(load, 4)}
    assert used == primed
    assert len(used) == 3
    assert priming(replace(load, cache=Cache.COLD), 4) == []


async def test_a_trace_with_blocks_shares_its_full_ones_within_a_round_only() -> None:
    trace = (Arrival(0.0, 1100, 5, (7, 8, 9)), Arrival(1.0, 1100, 5, (7, 8, 10)))
    load = Load(trace=trace, cache=Cache.WARM)
    first, second = plan_round(load, 0, 0)
    assert first.text.prefixes == second.text.prefixes
    assert len(first.text.prefixes) == 2  # the third block is not full
    assert plan_round(load, 0, 1)[0].text.prefixes != first.text.prefixes
    assert priming(load, 0) == []
    assert plan_round(replace(load, cache=Cache.COLD), 0, 0)[0].text.prefixes == ()
