"""Stop strings found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may become one.

    The stop string that is complete first ends the text, wherever the pieces are cut. An O(1) scan per
    character of text times the total length of the stop strings.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        """include: the stop string is shown too."""
        self._strings = tuple(strings)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was met (what follows it is dropped)."""
        if not self._strings:
            return text, False
        buffer = self._held + text
        match = min(
            ((start + len(string), start) for string in self._strings if (start := buffer.find(string)) >= 0),
            default=None,
        )
        if match is not None:
            self._held = ""
            return buffer[: match[0] if self._include else match[1]], True
        keep = max(overlap(buffer, string) for string in self._strings)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a beginning of `string`, not the whole of it."""
    longest = min(len(string) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)
