"""`spec.optimizations` and `spec.rollback`, derived from the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, create_model

from firsttoken_api.fields import Rule, rules
from firsttoken_api.optimizations import CATALOGUE, NAMES, Optimization
from firsttoken_api.resources.base import ApiModel


def describe(entry: Optimization) -> str:
    """What `kubectl explain` says of one optimization."""
    effect = (
        "Takes effect at the next step, without a restart" if entry.live else "A change restarts the pods"
    )
    outputs = ", and can change what is generated" if entry.changes_outputs else ""
    return (
        f"{entry.summary} Works on the {entry.segment} segment of TTFT. {'On' if entry.default else 'Off'} "
        f"unless set. {effect}{outputs}. Take it back with spec.rollback.{entry.name}: true."
    )


def _settings_with_defaults(entry: Optimization) -> type[Any]:
    """The settings model of one optimization, each description closed by the catalogue's default."""
    defaults = {"enabled": entry.default, **entry.defaults}
    fields: dict[str, Any] = {}
    for name, field in entry.settings.model_fields.items():
        default = defaults.get(field.alias or name)
        words = str(default).lower() if isinstance(default, bool) else f"{default}"
        suffix = "" if default == [] else f" Default: {words}."
        extra = field.json_schema_extra
        # `annotation` loses the bounds that pydantic keeps in `metadata`; both are put back together here.
        kind = field.annotation
        for item in field.metadata:
            kind = Annotated[kind, item]  # type: ignore[assignment]
        fields[name] = (
            kind,
            Field(default=None, description=f"{field.description}{suffix}", json_schema_extra=extra),
        )
    return create_model(entry.settings.__name__, __base__=entry.settings, **fields)


def _needs_continuous_batching(name: str) -> Rule:
    return Rule(
        f"!(has(self.{name}) && has(self.{name}.enabled) && self.{name}.enabled && "
        "has(self.continuousBatching) && has(self.continuousBatching.enabled) && "
        "!self.continuousBatching.enabled)",
        f"{name} needs continuousBatching: set continuousBatching.enabled: true, or {name}.enabled: false",
        field=f".{name}",
    )


_OPTIMIZATION_RULES = rules(
    _needs_continuous_batching("chunkedPrefill"),
    _needs_continuous_batching("priorityScheduling"),
    Rule(
        "!(has(self.chunkedPrefill) && has(self.chunkedPrefill.chunkSize) && has(self.continuousBatching) && "
        "has(self.continuousBatching.maxBatchTokens) && type(self.continuousBatching.maxBatchTokens) == int "
        "&& self.chunkedPrefill.chunkSize > self.continuousBatching.maxBatchTokens)",
        "chunkedPrefill.chunkSize is above continuousBatching.maxBatchTokens, so no chunk of that size would "
        "fit in a step: lower chunkSize or raise maxBatchTokens",
        field=".chunkedPrefill",
    ),
    Rule(
        "!(has(self.fusedKernels) && has(self.fusedKernels.enabled) && !self.fusedKernels.enabled && "
        "has(self.fusedKernels.required) && self.fusedKernels.required)",
        "fusedKernels.required makes a fallback an error, and enabled: false asks for the fallback: set "
        "enabled: true, or required: false",
        field=".fusedKernels",
    ),
    Rule(
        "!(has(self.slidingWindow) && has(self.slidingWindow.window) && has(self.slidingWindow.sinkTokens) "
        "&& self.slidingWindow.sinkTokens >= self.slidingWindow.window)",
        "slidingWindow.sinkTokens must be smaller than slidingWindow.window",
        field=".slidingWindow",
    ),
)


class _Optimizations(ApiModel):
    model_config = ConfigDict(json_schema_extra=_OPTIMIZATION_RULES)


if TYPE_CHECKING:
    # The fields come from the catalogue, so a type checker sees only what every model has.
    Optimizations = _Optimizations
else:
    Optimizations = create_model(
        "Optimizations",
        __base__=_Optimizations,
        **{
            entry.name: (
                _settings_with_defaults(entry) | None,
                Field(default=None, alias=entry.name, description=describe(entry)),
            )
            for entry in CATALOGUE
        },
    )


def rollback_schema() -> dict[str, Any]:
    """A map and not fields: the API server drops unknown fields of a patch, and a roll-back with a typing
    error must not look as if it had worked. The rule sees every key and refuses the unknown ones. The message
    names only the first of them: the API server bounds what a message may cost, and keys have no bound.
    """
    known = ", ".join(("all", *NAMES))
    keys = "[" + ", ".join(f"'{name}'" for name in ("all", *NAMES)) + "]"
    return {
        "maxProperties": len(NAMES) + 8,
        **rules(
            Rule(
                f"self.all(flag, flag in {keys})",
                f"unknown rollback flag; use one of: {known}",
                message_expression=f"'unknown rollback flag ' + self.filter(flag, !(flag in {keys}))[0] + "
                f"'; use one of: {known}'",
            )
        ),
    }
