"""Log probabilities of a prompt's own tokens (`prompt_logprobs`), a slice of the prompt at a time.

Logits of a whole prompt would be gigabytes: 4,000 tokens of a vocabulary of 150,000 are 2.4 GB in float32. So
a sequence that wants scores computes at most MOST_ROWS of its prompt in a step, and its scores leave with it.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch

from firsttoken_runtime.engine.requests import NO_TOKEN, NOT_GENERATED, TokenEvent, TokenScore
from firsttoken_runtime.engine.scheduler import Step
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.model.runner import Chunk

MOST_ROWS = 256  # of one step, over all sequences that are scored in it
FEWEST_ROWS = 16  # of one sequence, however many there are
_SLICE = 64


def scored_tokens(sequence: Sequence) -> int:
    """Prompt tokens whose scores are still to be told."""
    if sequence.request.sampling.prompt_logprobs is None:
        return 0
    return max(sequence.prompt_len - 1 - sequence.scored, 0)


@dataclass
class ScoreBudget:
    """Rows of logits left for scores in one step."""

    rows: int = MOST_ROWS

    def most_tokens(self, sequence: Sequence) -> int | None:
        """How many tokens a sequence may compute; None when it is not scored."""
        return max(self.rows, FEWEST_ROWS) if scored_tokens(sequence) else None

    def take(self, sequence: Sequence, start: int, end: int) -> int:
        """Rows that the positions start to end - 1 of a sequence need; those told before are left out."""
        rows = max(end - max(start, sequence.scored), 0)
        self.rows -= rows
        return rows


def tell_scores(
    step: Step, chunks: list[Chunk], logits: torch.Tensor, events: list[TokenEvent]
) -> torch.Tensor:
    """Add the step's scores of prompt tokens to `events`; returns the rows of logits to sample from."""
    if not any(scored_tokens(grant.sequence) for grant in step.prefills):
        return logits
    row = sum(chunk.logits for chunk in chunks[: len(step.decodes)])
    kept = list(range(row))
    for grant, chunk in zip(step.prefills, chunks[len(step.decodes) :], strict=True):
        sequence = grant.sequence
        if scored_tokens(sequence):
            found = score(sequence, chunk, logits[row : row + chunk.logits])
            events.append(TokenEvent(sequence.id, NO_TOKEN, NOT_GENERATED, prompt=found))
        row += chunk.logits
        if chunk.end == len(sequence.tokens):
            kept.append(row - 1)
    return logits[kept]


def score(sequence: Sequence, chunk: Chunk, logits: torch.Tensor) -> tuple[TokenScore, ...]:
    """Scores that a computed chunk adds; logits float32 [chunk.logits, vocab] of its last positions.

    Position p has the view of token p + 1, so the last position of the prompt scores nothing.
    """
    first, end = max(chunk.start, sequence.scored), min(chunk.end, sequence.prompt_len - 1)
    sequence.scored = max(sequence.scored, end)
    sequence.hit_version = -1  # it may find more pages now, should it be preempted
    top = sequence.request.sampling.prompt_logprobs or 0
    offset = chunk.logits - (chunk.end - first)
    return scores(logits[offset:], sequence.tokens[first + 1 : end + 1], top)


@torch.inference_mode()
def scores(logits: torch.Tensor, tokens: abc.Sequence[int], top: int) -> tuple[TokenScore, ...]:
    """Scores of `tokens` [n]; row i of the logits float32 [n or more, vocab] is the view of token i."""
    found: list[TokenScore] = []
    for start in range(0, len(tokens), _SLICE):
        wanted = tokens[start : start + _SLICE]
        logprobs = torch.log_softmax(logits[start : start + len(wanted)].float(), dim=-1)
        chosen = logprobs.gather(-1, torch.tensor(wanted, device=logprobs.device).unsqueeze(-1))
        ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(wanted)
        if top:
            values, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
            tops = [
                tuple(zip(row, of, strict=True))
                for row, of in zip(ids.tolist(), values.tolist(), strict=True)
            ]
        found.extend(
            TokenScore(value, rank, likeliest)
            for value, rank, likeliest in zip(chosen.squeeze(-1).tolist(), ranks, tops, strict=True)
        )
    return tuple(found)
