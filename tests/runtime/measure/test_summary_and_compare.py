"""From answers to figures, and from two reports to a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.measure.client import BenchError, Sample
from firsttoken_runtime.measure.compare import Verdict, compare, judge, read_report
from firsttoken_runtime.measure.figures import Better, Figure, by_round, row
from firsttoken_runtime.measure.load import Outcome, Round
from firsttoken_runtime.measure.plan import Planned
from firsttoken_runtime.measure.prompts import Text
from firsttoken_runtime.measure.summary import Slo, errors, round_figures, warnings


def sample(ttft: float, total: float, tokens: int = 11, **more: Any) -> Sample:
    return Sample(ttft, total, tokens, "", prompt_tokens=100, output_tokens=tokens, **more)


def outcome(
    result: Sample | None, error: str | None = None, at: float | None = 0.0, sent: float = 0.0
) -> Outcome:
    return Outcome(Planned(at, Text(100, 0), 11), sent, 2.0, result, error)


def values(done: Round, slo: Slo = Slo()) -> dict[str, float]:
    return {entry.figure: entry.median for entry in round_figures("load", done, slo)}


def test_the_figures_of_a_round_follow_their_definitions() -> None:
    done = Round((outcome(sample(100, 300)), outcome(sample(200, 600)), outcome(None, "HTTP 503")), 2.0)
    found = values(done)
    assert found["TTFT P50"] == 150
    assert found["TPOT P50"] == pytest.approx((20 + 40) / 2)
    assert found["E2E P99"] == pytest.approx(597)
    assert found["requests"] == 1.0
    assert found["output"] == 11
    assert found["input and output"] == 111
    assert found["failed requests"] == 1
    assert errors([done]) == {"HTTP 503": 1}


def test_goodput_counts_good_requests_by_the_second_and_failures_as_bad() -> None:
    answers = [sample(100, 300), sample(200, 600), sample(100, 1000), sample(90, 90, tokens=1)]
    done = Round((*(outcome(answer) for answer in answers), outcome(None, "timeout")), 4.0)
    found = values(done, Slo(ttft_ms=100, tpot_ms=50))
    assert found["goodput"] == 2 / 4
    assert found["requests within the SLO"] == 40
    assert values(done, Slo(e2e_ms=600))["goodput"] == 3 / 4
    assert "goodput" not in values(done)


def test_the_servers_segments_add_up_beside_the_clients_ttft() -> None:
    timings = {"queue_ms": 1.0, "prefill_ms": 80.0, "decode_ms": 2.0, "transport_ms": 7.0, "ttft_ms": 90.0}
    done = Round(
        (outcome(sample(100, 300, timings=timings)), outcome(sample(110, 300, timings=timings))), 1.0
    )
    found = values(done)
    parts = [found[f"server: {name}, mean"] for name in ("queue", "prefill", "decode", "transport")]
    assert sum(parts) == found["server: TTFT, mean"] == 90
    assert found["outside the server (network and client), mean"] == 15
    assert found["server: TTFT, mean"] + 15 == found["TTFT mean"]


def test_a_round_in_which_nothing_succeeded_has_no_latency() -> None:
    found = values(Round((outcome(None, "timeout"),), 3.0))
    assert found["failed requests"] == 1
    assert found["output"] == 0
    assert not any(name.startswith(("TTFT", "TPOT", "ITL")) for name in found)


def test_a_late_client_a_warm_cache_and_fat_chunks_are_pointed_out() -> None:
    late = Sample(50, 100, 2, "", prompt_tokens=100, output_tokens=10, cached_tokens=60)
    rows = round_figures("load", Round((outcome(late, sent=0.4),), 1.0), Slo())
    cold, warm = warnings("load", rows, cold=True), warnings("load", rows, cold=False)
    assert ["client sent late" in cold[0], "60 %" in cold[1], "5.0 tokens" in cold[2]] == [True] * 3
    assert len(warm) == 2
    assert "60 %" not in " ".join(warnings("load", rows, cold=True, template_tokens=60))
    good = round_figures("load", Round((outcome(sample(50, 100)),), 1.0), Slo())
    assert warnings("load", good, cold=True) == []


def test_rounds_are_joined_by_figure() -> None:
    first, second = [row("a", "x", [1.0]), row("a", "y", [5.0])], [row("a", "x", [3.0])]
    joined = {entry.figure: entry.values for entry in by_round([first, second])}
    assert joined == {"x": (1.0, 3.0), "y": (5.0,)}


def test_the_worst_of_a_throughput_is_the_lowest() -> None:
    assert row("a", "output", [5, 9], "tokens/s").worst == 5
    assert row("a", "TTFT", [5, 9]).worst == 9


def test_a_figure_survives_its_json() -> None:
    entry = row("a", "output", [5, 9], "tokens/s")
    assert Figure.from_json(json.loads(json.dumps(entry.to_json()))) == entry


@pytest.mark.parametrize(
    ("before", "after", "unit", "verdict"),
    [
        ([100, 101, 102, 103], [80, 81, 82, 83], "ms", Verdict.BETTER),
        ([80, 81, 82, 83], [100, 101, 102, 103], "ms", Verdict.WORSE),
        ([50, 51, 52, 53], [60, 61, 62, 63], "tokens/s", Verdict.BETTER),
        ([60, 61, 62, 63], [50, 51, 52, 53], "tokens/s", Verdict.WORSE),
        ([100, 140, 90, 120], [95, 130, 85, 125], "ms", Verdict.NOISE),
        ([100.0, 100.1, 100.2, 100.3], [100.5, 100.6, 100.7, 100.8], "ms", Verdict.NOISE),  # under 1 %
        ([100, 101, 102], [1, 2, 3], "ms", Verdict.TOO_FEW),
    ],
)
def test_a_verdict_comes_from_the_spread_of_the_rounds(
    before: list[float], after: list[float], unit: str, verdict: Verdict
) -> None:
    assert judge(row("a", "x", before, unit), row("a", "x", after, unit)).verdict is verdict


spread = st.lists(st.floats(1, 1000), min_size=4, max_size=7)


@given(spread, spread)
def test_the_opposite_comparison_has_the_opposite_verdict(before: list[float], after: list[float]) -> None:
    opposite = {Verdict.BETTER: Verdict.WORSE, Verdict.WORSE: Verdict.BETTER, Verdict.NOISE: Verdict.NOISE}
    old, new = row("a", "x", before), row("a", "x", after)
    there, back = judge(old, new), judge(new, old)
    # 1 % of the one median is not 1 % of the other: near that edge the two may differ.
    if abs(abs(there.relative or 0) - 0.01) > 0.001:
        assert back.verdict is opposite[there.verdict]


@given(spread)
def test_a_report_is_within_noise_of_itself(values: list[float]) -> None:
    entry = row("a", "x", values)
    assert judge(entry, entry).verdict is Verdict.NOISE


def report(**parts: Any) -> dict[str, Any]:
    rows = [row("a", "TTFT", [1, 2, 3, 4]), row("a", "prompt", [5.0], "tokens", Better.NEITHER)]
    made = {"machine": {"cores": 2}, "server": {"model": "m"}, "load": {"seed": 0, "cache": "cold"}}
    return {**made, **parts, "rows": [entry.to_json() for entry in rows]}


def test_a_comparison_says_what_was_not_the_same_and_what_only_one_has() -> None:
    other = report(load={"seed": 1, "cache": "cold"}, server={"model": "n"})
    other["rows"].append(row("b", "TTFT", [1.0]).to_json())
    found = compare(report(), other)
    assert found["differences"] == ["model: m and n", "seed: 0 and 1"]
    assert found["only_after"] == ["b: TTFT"]
    assert [change["figure"] for change in found["changes"]] == ["TTFT"]  # facts of the load are not compared


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "no report"),
        ('{"rows": [{"figure": "x"}]}', "no report"),
        ("{}", "no report"),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=words):
        read_report(path)
    with pytest.raises(BenchError, match="cannot be read"):
        read_report(tmp_path / "missing.json")
