"""What a pod answers for one switch. Without torch: the API process answers too, for unknown switches."""

from __future__ import annotations

from typing import Any

from firsttoken_api.switches import Cause, Setting, State

NOT_IN_BUILD = "not in this build"
_REASONS = {
    Cause.KILLED: "taken back by the kill switch",
    Cause.ROLLED_BACK: "taken back by spec.rollback",
}


def switch_state(
    name: str, setting: Setting, hindrance: str | None, in_use: str | None = None
) -> dict[str, Any]:
    """What is answered for one switch.

    hindrance: why it cannot be on, or None. in_use: in words, that it is in use although it is off or was
    taken back, and until when; None when it is not. It is then `on`: the answer is what is effective.
    """
    reason = ""
    if setting.cause is not None:
        state = State(setting.cause.value)
        reason = _REASONS[setting.cause]
    elif not setting.enabled:
        state = State.OFF
    elif hindrance is not None:
        state, reason = State.INACTIVE, hindrance
    else:
        state = State.ON
    if in_use is not None:
        state, reason = State.ON, f"{reason or 'switched off'}; {in_use}"
    return {"name": name, "state": state.value, "reason": reason, "parameters": dict(setting.parameters)}
