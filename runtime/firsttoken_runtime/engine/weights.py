"""weightQuantization: what the weights were loaded in, and what is answered when the switch says otherwise.

Weights are read once. So the switch is obeyed at start-up; from then on it can only be answered, and the
answer says what is in use, not what was asked for last.
"""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken_api.switches import Setting
from firsttoken_runtime.engine.switch_state import NOT_IN_BUILD

INT8 = "int8"
NEEDS_RESTART = "needs a restart: the weights in use are not quantized"
STAY = "int8 weights stay in use until the pod restarts"


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """int8: whether the linear layers hold int8. obstacle: why they cannot here, None when they can."""

    int8: bool = False
    obstacle: str | None = NOT_IN_BUILD

    def hindrance(self, setting: Setting) -> str | None:
        """Why the switch is not as asked for, None when it is; for a switch that is on."""
        precision = setting.parameters["precision"]
        if precision != INT8:
            return f"{precision} weights are {NOT_IN_BUILD}" + (f"; {STAY}" if self.int8 else "")
        if self.int8:
            return None
        return self.obstacle or NEEDS_RESTART

    def outlives(self, setting: Setting) -> bool:
        """Whether the switch is off, or taken back, and the weights are int8 all the same."""
        return self.int8 and not setting.enabled


def asks_for_int8(setting: Setting) -> bool:
    """Whether the weights are to be loaded in int8, as far as that is possible."""
    return setting.enabled and setting.parameters["precision"] == INT8
