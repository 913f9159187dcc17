"""Answers keep to their grammar, whatever the engine does to their sequence; compiling holds up no step."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from typing import Any

import pytest
import torch
from page_model import EOS, VOCAB, Bench, message, prompt

from firsttoken_runtime.engine import grammar as module
from firsttoken_runtime.engine.grammar import Constraint, Grammars
from firsttoken_runtime.engine.requests import AdmissionError, Finish, Request, SamplingParams

# Token 0 ends the answer; every other token is one printable character.
VOCABULARY = [b"", *(bytes([31 + id]) for id in range(1, VOCAB - 1)), b"ab"]


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def regex(pattern: str) -> str:
    return tag({"type": "regex", "pattern": pattern})


def text(tokens: list[int]) -> str:
    return b"".join(VOCABULARY[token] for token in tokens).decode()


def asks(id: str, grammar: str) -> Request:
    return Request(id, (1, 2), SamplingParams(grammar=grammar), 0)


@pytest.fixture
def grammars() -> Grammars:
    made = Grammars(VOCAB, [EOS])
    made.set_vocabulary(VOCABULARY)
    return made


def wait(grammars: Grammars, seconds: float = 20.0) -> list[tuple[Request, Constraint | AdmissionError]]:
    """What comes of everything that was begun."""
    found = []
    end = time.monotonic() + seconds
    while grammars.pending and time.monotonic() < end:
        found += list(grammars.finished())
        time.sleep(0.001)
    assert not grammars.pending
    return found


def compiled(grammars: Grammars, grammar: str) -> Constraint:
    grammars.begin(asks("x", grammar))
    [(_, outcome)] = wait(grammars)
    assert isinstance(outcome, Constraint), outcome
    return outcome


def test_the_mask_has_what_the_grammar_has_and_the_end_only_at_the_end(grammars: Grammars) -> None:
    constraint = compiled(grammars, regex("ab|b"))

    def allowed() -> list[bytes]:
        return [VOCABULARY[id] for id in (~constraint.forbidden()).nonzero().flatten().tolist()]

    assert sorted(allowed()) == [b"a", b"ab", b"b"]
    assert constraint.accept(VOCABULARY.index(b"a"))
    assert allowed() == [b"b"]
    assert not constraint.accept(VOCABULARY.index(b"z"))
    assert constraint.accept(VOCABULARY.index(b"b"))
    assert not constraint.ended
    assert allowed() == [b""]
    assert constraint.accept(EOS)
    assert constraint.ended


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (tag({"type": "json_schema", "json_schema": {"type": "wish"}}), 'Unsupported type "wish"'),
        (regex("("), "The parenthesis is not closed"),
        (tag({"type": "grammar", "grammar": "root ::= x"}), 'Rule "x" is not defined'),
        (tag({"type": "unheard"}), "Format type not recognized: unheard"),
        ("{", "JSON"),
    ],
)
def test_what_is_not_a_grammar_is_refused_in_the_compilers_words(grammars, grammar, words) -> None:
    grammars.begin(asks("bad", grammar))
    [(request, error)] = wait(grammars)
    assert request.id == "bad"
    assert isinstance(error, AdmissionError)
    assert (error.status, error.code) == (400, "invalid_grammar")
    assert words in error.message
    assert ".cc:" not in error.message


def test_a_form_may_name_a_token_and_others_with_its_text_do_not_count(grammars: Grammars) -> None:
    token = VOCABULARY.index(b"ab")
    calls = {
        "type": "sequence",
        "elements": [{"type": "token", "token": token}, {"type": "regex", "pattern": "c"}],
    }
    constraint = compiled(grammars, tag(calls))
    assert (~constraint.forbidden()).nonzero().flatten().tolist() == [token]
    assert constraint.accept(token)
    assert (~constraint.forbidden()).nonzero().flatten().tolist() == [VOCABULARY.index(b"c")]


def test_one_grammar_is_compiled_once_for_all_who_ask(grammars: Grammars, monkeypatch) -> None:
    compilations: list[str] = []
    real = Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, text: (compilations.append(text), real(self, text))[1]
    )
    for id in "abc":
        grammars.begin(asks(id, regex("x+")))
    assert [request.id for request, _ in wait(grammars)] == ["a", "b", "c"]
    first, second = compiled(grammars, regex("x+")), compiled(grammars, regex("x+"))
    assert compilations == [regex("x+")]
    assert first.accept(VOCABULARY.index(b"x"))
    assert second.forbidden()[EOS], "each has its own place in the grammar"


def test_a_request_that_is_cancelled_does_not_come_back(grammars: Grammars) -> None:
    grammars.begin(asks("stays", regex("x")))
    grammars.begin(asks("goes", regex("x")))
    assert grammars.cancel("goes")
    assert not grammars.cancel("goes")
    assert [request.id for request, _ in wait(grammars)] == ["stays"]


def test_old_grammars_make_room(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    size = compiled(grammars, regex("a0"))._matcher is not None and grammars._cached_bytes
    monkeypatch.setattr(module, "CACHE_BYTES", 5 * size)
    for number in range(30):
        compiled(grammars, regex(f"b{number}"))
    assert 0 < grammars._cached_bytes <= 5 * size
    assert len(grammars._cache) < 30


def test_a_compilation_that_does_not_end_is_given_up_and_the_next_one_is_not_held_up(monkeypatch) -> None:
    now = [0.0]
    release = threading.Event()
    grammars = Grammars(VOCAB, [EOS], clock=lambda: now[0])
    grammars.set_vocabulary(VOCABULARY)
    real = Grammars._compile

    def slow(self: Grammars, grammar: str) -> Any:
        if "slow" in grammar:
            release.wait(30)
        return real(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", slow)
    grammars.begin(asks("slow", regex("slow1")))
    while not (grammars._thread and grammars._thread.job):
        time.sleep(0.001)
    grammars.begin(asks("next", regex("quick")))
    assert list(grammars.finished()) == []
    now[0] = module.LONGEST_COMPILATION_SECONDS + 1
    outcomes = {request.id: outcome for request, outcome in wait(grammars)}
    assert "takes longer than 10 s to compile" in str(outcomes["slow"])
    assert isinstance(outcomes["next"], Constraint)
    now[0] += 1
    grammars.begin(asks("slow again", regex("slow2")))
    while not (grammars._thread and grammars._thread.job):
        time.sleep(0.001)
    now[0] += module.LONGEST_COMPILATION_SECONDS
    wait(grammars)
    with pytest.raises(AdmissionError, match="too many output formats") as busy:
        grammars.begin(asks("third", regex("c")))
    assert busy.value.status == 503
    release.set()
    for thread in grammars._stuck:
        thread.native.join(10)
    assert isinstance(compiled(grammars, regex("d")), Constraint)


def test_transformers_is_not_imported_for_it() -> None:
    import subprocess

    script = (
        "import sys; from firsttoken_runtime.engine.grammar import _xgrammar; _xgrammar();"
        "print('xgrammar' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


# In the engine


class ConstrainedBench(Bench):
    """A bench whose engine gets the constraint of each request that has a grammar."""

    def __init__(self, grammars: Grammars, **options: Any) -> None:
        super().__init__(**options)
        plain = self.engine.add

        def constrained(request: Request) -> None:
            grammar = request.sampling.grammar
            plain(request, compiled(grammars, grammar) if grammar else None)

        self.engine.add = constrained  # type: ignore[method-assign]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_answer_matches_under_preemption_beside_free_ones(grammars, temperature: float) -> None:
    switches = message(1, continuousBatching={"maxSequences": 4}, chunkedPrefill={"chunkSize": 16})
    bench = ConstrainedBench(grammars, total_pages=24, switches=switches)
    pattern = "[a-f]{9,14}-[0-9]+(,[x-z]{2}){3}"
    for number in range(6):
        bench.add(
            prompt(9, number), grammar=regex(pattern), ignore_eos=False, temperature=temperature, seed=number,
            max_tokens=80,
        )  # fmt: skip
        bench.add(prompt(7, 50 + number), max_tokens=25)
    bench.run()
    assert bench.engine.stats()["preemptions"] > 0
    for number in range(0, 12, 2):
        tokens = bench.tokens(f"r{number}")
        assert bench.finish(f"r{number}") in (Finish.STOP, Finish.LENGTH)
        whole = bench.finish(f"r{number}") == Finish.STOP
        said = text(tokens)
        assert re.fullmatch(pattern, said) if whole else re.match("[a-f]{9,14}-[0-9]+", said), said
    for number in range(1, 12, 2):
        bench.assert_right(f"r{number}")
    bench.assert_drained()


def test_alone_or_in_a_crowd_the_answer_is_the_same(grammars: Grammars) -> None:
    def answers(count: int) -> list[int]:
        bench = ConstrainedBench(grammars, total_pages=30)
        for number in range(count):
            bench.add(
                prompt(9, number), grammar=regex("[a-z]{12,30}"), ignore_eos=False, temperature=1.0, seed=7
            )
        bench.run()
        return bench.tokens("r0")

    assert answers(1) == answers(8)


def test_a_finished_grammar_ends_the_answer_also_when_eos_is_ignored(grammars: Grammars) -> None:
    bench = ConstrainedBench(grammars)
    bench.add(prompt(9), grammar=regex("abc"), max_tokens=30)
    bench.run()
    assert (text(bench.tokens("r0")), bench.finish("r0")) == ("abc", Finish.STOP)


def test_min_tokens_keeps_the_end_back_as_long_as_the_grammar_can_go_on(grammars: Grammars) -> None:
    bench = ConstrainedBench(grammars)
    for minimum in (0, 12):
        bench.add(
            prompt(9), grammar=regex("[0-9]{1,40}"), ignore_eos=False, min_tokens=minimum, max_tokens=40,
            temperature=1.0, seed=3,
        )  # fmt: skip
    bench.add(prompt(9), grammar=regex("abc"), ignore_eos=False, min_tokens=12, max_tokens=40)
    bench.run()
    assert len(bench.tokens("r1")) >= 12
    assert text(bench.tokens("r2")) == "abc"


def test_min_tokens_without_a_grammar_forbids_stop_tokens_until_then() -> None:
    bench = Bench()
    bench.add(prompt(9), max_tokens=40)
    bench.run()
    stop = bench.tokens("r0")[3]
    bench.add(prompt(9), max_tokens=40, stop_token_ids=(stop,))
    bench.add(prompt(9), max_tokens=40, stop_token_ids=(stop,), min_tokens=20)
    bench.run()
    assert len(bench.tokens("r1")) <= 4
    later = bench.tokens("r2")
    assert len(later) >= 20
    assert stop not in later[:20]


def test_a_mask_leaves_the_told_log_probabilities_alone() -> None:
    from firsttoken_runtime.engine.sampling import Row, sample

    logits = torch.tensor([[3.0, 2.0, 1.0]])
    row = Row(SamplingParams(temperature=0.0, logprobs=1), 0, 0, None, torch.tensor([True, False, False]))
    [picked] = sample(logits, [row])
    assert picked.token == 1
    assert picked.logprob == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))
    assert picked.top[0][0] == 0
    assert logits.tolist() == [[3.0, 2.0, 1.0]]


def test_a_request_with_a_grammar_is_right_where_others_are_speculated_for(grammars: Grammars) -> None:
    bench = ConstrainedBench(
        grammars, repeats=True, switches=message(1, speculativeDecoding={"method": "ngram"})
    )
    bench.add(prompt(9), grammar=regex("(ab){4,9}c"), ignore_eos=False, max_tokens=40)
    bench.add(prompt(7, 3), max_tokens=40)
    bench.run()
    assert re.fullmatch("(ab){4,9}c", text(bench.tokens("r0")))
    bench.assert_right("r1")
