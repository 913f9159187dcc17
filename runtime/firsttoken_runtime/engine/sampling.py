"""From logits to tokens.

Order: logit bias, penalties, what is forbidden, temperature, top-k, top-p (of what top-k left), min-p. Log
probabilities are the model's own, of the logits as they came, so that they compare between requests. A draw
needs one uniform number, made from the request's seed and the token's position alone: what else is in the
batch, preemption and chunking do not change it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from firsttoken_runtime.engine.draws import draw_plain, draw_truncated
from firsttoken_runtime.engine.requests import SamplingParams

_MASK = (1 << 64) - 1
_TRUNCATION_WIDTHS = (256, 4096, sys.maxsize)  # tokens sorted where top-k, top-p or min-p cut


@dataclass(frozen=True, slots=True)
class Row:
    """What picking one token takes.

    position: of the token to pick, in the whole sequence. forbidden: token ids, or bool [vocab], that cannot
    come here.
    """

    params: SamplingParams
    seed: int
    position: int
    counts: TokenCounts | None = None
    forbidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """token is None when the logits had no number to choose by (NaN, +inf or all -inf)."""

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TokenCounts:
    """Bias and penalties of one request: which tokens were said, and how often in the output.

    Index tensors that grow with the distinct tokens: a step costs the distinct tokens, not the vocabulary.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._slots: dict[int, int] = {}
        self._ids = torch.zeros(64, dtype=torch.long)
        self._output_counts = torch.zeros(64, dtype=torch.float32)
        if params.penalised:
            distinct = list(dict.fromkeys(prompt))
            self._slots = {token: slot for slot, token in enumerate(distinct)}
            self._ids = torch.cat([torch.tensor(distinct, dtype=torch.long), self._ids])
            self._output_counts = torch.zeros(len(self._ids), dtype=torch.float32)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.penalised or bool(params.logit_bias)

    def add(self, token: int) -> None:
        """Count a generated token."""
        if not self._params.penalised:
            return
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
                self._output_counts = torch.cat([self._output_counts, torch.zeros_like(self._output_counts)])
            self._ids[slot] = token
        self._output_counts[slot] += 1

    def apply(self, logits: torch.Tensor) -> None:
        """Change the row float32 [vocab] in place."""
        if len(self._bias_ids):
            logits.index_add_(0, self._bias_ids.to(logits.device), self._bias.to(logits.device))
        if not self._slots:
            return
        params = self._params
        ids = self._ids[: len(self._slots)].to(logits.device)
        counts = self._output_counts[: len(self._slots)].to(logits.device)
        values = logits[ids]
        penalty = params.repetition_penalty
        values = torch.where(values > 0, values / penalty, values * penalty)
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        logits[ids] = values


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone (splitmix64)."""
    value = (_mix(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    return (_mix(value) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """Pick a token per row of float32 [rows, vocab]; greedy ties go to the lowest token id."""
    if not rows:
        return []
    logprobs = _logprobs_wanted(logits, rows)
    adjusted = [i for i, row in enumerate(rows) if row.counts is not None or row.forbidden is not None]
    if adjusted:
        logits = logits.clone()
        for i in adjusted:
            counts = rows[i].counts
            if counts is not None:
                counts.apply(logits[i])
            if (forbidden := rows[i].forbidden) is not None:
                _forbid(logits[i], forbidden.to(logits.device))
    chosen, best = _greedy(logits)
    usable = [math.isfinite(value) for value in best]
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0 and usable[i]]
    plain = [i for i in drawn if not _truncated(rows[i].params)]
    cut = [i for i in drawn if _truncated(rows[i].params)]
    for indices, draw in ((plain, _draw_plain), (cut, _draw_truncated)):
        if indices:
            part = logits if len(indices) == len(rows) else logits[indices]
            for i, token in zip(indices, draw(part, [rows[i] for i in indices]), strict=True):
                chosen[i] = token
    if logprobs is None:
        return [Sampled(token if ok else None) for token, ok in zip(chosen, usable, strict=True)]
    return [
        Sampled(None)
        if not usable[i]
        else Sampled(chosen[i])
        if i not in logprobs
        else _with_logprobs(chosen[i], logprobs[i], row.params.logprobs or 0)
        for i, row in enumerate(rows)
    ]


def _forbid(row: torch.Tensor, forbidden: torch.Tensor) -> None:
    if forbidden.dtype == torch.bool:
        row.masked_fill_(forbidden, float("-inf"))
    else:
        row.index_fill_(0, forbidden, float("-inf"))


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """First place of the largest logit of each row, and the logit; a NaN counts as largest."""
    if logits.device.type == "cpu":
        values = logits.numpy()  # its argmax is several times as fast as torch's
        places = values.argmax(axis=-1)
        return places.tolist(), values[np.arange(len(places)), places].tolist()
    best, tokens = torch.max(logits, dim=-1)
    return tokens.tolist(), best.tolist()


def _truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _draw_plain(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Temperature only: inverse of the distribution function, in the order of token ids."""
    weights = _weights(logits, rows)
    if weights.device.type == "cpu":
        return draw_plain(weights.numpy(), _numbers(rows))
    return _invert(weights.double().cumsum(-1), rows)


