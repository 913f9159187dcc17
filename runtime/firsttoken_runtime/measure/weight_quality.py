"""What int8 weights change, against the same model in float32, on text of one's own.

    python -m firsttoken_runtime.measure.weight_quality --model MODEL FILE...

Every token of every text is predicted from those before it, by both. Printed: how often the likeliest token
is the same, the mean and the 99th percentile of the divergence of the distributions (Kullback-Leibler,
float32 to int8, in nats), and the perplexity of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from firsttoken_runtime.model.int8 import int8_obstacle
from firsttoken_runtime.model.load import load_model
from firsttoken_runtime.model.runner import Chunk, ModelRunner
from firsttoken_runtime.model.tokenizer import load_tokenizer

_PAGE_TOKENS = 16


def compare(exact: Tensor, found: Tensor, following: Tensor) -> dict[str, float]:
    """exact, found: logits [T, vocab]; following: int64 [T], the token that really came next."""
    log_exact, log_found = exact.log_softmax(-1), found.log_softmax(-1)
    divergence = (log_exact.exp() * (log_exact - log_found)).sum(-1)
    return {
        "tokens": len(following),
        "same_likeliest_token": (exact.argmax(-1) == found.argmax(-1)).double().mean().item(),
        "divergence_mean": divergence.mean().item(),
        "divergence_p99": divergence.quantile(0.99).item(),
        "perplexity_float32": _perplexity(log_exact, following),
        "perplexity_int8": _perplexity(log_found, following),
    }


def _perplexity(log_probabilities: Tensor, following: Tensor) -> float:
    return log_probabilities.gather(1, following[:, None]).mean().neg().exp().item()


def every_logit(runner: ModelRunner, texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits [sum of lengths - 1, vocab] of every position that has a next token."""
    pages = list(range(runner.total_pages))
    rows = [runner.run([Chunk(text[:-1], 0, pages, logits=len(text) - 1)]) for text in texts]
    return torch.cat(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What int8 weights change, against float32.")
    parser.add_argument("--model", required=True, help="a GGUF file or a folder in Hugging Face layout")
    parser.add_argument("--tokens", type=int, default=384, help="of each text, from its beginning")
    parser.add_argument("files", nargs="+", type=Path, help="UTF-8 texts")
    options = parser.parse_args(arguments)
    obstacle = int8_obstacle(torch.device("cpu"), torch.float32)
    if obstacle is not None:
        print(f"error: {obstacle}", file=sys.stderr)
        return 2
    tokenizer = load_tokenizer(options.model)
    texts = [tokenizer.encode(file.read_text("utf-8"))[: options.tokens] for file in options.files]
    texts = [text for text in texts if len(text) > 1]
    pages = -(-max(map(len, texts)) // _PAGE_TOKENS)
    logits = [
        every_logit(
            ModelRunner(load_model(options.model, "cpu", torch.float32, int8), pages, _PAGE_TOKENS), texts
        )
        for int8 in (False, True)
    ]
    following = torch.tensor([token for text in texts for token in text[1:]])
    print(json.dumps(compare(logits[0], logits[1], following), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
