"""A draft model is loaded beside the served one when their tokens are the same, and refused if not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.runtime.model.prompts import COUNT

from firsttoken_runtime.engine import draft_load
from firsttoken_runtime.engine.draft_load import check_draft, difference, load_draft
from firsttoken_runtime.engine.prefix import Namespace
from firsttoken_runtime.engine.requests import Request, SamplingParams
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.memory import Pool
from firsttoken_runtime.model.errors import ModelError


def vocabulary(*tokens: str) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=len(tokens), token_bytes=lambda token: tokens[token].encode())


def test_vocabularies_are_compared_token_by_token() -> None:
    assert difference(vocabulary("a", "b"), vocabulary("a", "b")) is None
    assert difference(vocabulary("a", "b", "c"), vocabulary("a", "b")) == "3 tokens, and not 2"
    assert difference(vocabulary("a", "c"), vocabulary("a", "b")) == "token 1 is b'c', and not b'b'"


def test_a_draft_of_another_vocabulary_is_refused_with_what_to_do(smollm2, monkeypatch) -> None:
    other = iter([vocabulary("a"), vocabulary("b")])
    monkeypatch.setattr(draft_load, "load_tokenizer", lambda path: next(other))
    with pytest.raises(ModelError, match=r"--draft-model .*token 0 is b'a', and not b'b'; take a smaller"):
        check_draft(str(smollm2), "served")


def test_a_loaded_draft_proposes_what_its_model_says(smollm2, prompts, expected) -> None:
    config = check_draft(str(smollm2), str(smollm2))
    served = Pool(pages=512, page_tokens=16, bytes_per_token=46080)
    draft, line = load_draft(str(smollm2), config, config, torch.device("cpu"), torch.float32, served)
    assert line == "draft model: llama, 30 layers, KV pool: 45.0 MiB = 1,024 tokens in 64 pages"
    prompt = tuple(prompts[6])
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.0)
    sequence = Sequence(Request("r", prompt, sampling, 0), 0, COUNT, Namespace(""))
    assert draft.propose([(sequence, COUNT)]) == {0: expected[6].tokens}
