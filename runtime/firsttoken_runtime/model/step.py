"""One step's work as tensors: which tokens, where they stand, where their KV goes, who sees what.

Tokens of all chunks lie one after another, single-token chunks (decoding sequences) first, so that every
linear layer runs once per step. Attention then goes segment by segment:

    rows      0 … d-1            decode groups, sorted by context length, each padded to its longest
    rows      d … T-1            one prefill segment per longer chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A decode group is cut where contexts get shorter than half its longest, unless that is short anyway: padding
# costs memory traffic, another group costs a few calls per layer.
_PADDING_SHARE, _PADDING_FREE_TOKENS = 0.5, 256


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to compute in a step.

    Positions start … start + len(token_ids) - 1 are computed; the KV of earlier positions is in the pages.
    pages: the sequence's page table; pages[i] holds positions i * page_tokens … (i + 1) * page_tokens - 1.
    sample: return logits of the chunk's last token.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Pages:
    """Which pages to gather: a run of neighbours needs no copy.

    first, count: the run when `index` is None. index: int64 [sequences * pages per sequence].
    """

    first: int
    count: int
    index: Tensor | None


@dataclass(frozen=True)
class Prefill:
    """Attention of one chunk. Rows first … first + length - 1 of the step.

    pages None: the chunk starts the sequence, and its keys and values are those of its own rows.
    context: gathered tokens to look at; mask [length, context], None for plain causal order.
    """

    first: int
    length: int
    pages: Pages | None
    context: int
    mask: Tensor | None


@dataclass(frozen=True)
class Decode:
    """Attention of single-token chunks. Rows first … first + sequences - 1 of the step.

    mask [sequences, 1, 1, context], None when all see the whole context.
    page_table [sequences, most pages] int32 and lengths [sequences] int32: only for the fused kernel.
    """

    first: int
    sequences: int
    pages: Pages
    context: int
    mask: Tensor | None
    page_table: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class StepPlan:
    """token_ids, positions, slots: int64 [T]. sampled: int64 [n], rows whose logits are asked for, in chunk
    order; None when it is every row as it stands. segments: per window of the model's layers."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor | None
    samples: int
    segments: dict[int | None, list[Prefill | Decode]]


@dataclass(frozen=True)
class PlanSettings:
    """windows: the distinct windows of the model's layers. fused_decode: leave decode attention to the paged
    kernel, which takes all sequences at once (only without windows)."""

    page_tokens: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    fused_decode: bool = False


def plan_step(chunks: Sequence[Chunk], settings: PlanSettings) -> StepPlan:
    """Lay out one step. Raises ValueError when a chunk is empty or its page table too short."""
    for chunk in chunks:
        _check(chunk, settings.page_tokens)
    single = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
    longer = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) > 1]
    single.sort(key=lambda i: -chunks[i].end)
    order = single + longer
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_row: dict[int, int] = {}
    for i in order:
        chunk = chunks[i]
        tokens.extend(chunk.token_ids)
        positions.extend(range(chunk.start, chunk.end))
        slots.extend(_slots(chunk, settings.page_tokens))
        last_row[i] = len(tokens) - 1
    wanted = [last_row[i] for i, chunk in enumerate(chunks) if chunk.sample]
    device = settings.device
    segments = {
        window: _segments([chunks[i] for i in single], [chunks[i] for i in longer], window, settings)
        for window in settings.windows
    }
    return StepPlan(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        sampled=None if wanted == list(range(len(tokens))) else torch.tensor(wanted, device=device),
        samples=len(wanted),
        segments=segments,
    )


def _check(chunk: Chunk, page_tokens: int) -> None:
    if not chunk.token_ids or chunk.start < 0:
        raise ValueError("a chunk needs at least one token and a start of 0 or more")
    if len(chunk.pages) * page_tokens < chunk.end:
        raise ValueError(
            f"{len(chunk.pages)} pages of {page_tokens} tokens do not hold positions up to {chunk.end - 1}"
        )


def _slots(chunk: Chunk, page_tokens: int) -> list[int]:
    if len(chunk.token_ids) == 1:
        page, offset = divmod(chunk.start, page_tokens)
        return [chunk.pages[page] * page_tokens + offset]
    first, last = chunk.start // page_tokens, (chunk.end - 1) // page_tokens
    held = [
        page * page_tokens + offset for page in chunk.pages[first : last + 1] for offset in range(page_tokens)
    ]
    skipped = chunk.start - first * page_tokens
    return held[skipped : skipped + len(chunk.token_ids)]


