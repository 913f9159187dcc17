"""From `--draft-model PATH` to a draft model beside the served one."""

from __future__ import annotations

import torch

from firsttoken_runtime import memory
from firsttoken_runtime.engine.draft import DraftModel
from firsttoken_runtime.model.config import ModelConfig, read_config
from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.load import kv_bytes_per_token, load_model
from firsttoken_runtime.model.runner import Chunk, ModelRunner
from firsttoken_runtime.model.tokenizer import Tokenizer, load_tokenizer

# Of the served model's KV pool, what the draft's own gets on top. A sequence without pages there goes
# without proposals, so it need not hold everybody.
_POOL_SHARE = 8


def check_draft(path: str, served: str) -> ModelConfig:
    """The draft's configuration. Raises ModelError when its tokens are not those of the served model."""
    config = read_config(path)
    problem = difference(load_tokenizer(path), load_tokenizer(served))
    if problem:
        raise ModelError(
            f"--draft-model {path}: it needs the vocabulary of the served model, and has another: {problem}; "
            "take a smaller model of the same family"
        )
    return config


def difference(draft: Tokenizer, served: Tokenizer) -> str | None:
    """The first token in which two vocabularies differ, in words; None when they are the same."""
    if draft.vocab_size != served.vocab_size:
        return f"{draft.vocab_size} tokens, and not {served.vocab_size}"
    for token in range(served.vocab_size):
        ours, theirs = draft.token_bytes(token), served.token_bytes(token)
        if ours != theirs:
            return f"token {token} is {ours!r}, and not {theirs!r}"
    return None


def load_draft(
    path: str,
    config: ModelConfig,
    served: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv: memory.Pool,
) -> tuple[DraftModel, str]:
    """The draft model, warm, and a line about it. kv: the served model's pool.

    Raises ModelError, and memory.PoolError when its pool is not there.
    """
    model = load_model(path, device, dtype)
    token_bytes = kv_bytes_per_token(config, dtype)
    tokens = min(kv.bytes // _POOL_SHARE // token_bytes, kv.tokens)
    pool = memory.pool(max(tokens, 2 * kv.page_tokens) * token_bytes, kv.page_tokens, token_bytes)
    if device.type == "cpu":
        memory.must_be_there(pool.bytes, memory.available_bytes())
    runner = ModelRunner(model, pool.pages, pool.page_tokens)
    runner.run([Chunk([0] * pool.page_tokens, 0, [0], 1)])
    runner.run([Chunk([0], pool.page_tokens, [0, 1], 1)])
    vocab_size = min(config.vocab_size, served.vocab_size)
    draft = DraftModel(runner, pool.pages, pool.page_tokens, config.max_length, vocab_size)
    return draft, f"draft model: {config.architecture}, {config.layers} layers, {pool.describe()}"
