"""Lengths from a distribution or a file, arrivals from traces as they are published."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.lengths import MOST_TOKENS, parse_lengths
from firsttoken_runtime.measure.statistics import mean
from firsttoken_runtime.measure.traces import Arrival, read_trace


def draws(text: str, count: int = 4000) -> list[int]:
    source, lengths = random.Random(1), parse_lengths(text)
    return [lengths.draw(source) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", 512),
        ("uniform:100:300", 200),
        ("normal:500:50", 500),
        ("lognormal:1155:900", 1155),
        ("exponential:211", 211),
    ],
)
def test_a_distribution_has_the_mean_it_says(text: str, expected: float) -> None:
    assert mean(draws(text)) == pytest.approx(expected, rel=0.06)


def test_a_uniform_one_keeps_its_bounds() -> None:
    found = draws("uniform:3:5")
    assert set(found) == {3, 4, 5}


@given(
    st.sampled_from(("normal:10:500", "lognormal:5:900", "exponential:1", "uniform:1:1")), st.integers(0, 999)
)
def test_a_length_is_at_least_one_token(text: str, seed: int) -> None:
    assert 1 <= parse_lengths(text).draw(random.Random(seed)) <= MOST_TOKENS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "many",
        "uniform:1",
        "uniform:9:3",
        "normal:1:2:3",
        "zipf:3:4",
        "normal:nan:1",
        "1e9",
        "uniform:0:5",
    ],
)
def test_a_bad_length_is_told_how_to_be_written(text: str) -> None:
    with pytest.raises(BenchError, match="uniform:LOW:HIGH"):
        parse_lengths(text)


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_reduced_azure_trace(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", "arrival_seconds,prompt_tokens,output_tokens\n2.0,374,44\n6.5,396,109\n")
    assert read_trace(path) == [Arrival(0.0, 374, 44), Arrival(4.5, 396, 109)]


def test_the_azure_trace_as_published(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    path = write(tmp_path, "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    first, second = read_trace(path)
    assert (first.at_seconds, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_seconds == pytest.approx(4.314579, abs=1e-5)


def test_burstgpt_without_its_failed_requests(tmp_path: Path) -> None:
    heading = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,1,2,ChatGPT,472,18,490,Conversation log\n9,2,0,GPT-4,100,0,100,Conversation log\n"
    path = write(tmp_path, "t.csv", heading + rows)
    assert read_trace(path) == [Arrival(0.0, 472, 18)]


def test_a_mooncake_trace_with_its_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [7, 8, 12]},
    ]
    path = write(tmp_path, "t.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert read_trace(path) == [Arrival(0.0, 1100, 50, (7, 8, 12)), Arrival(3.0, 600, 5, (7, 9))]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "a,b\n1,2\n", "line 2: needs arrival_seconds"),
        ("t.csv", "arrival_seconds,prompt_tokens,output_tokens\n0,5,5\n1,x,5\n", "line 3"),
        ("t.csv", "", "no request"),
        ("t.jsonl", '{"timestamp": 0}', "line 1"),
        ("t.jsonl", "[1]", "line 1"),
        ("t.jsonl", "{", "cannot be read as a trace"),
    ],
)
def test_a_bad_trace_is_told_where(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        read_trace(write(tmp_path, name, text))
