"""Where the runtime's switches come from, and which message wins.

Two sources: a mounted file, watched by its content, and the admin port. The higher generation wins; the same
generation with the same content is no change; everything else is refused with the generation in force.
Both may be written by a newer release than this one: see `parse_text`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from firsttoken_api.switches import SwitchError, SwitchMessage, parse_message, resolve
from firsttoken_runtime.engine.switch_state import NOT_IN_BUILD, switch_state

POLL_SECONDS = 0.25
# A ConfigMap cannot be larger than 1 MiB.
_LARGEST_FILE = 1 << 20


class Verdict(Enum):
    """What to do with a message, given the one in force."""

    TAKE = auto()
    SAME = auto()
    OLDER = auto()
    CONFLICT = auto()


def judge(current: SwitchMessage, offered: SwitchMessage) -> Verdict:
    """Compare a message with the one in force."""
    if offered.generation > current.generation:
        return Verdict.TAKE
    if offered.generation < current.generation:
        return Verdict.OLDER
    return Verdict.SAME if offered.to_json() == current.to_json() else Verdict.CONFLICT


def refusal(current: SwitchMessage, offered: SwitchMessage) -> str:
    """Why an older or conflicting message is not taken, and what would be right."""
    if offered.generation == current.generation:
        return (
            f"generation {offered.generation} is in force with other content; "
            f"send the change under generation {current.generation + 1} or higher"
        )
    return (
        f"generation {offered.generation} is older than {current.generation}, which is in force; "
        f"send {current.generation + 1} or higher"
    )


def default_message() -> SwitchMessage:
    """The catalogue's defaults, older than anything that is sent."""
    return SwitchMessage(0, resolve({}, {}, frozenset()))


def parse_text(text: str) -> SwitchMessage:
    """Read a switch file's content.

    The sender may be of a newer release: what this build does not know is set aside, and the rest counts.
    Raises SwitchError, also for what is not JSON.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SwitchError(f"not valid JSON: {error}") from None
    return parse_message(body, ignore_unknown=True)


def answered(states: Sequence[Mapping[str, Any]], message: SwitchMessage) -> list[dict[str, Any]]:
    """What a pod answers for every switch of the message.

    states: the engine's, of the switches it knows. Parameters that were ignored are named in the reason; an
    optimization of another release is answered like one that is known and not built.
    """
    found = [
        {**state, "reason": _with_ignored(state["reason"], message.switches[state["name"]].ignored)}
        for state in states
    ]
    return found + [switch_state(name, setting, NOT_IN_BUILD) for name, setting in message.unknown.items()]


def _with_ignored(reason: str | None, ignored: Sequence[str]) -> str | None:
    if not ignored:
        return reason
    words = f"ignored, {NOT_IN_BUILD}: {', '.join(ignored)}"
    return f"{reason}; {words}" if reason else words


@dataclass(frozen=True)
class Observation:
    """What one look at the file found: a new message, a problem to log, or neither (nothing changed)."""

    message: SwitchMessage | None = None
    problem: str | None = None


class SwitchFile:
    """A switch file that may change, be replaced through a symlink, or be caught half-written.

    Its content is compared, not its time or inode: a ConfigMap update swaps a symlink of the directory, and
    an editor may write in place. A content that cannot be read is reported once and looked at again; the
    switches in force stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: str | None = None
        self._reported: str | None = None

    def poll(self) -> Observation:
        """Look at the file once."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_LARGEST_FILE + 1)
        except OSError as error:
            return self._problem(f"cannot be read: {error.strerror}")
        if len(data) > _LARGEST_FILE:
            return self._problem(f"is larger than {_LARGEST_FILE} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._problem("is not UTF-8")
        if text == self._seen:
            return Observation()
        try:
            message = parse_text(text)
        except SwitchError as error:
            # Perhaps half-written: not remembered as seen, so the next look tries again.
            return self._problem(str(error))
        self._seen, self._reported = text, None
        return Observation(message=message)

    def forget(self) -> None:
        """Report the content again at the next look, although it did not change."""
        self._seen = None

    def _problem(self, text: str) -> Observation:
        if text == self._reported:
            return Observation()
        self._reported = text
        return Observation(problem=f"switches file {self.path}: {text}; the switches in force stay")
