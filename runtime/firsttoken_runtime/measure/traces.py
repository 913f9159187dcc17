"""Request traces: arrival times and lengths of real traffic, no texts.

CSV with a heading: `arrival_seconds,prompt_tokens,output_tokens`, or the columns of the Azure LLM inference
traces (TIMESTAMP, ContextTokens, GeneratedTokens) or of BurstGPT (Timestamp, Request tokens, Response
tokens). JSONL as Mooncake publishes it: `timestamp` in milliseconds, `input_length`, `output_length`, and
`hash_ids`, which name the blocks of 512 tokens that a prompt shares with others.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from firsttoken_runtime.measure.client import BenchError

BLOCK_TOKENS = 512
_ARRIVAL = ("arrival_seconds", "timestamp")
_PROMPT = ("prompt_tokens", "contexttokens", "request tokens", "input_length", "input_tokens")
_OUTPUT = ("output_tokens", "generatedtokens", "response tokens", "output_length")


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. at_seconds: after the first one. blocks: ids of its shared blocks, in order."""

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a trace in the order they came, the first at 0 s.

    Raises BenchError when the file cannot be read or a row is not understood (with its number).
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: Iterable[tuple[int, Mapping[str, Any]]]
            if path.suffix in (".jsonl", ".ndjson", ".json"):
                rows = ((number, json.loads(line)) for number, line in enumerate(file, 1) if line.strip())
                found = [_arrival(path, number, row, 1000.0) for number, row in rows]
            else:
                rows = enumerate(csv.DictReader(file), 2)
                found = [_arrival(path, number, row, 1.0) for number, row in rows]
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise BenchError(f"{path} cannot be read as a trace: {error}") from None
    # A request without a prompt or an answer is a failed one in these traces; there is nothing to send.
    found = [arrival for arrival in found if arrival.prompt_tokens > 0 and arrival.output_tokens > 0]
    if not found:
        raise BenchError(f"{path} has no request in it")
    found.sort(key=lambda arrival: arrival.at_seconds)
    return [replace(arrival, at_seconds=arrival.at_seconds - found[0].at_seconds) for arrival in found]


def _arrival(path: Path, number: int, row: Mapping[str, Any], per_second: float) -> Arrival:
    try:
        fields = {str(key).strip().lower(): value for key, value in row.items()}
        blocks = tuple(int(block) for block in fields.get("hash_ids") or ())
        prompt, output = int(_field(fields, _PROMPT)), int(_field(fields, _OUTPUT))
        return Arrival(_seconds(_field(fields, _ARRIVAL), per_second), prompt, output, blocks)
    except (LookupError, ValueError, TypeError, AttributeError):
        raise BenchError(
            f"{path}, line {number}: needs arrival_seconds, prompt_tokens and output_tokens (or timestamp, "
            f"input_length and output_length), and has {row}"
        ) from None


def _field(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if fields.get(name) not in (None, ""):
            return fields[name]
    raise LookupError(names)


def _seconds(value: Any, per_second: float) -> float:
    """A number, or a date and time (the Azure traces have seven digits of a second: the last is dropped)."""
    try:
        return float(value) / per_second
    except (TypeError, ValueError):
        whole, _, fraction = str(value).partition(".")
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}" if fraction else whole).timestamp()
