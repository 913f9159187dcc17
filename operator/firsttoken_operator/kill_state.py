"""What the kill switch says, and what holds while it cannot be read.

An unreadable KillSwitch must neither stop the services nor give back what was killed. So it changes nothing:
the last one that could be read goes on counting. An operator that has just started has read none, and takes
each service's own ConfigMap for it, which says what was killed there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from firsttoken_api.resources import KillSwitch
from firsttoken_api.switches import Cause, SwitchMessage
from firsttoken_operator.cluster import Body
from firsttoken_operator.invalid_spec import read_kill_switch
from firsttoken_operator.switches import killed_here


@dataclass(frozen=True)
class KillState:
    """switch: the kill switch that counts, None when there is none. known: False when none could be read."""

    switch: KillSwitch | None = None
    known: bool = True

    @property
    def reason(self) -> str | None:
        return self.switch.spec.reason if self.switch else None

    def killed(
        self, namespace: str, labels: Mapping[str, str], written: SwitchMessage | None
    ) -> frozenset[str]:
        """The optimizations taken back from a service. written: its switches as the ConfigMap has them."""
        if self.known:
            return killed_here(self.switch, namespace, labels)
        last = written.switches if written is not None else {}
        return frozenset(name for name, setting in last.items() if setting.cause is Cause.KILLED)


class KillMemory:
    """Remembers the kill switch as it could last be read."""

    def __init__(self) -> None:
        self._last = KillState(known=False)

    def look(self, body: Body | None) -> KillState:
        """The state that holds now. body: the KillSwitch as it is, None when there is none."""
        with contextlib.suppress(ValidationError):
            self._last = KillState(read_kill_switch(body) if body is not None else None)
        return self._last
