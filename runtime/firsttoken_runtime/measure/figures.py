"""A figure: one number per round, their median, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from firsttoken_runtime.measure.statistics import Interval, median, median_interval


class Better(StrEnum):
    """Which way a figure improves; NEITHER for facts about the load, which are not compared."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


# What a unit says about the direction, unless the figure says otherwise.
_DIRECTION = {"ms": Better.LOWER, "MiB": Better.LOWER, "tokens/s": Better.HIGHER, "requests/s": Better.HIGHER}


@dataclass(frozen=True)
class Figure:
    """One line of the table. `values` holds one number per round, in `unit`."""

    scenario: str
    figure: str
    unit: str
    better: Better
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def worst(self) -> float:
        return min(self.values) if self.better is Better.HIGHER else max(self.values)

    @property
    def interval(self) -> Interval | None:
        return median_interval(self.values)

    def to_json(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "scenario": self.scenario,
            "figure": self.figure,
            "median": self.median,
            "interval": asdict(interval) if interval else None,
            "worst": self.worst,
            "unit": self.unit,
            "better": self.better.value,
            "rounds": len(self.values),
            "values": list(self.values),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Figure:
        """Raises KeyError, TypeError or ValueError when `entry` is no figure."""
        values = tuple(float(value) for value in entry["values"])
        if not values:
            raise ValueError(f"{entry['figure']}: no values")
        return cls(
            str(entry["scenario"]), str(entry["figure"]), str(entry["unit"]), Better(entry["better"]), values
        )


def row(
    scenario: str, figure: str, values: Sequence[float], unit: str = "ms", better: Better | None = None
) -> Figure:
    """A figure of `values`, one per round. Raises ValueError when there are none."""
    if not values:
        raise ValueError(f"{scenario}, {figure}: nothing was measured")
    direction = better or _DIRECTION.get(unit, Better.NEITHER)
    return Figure(scenario, figure, unit, direction, tuple(float(value) for value in values))


def by_round(rounds: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Join the figures of each round, in the order of their first appearance.

    A figure that a round lacks (nothing succeeded in it) has fewer values than there were rounds.
    """
    joined: dict[tuple[str, str], Figure] = {}
    for figures in rounds:
        for entry in figures:
            key = (entry.scenario, entry.figure)
            seen = joined.get(key)
            values = (*seen.values, *entry.values) if seen else entry.values
            joined[key] = Figure(entry.scenario, entry.figure, entry.unit, entry.better, values)
    return list(joined.values())
