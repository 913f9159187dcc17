"""Switches: who wins, and the message that carries the result to a pod.

Precedence is one pure function, `resolve`: KillSwitch over `spec.rollback` over `spec.optimizations` over
the catalogue's default. The operator, the command line and the runtime all use it; nobody decides twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from firsttoken_api.optimizations import BY_NAME, CATALOGUE, Optimization

# As large as the wire, the status field and every other JSON reader can hold.
MOST_GENERATION = 2**63 - 1
# Names of another release are repeated in answers, logs and metric labels, so they must look like names.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")


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
    """One resolved switch: on or off, by whom it was taken back, and its parameters (camelCase, complete).

    ignored: names of parameters that were sent and are not in this build; their values are not kept.
    """

    enabled: bool
    cause: Cause | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        cause = {"cause": self.cause.value} if self.cause else {}
        return {"enabled": self.enabled, **cause, **self.parameters, **dict.fromkeys(self.ignored)}


@dataclass(frozen=True)
class SwitchMessage:
    """All switches of one service under one generation: the ConfigMap's content and the admin port's body.

    switches: every optimization of the catalogue. unknown: those of another release, which nothing here can
    do; kept apart so that who reads `switches` need not think of them. Only `parse_message` with
    `ignore_unknown` makes them.
    """

    generation: int
    switches: Mapping[str, Setting]
    unknown: Mapping[str, Setting] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        every = {**self.switches, **self.unknown}
        return {
            "generation": self.generation,
            "switches": {name: setting.to_json() for name, setting in every.items()},
        }

    def not_in_this_build(self) -> list[str]:
        """What was sent and nobody here knows: `name` of an optimization, `name.parameter` of a known one."""
        parameters = [
            f"{name}.{parameter}" for name, setting in self.switches.items() for parameter in setting.ignored
        ]
        return [*self.unknown, *parameters]


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


def parse_message(body: Any, *, ignore_unknown: bool = False) -> SwitchMessage:
    """Read a switch message from JSON data.

    A switch that the message leaves out keeps the catalogue's default. Raises SwitchError with every
    problem found: unknown switch (with the list of known ones), wrong parameter, generation not an integer.

    ignore_unknown: for a reader that may be older than the sender, as a pod is after an upgrade of the
    operator. Optimizations and parameters that it does not know are then set aside under `unknown` and
    `ignored`, and the rest counts: a kill must not fail on what is new beside it. What is malformed is
    refused all the same, and so is a field beside generation and switches: it could change what they mean.
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
    resolved, unknown = resolve({}, {}, frozenset()), dict[str, Setting]()
    for name, written in sorted(switches.items()):
        try:
            entry = BY_NAME.get(name)
            if entry is not None:
                resolved[name] = _parse_setting(entry, written, ignore_unknown)
            elif ignore_unknown:
                unknown[name] = _parse_unknown(name, written)
            else:
                raise SwitchError(f"unknown switch {name!r}; use one of {', '.join(BY_NAME)}")
        except SwitchError as error:
            problems.append(str(error))
    if problems:
        raise SwitchError("; ".join(problems))
    return SwitchMessage(generation, resolved, unknown)


def _parse_setting(entry: Optimization, written: Any, ignore_unknown: bool) -> Setting:
    values, cause = _values_and_cause(entry.name, written)
    ignored: tuple[str, ...] = ()
    if ignore_unknown:
        values, ignored = _set_aside(entry, values)
    try:
        _check(entry, values)
    except ValidationError as error:
        raise SwitchError(f"{entry.name}: {_words(error, entry)}") from None
    setting = _resolve_one(entry, values, False, frozenset())
    return Setting(setting.enabled and cause is None, cause, setting.parameters, ignored)


def _parse_unknown(name: str, written: Any) -> Setting:
    """A switch of another release. Its default is not known: left to it, it counts as asked for."""
    _check_name("switch", name)
    values, cause = _values_and_cause(name, written)
    enabled = values.get("enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise SwitchError(f"{name}: enabled: Input should be a valid boolean")
    return Setting(enabled is not False and cause is None, cause)


def _values_and_cause(name: str, written: Any) -> tuple[dict[str, Any], Cause | None]:
    if not isinstance(written, dict):
        raise SwitchError(f'{name}: expected an object like {{"enabled": true}}')
    values = dict(written)
    text = values.pop("cause", None)
    try:
        return values, Cause(text) if text is not None else None
    except ValueError:
        raise SwitchError(f"{name}: cause must be rolledBack or killed, or left out, not {text!r}") from None


def _check(entry: Optimization, values: Mapping[str, Any]) -> None:
    """Raises ValidationError. By the names of the wire alone: `chunk_size` would pass and set nothing."""
    entry.settings.model_validate(values, by_alias=True, by_name=False)


def _set_aside(entry: Optimization, values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values without what this build does not know, and the names of that; inside lists as well.

    Raises SwitchError for a name that is none.
    """
    try:
        _check(entry, values)
    except ValidationError as error:
        places = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
    else:
        return values, ()
    names = {".".join(part for part in place if isinstance(part, str)) for place in places}
    for name in sorted(names):
        _check_name(f"{entry.name}: parameter", name)
    return _without(values, places), tuple(sorted(names))


def _without(value: Any, places: Sequence[tuple[str | int, ...]]) -> Any:
    """JSON data without what is at these places; each is a path of keys and list indices."""
    deeper: dict[str | int, list[tuple[str | int, ...]]] = {}
    for first, *rest in places:
        deeper.setdefault(first, []).append(tuple(rest))
    kept = (
        (key, _without(inside, deeper[key]) if key in deeper else inside)
        for key, inside in (value.items() if isinstance(value, dict) else enumerate(value))
        if () not in deeper.get(key, ())
    )
    return dict(kept) if isinstance(value, dict) else [inside for _, inside in kept]


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise SwitchError(f"{what} {name[:80]!r} is no name; use up to 63 letters and digits")


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