def _segments(
    single: Sequence[Chunk], longer: Sequence[Chunk], window: int | None, settings: PlanSettings
) -> list[Prefill | Decode]:
    segments: list[Prefill | Decode] = []
    row = 0
    fused = settings.fused_decode and window is None
    for group in [list(single)] if fused and single else _groups(single, window):
        segments.append(_decode(row, group, window, settings, fused))
        row += len(group)
    for chunk in longer:
        segments.append(_prefill(row, chunk, window, settings))
        row += len(chunk.token_ids)
    return segments


def _visible(chunk: Chunk, window: int | None) -> int:
    return chunk.end if window is None else min(chunk.end, window)


def _groups(single: Sequence[Chunk], window: int | None) -> list[list[Chunk]]:
    groups: list[list[Chunk]] = []
    for chunk in single:  # longest first
        seen = _visible(chunk, window)
        longest = _visible(groups[-1][0], window) if groups else 0
        if groups and (longest <= _PADDING_FREE_TOKENS or seen >= longest * _PADDING_SHARE):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _decode(
    row: int, group: Sequence[Chunk], window: int | None, settings: PlanSettings, fused: bool
) -> Decode:
    size = settings.page_tokens
    # Positions before `starts` are outside the window; whole pages of them are not gathered.
    starts = [0 if window is None else max(0, chunk.end - window) for chunk in group]
    tables = [
        chunk.pages[start // size : -(-chunk.end // size)] for chunk, start in zip(group, starts, strict=True)
    ]
    first = [start - start // size * size for start in starts]
    last = [chunk.end - start // size * size for chunk, start in zip(group, starts, strict=True)]
    context, most = max(last), max(len(table) for table in tables)
    mask = None
    if any(begin > 0 for begin in first) or any(end < context for end in last):
        mask = _decode_mask(first, last, context, settings)
    # Padding points at page 0, whatever it holds: the mask hides it, and pool memory is always finite.
    flat = [page for table in tables for page in (*table, *[0] * (most - len(table)))]
    if not fused:
        return Decode(row, len(group), _pages(flat, settings), context, mask)
    table = torch.tensor(flat, dtype=torch.int32, device=settings.device).view(len(group), most)
    lengths = torch.tensor(last, dtype=torch.int32, device=settings.device)
    return Decode(row, len(group), Pages(0, 0, None), context, None, table, lengths)


def _prefill(row: int, chunk: Chunk, window: int | None, settings: PlanSettings) -> Prefill:
    length, size = len(chunk.token_ids), settings.page_tokens
    narrow = window is not None and chunk.end > window
    if chunk.start == 0 and not narrow:
        return Prefill(row, length, None, length, None)
    skipped = 0 if window is None else max(0, chunk.start + 1 - window) // size * size
    context = chunk.end - skipped
    mask = torch.full((length, context), float("-inf"), dtype=settings.dtype, device=settings.device)
    mask.triu_(chunk.start - skipped + 1)  # a query sees itself and what came before
    if window is not None and narrow:
        mask += torch.full_like(mask, float("-inf")).tril_(chunk.start - skipped - window)
    if chunk.start == 0:
        return Prefill(row, length, None, context, mask)
    table = chunk.pages[skipped // size : -(-chunk.end // size)]
    return Prefill(row, length, _pages(table, settings), context, mask)


def _decode_mask(first: Sequence[int], last: Sequence[int], context: int, settings: PlanSettings) -> Tensor:
    """[sequences, 1, 1, context]: 0 from first to last of a row, -inf elsewhere.

    In numpy, which does such small work on one thread: waking PyTorch's for it costs more than the work.
    """
    mask = np.full((len(first), context), -np.inf, dtype=np.float32)
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        mask[row, begin:end] = 0.0
    return torch.from_numpy(mask).to(settings.device, settings.dtype)[:, None, None]


def _pages(table: Sequence[int], settings: PlanSettings) -> Pages:
    first, count = table[0], len(table)
    if list(table) == list(range(first, first + count)):
        return Pages(first, count, None)
    return Pages(first, count, torch.tensor(table, device=settings.device))
