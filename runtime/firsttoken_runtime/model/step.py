"""One step's work as tensors: which tokens, where they stand, where their KV goes, who sees what.

Tokens of all chunks lie one after another, single-token chunks (decoding sequences) first, so that every
linear layer runs once per step. Attention then goes segment by segment:

    rows      0 … d-1            decode groups, sorted by context length, each padded to its longest
    rows      d … T-1            one prefill segment per longer chunk, more where it is longer than the window

Only pages that a query of the segment sees are gathered: those of the sinks, and those of its window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from firsttoken_runtime.model.windows import LayerWindows, Window

# A decode group is cut where contexts get shorter than half its longest, unless that is short anyway: padding
# costs memory traffic, another group costs a few calls per layer.
_PADDING_SHARE, _PADDING_FREE_TOKENS = 0.5, 256
# A chunk longer than the window is attended in blocks of a window's length, so that the work grows with
# length x window; but not of fewer tokens than this.
_LEAST_BLOCK = 256


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to compute in a step.

    Positions start … start + len(token_ids) - 1 are computed; the KV of earlier positions is in the pages.
    pages: the sequence's page table; pages[i] holds positions i * page_tokens … (i + 1) * page_tokens - 1.
    A page that no layer sees any more may be negative.
    logits: of how many of the chunk's last tokens the logits are wanted, 0 to len(token_ids).
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: int

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
    """Attention of one chunk, or a block of one. Rows first … first + length - 1 of the step.

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
    order; None when it is every row as it stands. windows: of each layer. segments: of each distinct
    window."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor | None
    samples: int
    windows: LayerWindows
    segments: dict[Window | None, list[Prefill | Decode]]


@dataclass(frozen=True)
class PlanSettings:
    """windows: of each layer. fused_decode: leave decode attention to the paged kernel, which takes all
    sequences at once (only without windows)."""

    page_tokens: int
    windows: LayerWindows
    dtype: torch.dtype
    device: torch.device
    fused_decode: bool = False


def plan_step(chunks: Sequence[Chunk], settings: PlanSettings) -> StepPlan:
    """Lay out one step. Raises ValueError when a chunk is empty, its page table too short, or more logits are
    wanted than it has tokens."""
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
    wanted = [
        row
        for i, chunk in enumerate(chunks)
        for row in range(last_row[i] + 1 - chunk.logits, last_row[i] + 1)
    ]
    device = settings.device
    segments = {
        window: _segments([chunks[i] for i in single], [chunks[i] for i in longer], window, settings)
        for window in dict.fromkeys(settings.windows)
    }
    return StepPlan(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        sampled=None if wanted == list(range(len(tokens))) else torch.tensor(wanted, device=device),
        samples=len(wanted),
        windows=settings.windows,
        segments=segments,
    )


def _check(chunk: Chunk, page_tokens: int) -> None:
    if not chunk.token_ids or chunk.start < 0:
        raise ValueError("a chunk needs at least one token and a start of 0 or more")
    if not 0 <= chunk.logits <= len(chunk.token_ids):
        raise ValueError(f"logits of {chunk.logits} tokens asked for, the chunk has {len(chunk.token_ids)}")
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
    single: Sequence[Chunk], longer: Sequence[Chunk], window: Window | None, settings: PlanSettings
) -> list[Prefill | Decode]:
    segments: list[Prefill | Decode] = []
    row = 0
    fused = settings.fused_decode and window is None
    for group in [list(single)] if fused and single else _groups(single, window):
        segments.append(_decode(row, group, window, settings, fused))
        row += len(group)
    for chunk in longer:
        block = len(chunk.token_ids) if window is None else max(window.tokens, _LEAST_BLOCK)
        for start in range(chunk.start, chunk.end, block):
            end = min(start + block, chunk.end)
            segments.append(_prefill(row, chunk.pages, start, end, window, settings))
            row += end - start
    return segments


def _visible(chunk: Chunk, window: Window | None) -> int:
    return chunk.end if window is None else min(chunk.end, window.tokens + window.sinks)


def _groups(single: Sequence[Chunk], window: Window | None) -> list[list[Chunk]]:
    groups: list[list[Chunk]] = []
    for chunk in single:  # longest first
        seen = _visible(chunk, window)
        longest = _visible(groups[-1][0], window) if groups else 0
        if groups and (longest <= _PADDING_FREE_TOKENS or seen >= longest * _PADDING_SHARE):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


