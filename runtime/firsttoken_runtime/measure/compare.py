"""Two reports side by side: better, worse, or within noise.

For every figure that both have: the rounds of the one against the rounds of the other, with Hodges and
Lehmann's interval of the difference (95 %, exact, whatever the distribution). A change counts when that
interval excludes zero and the medians differ by at least `SMALLEST_CHANGE`; everything else is within noise.
With 3 rounds on a side nothing can be told apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.figures import Better, Figure
from firsttoken_runtime.measure.statistics import Interval, difference_interval

SMALLEST_CHANGE = 0.01
METHOD = (
    "95 % Hodges-Lehmann interval of the difference between the rounds (exact Mann-Whitney) excludes "
    f"zero, and medians differ by {SMALLEST_CHANGE:.0%} or more; otherwise within noise"
)


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    NOISE = "within noise"
    TOO_FEW = "within noise (too few rounds to tell)"


@dataclass(frozen=True)
class Change:
    """One figure before and after. interval: of after − before, None with too few rounds."""

    before: Figure
    after: Figure
    interval: Interval | None
    verdict: Verdict

    @property
    def relative(self) -> float | None:
        """(after − before) / before of the medians; None when before is 0."""
        return (
            (self.after.median - self.before.median) / abs(self.before.median) if self.before.median else None
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.before.scenario,
            "figure": self.before.figure,
            "unit": self.before.unit,
            "before": self.before.median,
            "after": self.after.median,
            "relative": self.relative,
            "interval": None if self.interval is None else [self.interval.low, self.interval.high],
            "rounds": [len(self.before.values), len(self.after.values)],
            "verdict": self.verdict.value,
        }


def judge(before: Figure, after: Figure) -> Change:
    """Whether `after` is better than `before`, from the spread of their rounds."""
    interval = difference_interval(before.values, after.values)
    change = Change(before, after, interval, Verdict.NOISE)
    if interval is None:
        return Change(before, after, None, Verdict.TOO_FEW)
    large = change.relative is None or abs(change.relative) >= SMALLEST_CHANGE
    if not large or interval.low <= 0 <= interval.high:
        return change
    improved = (interval.high < 0) == (before.better is Better.LOWER)
    return Change(before, after, interval, Verdict.BETTER if improved else Verdict.WORSE)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of two reports, as JSON. Facts about the load (`neither`) are no figures to compare."""
    old, new = _figures(before), _figures(after)
    both = [key for key in old if key in new and old[key].better is not Better.NEITHER]
    return {
        "kind": "firsttoken-bench-comparison",
        "method": METHOD,
        "differences": [
            f"{name}: {_short(before.get(part, {}).get(name))} and {_short(after.get(part, {}).get(name))}"
            for part, names in _CONDITIONS.items()
            for name in names
            if before.get(part, {}).get(name) != after.get(part, {}).get(name)
        ],
        "changes": [judge(old[key], new[key]).to_json() for key in both],
        "only_before": [": ".join(key) for key in old if key not in new],
        "only_after": [": ".join(key) for key in new if key not in old],
    }


# What must be the same for two reports to be about the same thing.
_CONDITIONS = {
    "machine": ("processor", "cores", "memory_gib"),
    "server": ("model", "endpoint", "gpus"),
    "load": (
        *("kinds", "scenarios", "seed", "requests", "duration_seconds", "prompt_tokens", "output_tokens"),
        *("lengths", "cache", "ignore_eos", "slo"),
    ),
}


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _figures(report: Mapping[str, Any]) -> dict[tuple[str, str], Figure]:
    found = (Figure.from_json(entry) for entry in report["rows"])
    return {(entry.scenario, entry.figure): entry for entry in found}


def read_report(path: Path) -> dict[str, Any]:
    """A report that `firsttoken bench` wrote. Raises BenchError when it is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        _figures(report)
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise BenchError(
            f"{path} is no report of firsttoken bench: write one with `firsttoken bench --output {path.name}`"
        ) from None
    found: dict[str, Any] = report
    return found