def _draw_truncated(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """top-k, top-p, min-p: the same on the tokens that are left, in falling order of probability.

    Equal weights, which 16 bit logits have many of, are in order of token ids: which of them topk returns,
    and in which order, depends on its width and so on the other rows.
    """
    weights = _weights(logits, rows)
    if weights.device.type == "cpu":
        return draw_truncated(weights.numpy(), [row.params for row in rows], _numbers(rows))
    return _draw_sorted(weights, rows)


def _draw_sorted(weights: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """`draw_truncated` for a device that sorts faster than it could hand the weights over."""
    everything = weights.double().sum(-1).tolist()
    chosen: dict[int, int] = {}
    undecided = list(range(len(rows)))
    for width in _TRUNCATION_WIDTHS:  # most cuts lie high up; widen for the rows where they do not
        largest = max(rows[i].params.top_k for i in undecided)
        width = min(max(width, largest + 1), weights.shape[-1])
        values, tokens = _falling(weights[undecided], width)
        for place, i in enumerate(undecided):
            row, least = values[place], float(values[place, -1])
            # Beyond the width there is more of the least weight, unless that is zero and never drawn.
            complete = width == weights.shape[-1] or least == 0.0
            sums = _kept(row if complete else row[row > least], everything[i], rows[i].params, complete)
            if sums is not None:
                chosen[i] = int(tokens[place, _invert(sums.unsqueeze(0), [rows[i]])[0]])
        undecided = [i for i in undecided if i not in chosen]
        if not undecided:
            break
    return [chosen[i] for i in range(len(rows))]


def _falling(weights: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest weights of each row and their tokens, [rows, width], equal ones by token id."""
    values, tokens = weights.topk(width, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, order)


def _kept(
    weights: torch.Tensor, everything: float, params: SamplingParams, complete: bool
) -> torch.Tensor | None:
    """Running sum (float64) of the falling weights that survive the cuts; None when more are needed."""
    if not complete and len(weights) < max(params.top_k, 1):
        return None
    within_k = weights[: params.top_k] if params.top_k > 0 else weights
    sums = within_k.double().cumsum(-1)
    settled = complete or params.top_k > 0
    mass = float(sums[-1]) if params.top_k > 0 else everything
    count = len(within_k)
    if params.top_p < 1.0:
        # A token stays while those before it have not reached top_p.
        count = int(torch.searchsorted(sums, params.top_p * mass)) + 1
        if count > len(within_k) and not settled:
            return None
    if params.min_p > 0.0:
        above = int((within_k >= params.min_p * within_k[0]).sum())
        if above == len(within_k) and count >= above and not settled:
            return None
        count = min(count, above)
    elif params.top_p >= 1.0 and not settled:
        return None
    return sums[: max(min(count, len(within_k)), 1)]


def _weights(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """exp(logits / temperature), scaled so that the largest is 1: float32 [rows, vocab]."""
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.div_(temperatures.clamp_min(1e-5).unsqueeze(-1)).exp_()


def _numbers(rows: Sequence[Row]) -> list[float]:
    return [uniform(row.seed, row.position) for row in rows]


def _invert(sums: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Place of each row's uniform number in the running sums float64 [rows, n]."""
    numbers = torch.tensor(_numbers(rows), dtype=torch.float64)
    marks = numbers.to(sums.device).unsqueeze(-1) * sums[:, -1:]
    # right: a token of weight zero is never picked, also when the number is 0
    places = torch.searchsorted(sums, marks, right=True).squeeze(-1)
    return places.clamp_max(sums.shape[-1] - 1).tolist()


def _logprobs_wanted(logits: torch.Tensor, rows: Sequence[Row]) -> dict[int, torch.Tensor] | None:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    return dict(zip(wanted, torch.log_softmax(logits[wanted].float(), dim=-1), strict=True))


def _with_logprobs(token: int, logprobs: torch.Tensor, alternatives: int) -> Sampled:
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)
