"""Log probabilities of the prompt's own tokens: right in every plan, and never many rows at once."""

from __future__ import annotations

import pytest
import torch
from page_model import Bench, _logits, _slot, message, prompt

from firsttoken_runtime.engine.prompt_scores import MOST_ROWS, scores
from firsttoken_runtime.engine.requests import NO_TOKEN, NOT_GENERATED, TokenScore


def right(tokens: list[int], top: int) -> list[TokenScore]:
    """Scores on the plain list of tokens."""
    slots: list[int] = []
    found = []
    for position, token in enumerate(tokens):
        if position:
            found += scores(_logits(slots, tokens[position - 1], False).unsqueeze(0), [token], top)
        slots.append(_slot(slots[-1] if slots else 0, token, position))
    return found


def told(bench: Bench, id: str) -> list[TokenScore]:
    return [score for event in bench.events[id] for score in event.prompt]


def test_a_score_is_log_probability_rank_and_the_likeliest_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 0.0]])
    first, second = scores(logits, [2, 1], 2)
    expected = torch.log_softmax(logits, -1)
    assert first.rank == 2
    assert first.logprob == pytest.approx(float(expected[0, 2]))
    assert [id for id, _ in first.top] == [1, 2]
    assert second.rank == 1, "the tokens that are likelier count, not those that are as likely"


@pytest.mark.parametrize("chunk_size", [16, 64, None])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 60])
def test_every_prompt_token_but_the_first_has_its_score(length: int, chunk_size: int | None) -> None:
    chunked = {"chunkSize": chunk_size} if chunk_size else False
    bench = Bench(switches=message(1, chunkedPrefill=chunked))
    tokens = prompt(length)
    bench.add(tokens, prompt_logprobs=2)
    bench.run()
    assert told(bench, "r0") == right(tokens, 2)
    assert all(
        (event.token, event.index, event.finish) == (NO_TOKEN, NOT_GENERATED, None)
        for event in bench.events["r0"]
        if event.prompt
    )


def test_cached_pages_are_computed_again_for_scores_and_found_by_others() -> None:
    bench = Bench()
    tokens = prompt(40)
    for scored in (None, 1, None):
        bench.add(tokens, prompt_logprobs=scored)
        bench.run()
    assert told(bench, "r1") == right(tokens, 1)
    first_tokens = [next(event for event in bench.events[f"r{at}"] if event.index == 0) for at in range(3)]
    assert [event.cached_tokens for event in first_tokens] == [0, 0, 36]


def test_a_preempted_prompt_is_scored_once() -> None:
    switches = message(1, continuousBatching={"maxSequences": 1}, chunkedPrefill={"chunkSize": 16})
    bench = Bench(total_pages=400, switches=switches)
    bench.add(prompt(90, 1), id="low", priority=1, prompt_logprobs=0)
    bench.steps(3)
    bench.add(prompt(10, 2), id="urgent", priority=0)
    bench.run()
    assert bench.engine.stats()["preemptions"] == 1
    assert told(bench, "low") == right(prompt(90, 1), 0)


def test_a_long_prompt_never_makes_many_rows_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(total_pages=1200, switches=message(1, chunkedPrefill=False, continuousBatching=False))
    rows: list[int] = []
    run = bench.model.run

    def counted(chunks):
        rows.append(sum(chunk.logits for chunk in chunks))
        return run(chunks)

    monkeypatch.setattr(bench.model, "run", counted)
    bench.add(prompt(900), prompt_logprobs=1)
    bench.run()
    assert max(rows) <= MOST_ROWS
    assert len(told(bench, "r0")) == 899


def test_beside_others_that_decode_and_prefill_each_gets_its_own() -> None:
    bench = Bench(total_pages=400)
    bench.add(prompt(9, 1), max_tokens=20)
    bench.steps(2)
    bench.add(prompt(50, 2), prompt_logprobs=0)
    bench.add(prompt(30, 3))
    bench.add(prompt(25, 4), prompt_logprobs=3)
    bench.run()
    bench.assert_right()
    assert told(bench, "r1") == right(prompt(50, 2), 0)
    assert told(bench, "r3") == right(prompt(25, 4), 3)
