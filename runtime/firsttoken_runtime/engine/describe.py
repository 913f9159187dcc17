"""What the engine says of itself and of its requests, as the JSON of state and events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.settings import EngineSettings
from firsttoken_runtime.engine.snapshot import Snapshot


def kv(settings: EngineSettings, snapshot: Snapshot, pages: int) -> dict[str, Any]:
    """How KV is stored now: precision, bytes per token, and the pool in pages and bytes."""
    budget, table = settings.kv, snapshot.kv_table
    if budget is None or table is None:
        page_bytes = settings.page_bytes or 0
        token_bytes = page_bytes // settings.page_tokens
    else:
        page_bytes, token_bytes = budget.shape.page_bytes(table), budget.shape.token_bytes(table)
    return {
        "precision": snapshot.kv_precision,
        "bytes_per_token": token_bytes,
        "pages": pages,
        "tokens": pages * settings.page_tokens,
        "pool_bytes": pages * page_bytes,
    }


def requests(sequences: Iterable[Sequence], now_ns: int) -> list[dict[str, Any]]:
    """One entry per request, in the order given."""
    return [
        {
            "id": sequence.id,
            "state": _state(sequence),
            "priority": sequence.request.priority,
            "prompt_tokens": sequence.prompt_len,
            "computed_tokens": sequence.computed,
            "cached_tokens": sequence.cached_tokens,
            "output_tokens": sequence.output_len,
            "waited_ms": round(sequence.waited(now_ns) / 1e6, 3),
        }
        for sequence in sequences
    ]


def account(sequence: Sequence) -> dict[str, Any]:
    """What a TokenEvent says of the way to the first token."""
    return {
        "queued_ns": sequence.queued_ns,
        "admitted_ns": sequence.admitted_ns,
        "prefill_start_ns": sequence.prefill_start_ns,
        "prefill_end_ns": sequence.prefill_end_ns,
        "computing_ns": sequence.computing_ns,
        "chunks": sequence.chunks,
        "preemptions": sequence.preemptions,
        "cached_tokens": sequence.cached_tokens,
    }


def _state(sequence: Sequence) -> str:
    if sequence.handle is None:
        return "waiting"
    return "prefill" if sequence.in_prefill else "decode"