@dataclass(frozen=True)
class _Span:
    """The pages that queries from one position on look at: 0 … sinks - 1, and all from `begin` on.

    Side by side, what lies behind the gap is `gap` tokens further left than its position says.
    """

    sinks: int
    begin: int
    page_tokens: int

    @property
    def gap(self) -> int:
        return (self.begin - self.sinks) * self.page_tokens

    def table(self, pages: Sequence[int], end: int) -> list[int]:
        """The page table without the gap, up to position end - 1."""
        last = -(-end // self.page_tokens)
        return [*pages[: self.sinks], *pages[self.begin : last]]


def _span(window: Window | None, position: int, page_tokens: int) -> _Span:
    if window is None:
        return _Span(0, 0, page_tokens)
    sinks, begin = -(-window.sinks // page_tokens), window.begin(position) // page_tokens
    return _Span(sinks, begin, page_tokens) if begin > sinks else _Span(0, 0, page_tokens)


def _decode(
    row: int, group: Sequence[Chunk], window: Window | None, settings: PlanSettings, fused: bool
) -> Decode:
    spans = [_span(window, chunk.start, settings.page_tokens) for chunk in group]
    tables = [span.table(chunk.pages, chunk.end) for chunk, span in zip(group, spans, strict=True)]
    last = [chunk.end - span.gap for chunk, span in zip(group, spans, strict=True)]
    context, most = max(last), max(len(table) for table in tables)
    mask = None
    if window is not None:
        first = [window.begin(chunk.start) - span.gap for chunk, span in zip(group, spans, strict=True)]
        if any(begin > window.sinks for begin in first) or min(last) < context:
            mask = _decode_mask(window.sinks, first, last, context, settings)
    elif min(last) < context:
        mask = _decode_mask(0, [0] * len(group), last, context, settings)
    # Padding points at page 0, whatever it holds: the mask hides it, and pool memory is always finite.
    flat = [page for table in tables for page in (*table, *[0] * (most - len(table)))]
    if not fused:
        return Decode(row, len(group), _pages(flat, settings), context, mask)
    table = torch.tensor(flat, dtype=torch.int32, device=settings.device).view(len(group), most)
    lengths = torch.tensor(last, dtype=torch.int32, device=settings.device)
    return Decode(row, len(group), Pages(0, 0, None), context, None, table, lengths)


def _prefill(
    row: int, pages: Sequence[int], start: int, end: int, window: Window | None, settings: PlanSettings
) -> Prefill:
    """Queries at positions start … end - 1, whose keys and values are in the pages already."""
    length = end - start
    narrow = window is not None and end > window.tokens
    if start == 0 and not narrow:
        return Prefill(row, length, None, length, None)
    span = _span(window, start, settings.page_tokens)
    context = end - span.gap
    if window is not None and narrow:
        mask = _window_mask(window, start, end, span, settings)
    else:
        mask = torch.full((length, context), float("-inf"), dtype=settings.dtype, device=settings.device)
        mask.triu_(start - span.gap + 1)  # a query sees itself and what came before
    if start == 0:
        return Prefill(row, length, None, context, mask)
    return Prefill(row, length, _pages(span.table(pages, end), settings), context, mask)


def _window_mask(window: Window, start: int, end: int, span: _Span, settings: PlanSettings) -> Tensor:
    """[end - start, context]: 0 where the query sees, -inf elsewhere."""
    positions = torch.arange(end - span.gap, device=settings.device)
    positions[span.sinks * settings.page_tokens :] += span.gap
    queries = torch.arange(start, end, device=settings.device)[:, None]
    seen = (positions > queries - window.tokens) & (positions <= queries)
    if window.sinks:
        seen |= (positions < window.sinks) & (positions <= queries)
    mask = torch.full(seen.shape, float("-inf"), dtype=settings.dtype, device=settings.device)
    return mask.masked_fill_(seen, 0.0)


def _decode_mask(
    sinks: int, first: Sequence[int], last: Sequence[int], context: int, settings: PlanSettings
) -> Tensor:
    """[sequences, 1, 1, context]: 0 for the first `sinks` and from first to last of a row, -inf elsewhere.

    In numpy, which does such small work on one thread: waking PyTorch's for it costs more than the work.
    """
    mask = np.full((len(first), context), -np.inf, dtype=np.float32)
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        mask[row, : min(sinks, end)] = 0.0
        mask[row, begin:end] = 0.0
    return torch.from_numpy(mask).to(settings.device, settings.dtype)[:, None, None]


def _pages(table: Sequence[int], settings: PlanSettings) -> Pages:
    first, count = table[0], len(table)
    if list(table) == list(range(first, first + count)):
        return Pages(first, count, None)
    return Pages(first, count, torch.tensor(table, device=settings.device))
