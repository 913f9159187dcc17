"""Switches: who wins, and the message that carries the result to a pod.

Precedence is one pure function, `resolve`: KillSwitch over `spec.rollback` over `spec.optimizations` over
the catalogue's default. The operator, the command line and the runtime all use it; nobody decides twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from firsttoken_api.optimizations import BY_NAME, CATALOGUE, Optimization

# As large as the wire, the status field and every other JSON reader can hold.
MOST_GENERATION = 2**63 - 1


class Cause(StrEnum):
    """Why a switch is off although the configuration may ask for it."""

    ROLLED_BACK = "rolledBack"
    KILLED = "killed"


class State(StrEnum):
    """What a pod answers for one switch.

    inactive: asked for, not possible; the reason says why.
    """

    ON = "on"
    OFF = "off"
    INACTIVE = "inactive"
    ROLLED_BACK = "rolledBack"
    KILLED = "killed"


class SwitchError(ValueError):
    """A switch message that cannot be taken; the text says what is wrong and what would be right."""


@dataclass(frozen=True)
class Setting:
    """One resolved switch: on or off, by whom it was taken back, and its parameters (camelCase, complete)."""

    enabled: bool
    cause: Cause | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        cause = {"cause": self.cause.value} if self.cause else {}
        return {"enabled": self.enabled, **cause, **self.parameters}


@dataclass(frozen=True)
class SwitchMessage:
    """All switches of one service under one generation: the ConfigMap's content and the admin port's body."""

    generation: int
    switches: Mapping[str, Setting]

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "switches": {name: setting.to_json() for name, setting in self.switches.items()},
        }


def killed_names(listed: Set[str], catalogue: tuple[Optimization, ...] = CATALOGUE) -> frozenset[str]:
    """What a kill switch or `rollback.all` takes back: the listed ones, or all but the essential."""
    if listed:
        return frozenset(listed)
    return frozenset(entry.name for entry in catalogue if not entry.essential)


def resolve(
    optimizations: Mapping[str, Mapping[str, Any]],
    rollback: Mapping[str, bool],
    killed: Set[str],
) -> dict[str, Setting]:
    """Resolve every switch of the catalogue.

    optimizations: `spec.optimizations` as written (camelCase, may be partial).
    rollback: `spec.rollback` as written: optimization names and `all`.
    killed: names an engaged KillSwitch takes back from this service (see `killed_names`).
    """
    rolled_back = {name for name, back in rollback.items() if back and name != "all"}
    if rollback.get("all"):
        rolled_back |= killed_names(frozenset())
    return {
        entry.name: _resolve_one(
            entry, optimizations.get(entry.name) or {}, entry.name in rolled_back, killed
        )
        for entry in CATALOGUE
    }


def _resolve_one(
    entry: Optimization, written: Mapping[str, Any], rolled_back: bool, killed: Set[str]
) -> Setting:
    given = {name: value for name, value in written.items() if name != "enabled" and value is not None}
    parameters = {**entry.defaults, **given}
    asked = written.get("enabled")
    enabled = entry.default if asked is None else bool(asked)
    if entry.name in killed:
        return Setting(False, Cause.KILLED, parameters)
    if rolled_back:
        return Setting(False, Cause.ROLLED_BACK, parameters)
    return Setting(enabled, None, parameters)


def parse_message(body: Any) -> SwitchMessage:
    """Read a switch message from JSON data.

    A switch that the message leaves out keeps the catalogue's default. Raises SwitchError with every
    problem found: unknown switch (with the list of known ones), wrong parameter, generation not an integer.
    """
    if not isinstance(body, dict):
        raise SwitchError('expected an object like {"generation": 1, "switches": {...}}')
    generation, switches = body.get("generation"), body.get("switches")
    if not isinstance(generation, int) or isinstance(generation, bool) or generation < 0:
        raise SwitchError(f"generation must be a whole number of 0 or more, not {generation!r}")
    if generation > MOST_GENERATION:
        raise SwitchError(f"generation must be {MOST_GENERATION} or less")
    if not isinstance(switches, dict):
        raise SwitchError('switches must be an object like {"chunkedPrefill": {"enabled": true}}')
    extra = sorted(set(body) - {"generation", "switches"})
    problems = [f"unknown field {name!r}; use generation and switches" for name in extra]
    resolved = resolve({}, {}, frozenset())
    for name, written in switches.items():
        try:
            resolved[name] = _parse_setting(name, written)
        except SwitchError as error:
            problems.append(str(error))
    if problems:
        raise SwitchError("; ".join(problems))
    return SwitchMessage(generation, resolved)


def _parse_setting(name: str, written: Any) -> Setting:
    entry = BY_NAME.get(name)
    if entry is None:
        raise SwitchError(f"unknown switch {name!r}; use one of {', '.join(BY_NAME)}")
    if not isinstance(written, dict):
        raise SwitchError(f'{name}: expected an object like {{"enabled": true}}')
    values = dict(written)
    cause_text = values.pop("cause", None)
    try:
        cause = Cause(cause_text) if cause_text is not None else None
        entry.settings.model_validate(values)
    except ValidationError as error:
        raise SwitchError(f"{name}: {_words(error, entry)}") from None
    except ValueError:
        raise SwitchError(
            f"{name}: cause must be rolledBack or killed, or left out, not {cause_text!r}"
        ) from None
    setting = _resolve_one(entry, values, False, frozenset())
    return Setting(setting.enabled and cause is None, cause, setting.parameters)


def _words(error: ValidationError, entry: Optimization) -> str:
    """The problems of one switch, each with its parameter; alternatives of one parameter joined by "or"."""
    parameters = [field.alias or name for name, field in entry.settings.model_fields.items()]
    found: dict[str, list[str]] = {}
    for item in error.errors():
        name, *inside = item["loc"]
        if item["type"] == "extra_forbidden" and not inside:
            found[f"unknown parameter {name!r}; use {', '.join(parameters)}"] = []
            continue
        # Inside a union pydantic names the alternative ("int", "literal['auto']"); a list names the place.
        listed = bool(inside) and isinstance(inside[0], int)
        place = ".".join(str(part) for part in (name, *(inside if listed else ())))
        found.setdefault(place, []).append(item["msg"].removeprefix("Value error, "))
    return ", ".join(f"{place}: {' or '.join(texts)}" if texts else place for place, texts in found.items())
