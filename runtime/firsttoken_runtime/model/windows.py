"""Attention windows: how much of what came before it a query sees, layer by layer.

    position   0 1 2 3 4 5 6 7 8 9        Window(tokens=4, sinks=2), the query at 9
    seen       ■ ■ · · · · ■ ■ ■ ■        the first two, and the last four with itself

A window comes from the model (`ModelConfig.layer_windows`), or from the switch slidingWindow, for models that
were not trained with one. Here the two meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """A query at position p sees positions p - tokens + 1 to p, and the first `sinks` positions."""

    tokens: int
    sinks: int = 0

    def begin(self, position: int) -> int:
        """The first position of the window of a query."""
        return max(0, position + 1 - self.tokens)


# What queries of each layer see, first layer first; None is everything before.
LayerWindows = tuple[Window | None, ...]


def layer_windows(own: Sequence[int | None], asked: Window | None = None) -> LayerWindows:
    """What each layer sees: `asked` where it is narrower than what the layer was trained with.

    own: `ModelConfig.layer_windows`.
    """
    return tuple(
        asked
        if asked is not None and (tokens is None or asked.tokens < tokens)
        else None
        if tokens is None
        else Window(tokens)
        for tokens in own
    )


def widest(windows: LayerWindows) -> Window | None:
    """A window that holds everything any layer sees; None where a layer sees all, or none are given."""
    if not windows or any(window is None for window in windows):
        return None
    found = [window for window in windows if window is not None]
    return Window(max(window.tokens for window in found), max(window.sinks for window in found))
