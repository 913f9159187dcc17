"""The engine process's sign of life, also while a step runs.

A thread of its own says every half second since when the loop is busy. So the API process can tell a step
that takes long (signs of life come, with its age) from a process that is stopped (none come). PyTorch gives
the interpreter up while it computes, so the thread gets its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from firsttoken_runtime import ipc

PULSE_SECONDS = 0.5


class Sender(Protocol):
    """An `ipc.Channel`."""

    def send(self, event: ipc.Event) -> None: ...


class Pulse:
    """Sends `ipc.Pulse` while the `with` block runs; ends by itself when the API process has ended.

    look: what to send, asked in the thread.
    """

    def __init__(
        self, channel: Sender, look: Callable[[], ipc.Pulse], period_seconds: float = PULSE_SECONDS
    ) -> None:
        self._channel = channel
        self._look = look
        self._period_seconds = period_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._period_seconds):
            try:
                self._channel.send(self._look())
            except ipc.ChannelClosed:
                return  # the loop notices as well
