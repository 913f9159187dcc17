"""Windows with sinks in the model: equal to a dense mask, to transformers, and through the whole engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.model.tiny import VOCAB, plain_logits, tiny_decoder, tokens

from firsttoken_api.switches import parse_message
from firsttoken_runtime.engine.engine import Engine, EngineSettings
from firsttoken_runtime.engine.requests import Request, SamplingParams
from firsttoken_runtime.model import step
from firsttoken_runtime.model.load import load_model
from firsttoken_runtime.model.runner import Chunk, ModelRunner
from firsttoken_runtime.model.step import PlanSettings, Prefill, plan_step
from firsttoken_runtime.model.windows import Window, layer_windows, widest

MODELS = {own: tiny_decoder(own) for own in [(None, None), (None, 9), (6, 12)]}
ASKED = [None, Window(1), Window(5), Window(7, 1), Window(4, 6), Window(8, 3)]


@given(data=st.data(), page=st.sampled_from([1, 3, 4]), asked=st.sampled_from(ASKED))
@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize("own", MODELS)
def test_any_mix_of_chunks_equals_a_dense_mask(own, asked, page, data):
    """Several sequences per step, random cuts, pages dealt at random; what no layer sees is given back."""
    model, windows = MODELS[own], layer_windows(own, asked)
    lengths = data.draw(st.lists(st.integers(1, 45), min_size=1, max_size=3))
    free = data.draw(st.permutations(range(sum(-(-length // page) for length in lengths) + 2)))
    runner = ModelRunner(model, len(free), page)
    runner.set_windows(windows)
    work = []
    for number, length in enumerate(lengths):
        need = -(-length // page)
        work.append(SimpleNamespace(ids=tokens(length, number), pages=list(free[:need]), done=0, rows=[]))
        free = free[need:]
    while unfinished := [w for w in work if w.done < len(w.ids)]:
        chunks = []
        for w in unfinished:
            end = min(len(w.ids), w.done + data.draw(st.sampled_from([1, 1, 3, 7, 45])))
            chunks.append(Chunk(w.ids[w.done : end], w.done, w.pages, end - w.done))
        rows = runner.run(chunks).split([chunk.logits for chunk in chunks])
        for w, chunk, found in zip(unfinished, chunks, rows, strict=True):
            w.done = chunk.end
            w.rows.append(found)
            if (wide := widest(windows)) is not None:
                for place in range(-(-wide.sinks // page), wide.begin(w.done) // page):
                    w.pages[place] = -1
    for w in work:
        torch.testing.assert_close(torch.cat(w.rows), plain_logits(model, w.ids, windows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("start", [0, 3, 40])
def test_a_chunk_longer_than_the_window_is_attended_in_blocks(monkeypatch, start):
    """So that the work grows with length x window; the numbers are the same."""
    monkeypatch.setattr(step, "_LEAST_BLOCK", 4)
    model, window = MODELS[(None, None)], Window(6, 2)
    ids, pages = tokens(90, 4), list(range(23))
    runner = ModelRunner(model, 23, 4)
    runner.set_windows((window, window))
    if start:
        runner.run([Chunk(ids[:start], 0, pages, 0)])
    found = runner.run([Chunk(ids[start:], start, pages, 90 - start)])
    torch.testing.assert_close(found, plain_logits(model, ids, (window, window))[start:], atol=1e-4, rtol=0)
    plan = PlanSettings(4, (window,), torch.float32, torch.device("cpu"))
    segments = plan_step([Chunk(ids[start:], start, pages, 1)], plan).segments[window]
    assert sum(segment.length for segment in segments) == 90 - start
    assert (
        max(segment.context for segment in segments) <= 4 + 6 + 6 + 2 * 4
    )  # sinks, window, block, page ends


def test_only_visible_pages_are_gathered():
    plan = PlanSettings(4, (Window(8, 5),), torch.float32, torch.device("cpu"))
    decode, prefill = plan_step(
        [Chunk([1], 100, list(range(26)), 1), Chunk([1, 2, 3], 60, list(range(26, 42)), 1)], plan
    ).segments[Window(8, 5)]
    assert decode.pages.index.tolist() == [0, 1, 23, 24, 25]
    assert decode.context == 4 * 4 + 1
    assert isinstance(prefill, Prefill)
    assert prefill.pages.index.tolist() == [26, 27, 26 + 13, 26 + 14, 26 + 15]
    assert prefill.mask.shape == (3, 4 * 4 + 3)


def engine_on(model, pages: int, page_tokens: int, switches: dict | None = None) -> Engine:
    settings_ = EngineSettings(
        pages, page_tokens, model.config.max_length, layer_windows=model.config.layer_windows
    )
    runner = ModelRunner(model, pages, page_tokens)
    return Engine(runner, settings_, parse_message({"generation": 1, "switches": switches or {}}))


def generate(engine: Engine, prompts: list[list[int]], count: int, toggles=()) -> list[list[int]]:
    """Greedy tokens of all prompts at once; one toggle every fourth step."""
    found: dict[str, list[int]] = {}
    toggles = iter(toggles)
    for prompt in prompts:
        id = str(len(found))
        found[id] = []
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.add(Request(id, tuple(prompt), sampling, 0))
    steps = 0
    while engine.has_work():
        for event in engine.step():
            found[event.request_id].append(event.token)
        steps += 1
        assert engine.integrity()["ok"], engine.integrity()["problems"]
        if steps % 4 == 0 and (message := next(toggles, None)) is not None:
            assert engine.set_switches(message)
    return list(found.values())


@torch.inference_mode()
def test_a_prompt_of_several_windows_in_a_pool_smaller_than_it_equals_transformers(
    tmp_path: Path, reference_greedy
):
    """Mistral: 200 tokens are more than eight windows, and more than the pool's 20 pages of 8 tokens."""
    import transformers

    torch.manual_seed(7)
    config = transformers.MistralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=24,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.dim() == 1 else 0.08)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "cpu", torch.float32)
    prompts = [torch.randint(0, 300, (length,)).tolist() for length in (200, 90, 20)]
    expected = [reference_greedy(theirs, prompt, 12).tokens for prompt in prompts]
    for chunk in (16, 64):
        engine = engine_on(ours, 20, 8, {"chunkedPrefill": {"enabled": True, "chunkSize": chunk}})
        assert generate(engine, prompts, 12) == expected
        assert generate(engine, prompts, 12) == expected  # the first pages from the cache


def test_the_switch_toggled_under_load_and_afterwards_greedy_equals_the_dense_mask():
    model = MODELS[(None, None)]
    engine = engine_on(model, 80, 4)
    prompts = [tokens(length, length) for length in (12, 40, 75)]
    on = {"slidingWindow": {"enabled": True, "window": 16, "sinkTokens": 3}}
    toggles = [
        parse_message({"generation": 2 + number, "switches": on if number % 2 == 0 else {}})
        for number in range(5)
    ]
    found = generate(engine, prompts, 12, toggles)
    assert [len(tokens_) for tokens_ in found] == [12, 12, 12]
    for generation, (switches, window) in enumerate([(on, Window(16, 3)), ({}, None)], 10):
        assert engine.set_switches(parse_message({"generation": generation, "switches": switches}))
        for prompt, answer in zip(prompts, generate(engine, prompts, 8), strict=True):
            known = [*prompt, *answer]
            rows = plain_logits(model, known, (window, window))[len(prompt) - 1 : -1]
            assert answer == rows.argmax(-1).tolist()
            assert max(answer) < VOCAB
