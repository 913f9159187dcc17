"""The whole engine on the real model: greedy tokens equal those of transformers whatever the switches say."""

from __future__ import annotations

import time

import pytest
from tests.runtime.model.prompts import COUNT

from firsttoken_api.switches import parse_message
from firsttoken_runtime.engine.draft import DraftModel
from firsttoken_runtime.engine.engine import Engine, EngineSettings
from firsttoken_runtime.engine.requests import Request, SamplingParams
from firsttoken_runtime.model.runner import ModelRunner
from firsttoken_runtime.model.tokenizer import load_tokenizer

NAMES = (
    "continuousBatching",
    "prefixCache",
    "chunkedPrefill",
    "priorityScheduling",
    "speculativeDecoding",
)
PAGES = 512
ON = {name: {"enabled": True} for name in NAMES} | {"chunkedPrefill": {"enabled": True, "chunkSize": 100}}
OFF = {name: {"enabled": False} for name in NAMES}


@pytest.fixture
def engine(decoder) -> Engine:
    return engine_on(decoder)


def engine_on(decoder, draft: DraftModel | None = None) -> Engine:
    settings = EngineSettings(total_pages=PAGES, page_tokens=16, max_model_len=2048)
    first = parse_message({"generation": 0, "switches": {}})
    return Engine(ModelRunner(decoder, PAGES, 16), settings, first, draft=draft)


class Session:
    """Requests sent to one engine, and the tokens that came back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.generation = 0

    def switch(self, switches: dict[str, dict[str, object]]) -> None:
        self.generation += 1
        assert self.engine.set_switches(parse_message({"generation": self.generation, "switches": switches}))

    def send(self, name: str, prompt: list[int], count: int = COUNT) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.tokens[name] = []
        self.engine.add(Request(name, tuple(prompt), sampling, time.monotonic_ns()))

    def step(self) -> None:
        for event in self.engine.step():
            self.tokens[event.request_id].append(event.token)

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()
        assert self.engine.integrity()["ok"]


@pytest.mark.parametrize("switches", [ON, OFF], ids=["all on", "all off"])
def test_all_prompts_at_once(engine, prompts, expected, switches):
    session = Session(engine)
    session.switch(switches)
    for number, prompt in enumerate(prompts):
        session.send(str(number), prompt)
    session.finish()
    for number, reference in enumerate(expected):
        assert session.tokens[str(number)] == reference.tokens, f"prompt of {len(prompts[number])} tokens"


@pytest.mark.parametrize("switches", [ON, OFF], ids=["all on", "all off"])
def test_one_prompt_at_a_time(engine, prompts, expected, switches):
    session = Session(engine)
    session.switch(switches)
    for number, (prompt, reference) in enumerate(zip(prompts, expected, strict=True)):
        session.send(str(number), prompt)
        session.finish()
        assert session.tokens[str(number)] == reference.tokens, f"prompt of {len(prompt)} tokens"


def test_switches_flipped_at_every_step(engine, prompts, expected):
    session = Session(engine)
    for number, prompt in enumerate(prompts):
        session.send(str(number), prompt)
    while engine.has_work():
        on = {name: {"enabled": (session.generation >> place) % 2 == 0} for place, name in enumerate(NAMES)}
        session.switch(on | {"continuousBatching": {"enabled": True}})
        session.step()
    assert [session.tokens[str(number)] for number in range(len(prompts))] == [
        reference.tokens for reference in expected
    ]
    assert engine.integrity()["ok"]


def test_the_second_time_comes_from_the_cache_and_says_the_same(engine, prompts, expected):
    session = Session(engine)
    session.switch(ON)
    for turn in ("first", "second"):
        for number, prompt in enumerate(prompts):
            session.send(f"{turn} {number}", prompt)
        session.finish()
    assert engine.stats()["prefix_cache_hits"] > sum(map(len, prompts)) // 2
    for number, reference in enumerate(expected):
        assert session.tokens[f"second {number}"] == reference.tokens


def test_what_a_draft_model_proposes_and_is_drawn_changes_no_token(decoder, prompts, expected):
    """The model as its own draft: nearly all that it proposes is drawn."""
    vocabulary = decoder.config.vocab_size
    engine = engine_on(decoder, DraftModel(ModelRunner(decoder, 64, 16), 64, 16, 2048, vocabulary))
    session = Session(engine)
    session.switch({"speculativeDecoding": {"enabled": True, "method": "draft", "tokens": 3}})
    short = [number for number, prompt in enumerate(prompts) if len(prompt) <= 130]
    for number in short:
        session.send(str(number), prompts[number])
    session.finish()
    for number in short:
        assert session.tokens[str(number)] == expected[number].tokens
    stats = engine.stats()
    assert stats["spec_accepted_tokens"] > 0.8 * stats["spec_proposed_tokens"] > 0


def test_a_prompt_that_repeats_itself_is_continued_by_look_up(
    engine, smollm2, transformers_smollm2, reference_greedy
):
    prompt = load_tokenizer(smollm2).encode("".join(f"- user{n}, Berlin, Germany\n" for n in range(6)))
    reference = reference_greedy(transformers_smollm2, prompt, 30)
    session = Session(engine)
    session.switch({"speculativeDecoding": {"enabled": True, "method": "ngram"}})
    session.send("list", prompt, 30)
    session.finish()
    assert session.tokens["list"] == reference.tokens
    stats = engine.stats()
    assert stats["spec_accepted_tokens"] > 10
    assert stats["steps"] == 30 - stats["spec_accepted_tokens"]
