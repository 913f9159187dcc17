"""What the operator is told by its environment; the chart sets all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from firsttoken_operator.accelerators import Accelerator, AcceleratorError, load_accelerators

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PULL_POLICIES = ("IfNotPresent", "Always", "Never")


class SettingsError(ValueError):
    """The environment makes no sense; the text names the variable and what would be right."""


@dataclass(frozen=True)
class Settings:
    """namespaces: those watched, empty for all. operator_namespace: None outside a cluster."""

    runtime_image: str
    pull_policy: str
    namespaces: tuple[str, ...]
    operator_namespace: str | None
    accelerators: Mapping[str, Accelerator]
    bind_host: str = "127.0.0.1"
    metrics_port: int = 8080
    health_port: int = 8081
    poll_seconds: float = 12.0
    resync_seconds: float = 300.0
    log_level: str = "INFO"


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment (the process's own when not given). Raises SettingsError."""
    given = os.environ if environment is None else environment
    image = given.get("FIRSTTOKEN_RUNTIME_IMAGE", "").strip()
    if not image:
        raise SettingsError(
            "FIRSTTOKEN_RUNTIME_IMAGE is not set; set it to the runtime image the pods are to run"
        )
    policy = given.get("FIRSTTOKEN_RUNTIME_PULL_POLICY") or "IfNotPresent"
    if policy not in _PULL_POLICIES:
        raise SettingsError(
            f"FIRSTTOKEN_RUNTIME_PULL_POLICY is {policy!r}; use one of {', '.join(_PULL_POLICIES)}"
        )
    names = tuple(
        sorted({name.strip() for name in given.get("FIRSTTOKEN_WATCH_NAMESPACES", "").split(",")} - {""})
    )
    for name in names:
        if not _NAMESPACE.fullmatch(name):
            raise SettingsError(
                f"FIRSTTOKEN_WATCH_NAMESPACES: {name!r} is no namespace; write names with commas between them"
            )
    try:
        accelerators = load_accelerators(given.get("FIRSTTOKEN_ACCELERATORS"))
    except AcceleratorError as error:
        raise SettingsError(f"FIRSTTOKEN_ACCELERATORS: {error}") from None
    in_cluster = bool(given.get("KUBERNETES_SERVICE_HOST"))
    return Settings(
        runtime_image=image,
        pull_policy=policy,
        namespaces=names,
        operator_namespace=given.get("POD_NAMESPACE") or None,
        accelerators=accelerators,
        # In a pod the probes and the scraper come from outside; elsewhere nothing listens beyond loopback.
        bind_host=given.get("FIRSTTOKEN_BIND_HOST") or ("0.0.0.0" if in_cluster else "127.0.0.1"),
        metrics_port=_port(given, "FIRSTTOKEN_METRICS_PORT", 8080),
        health_port=_port(given, "FIRSTTOKEN_HEALTH_PORT", 8081),
        log_level=(given.get("FIRSTTOKEN_LOG_LEVEL") or "INFO").upper(),
    )


def _port(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or not 0 <= int(text) <= 65535:
        raise SettingsError(f"{name} is {text!r}; write a port from 1 to 65535, or 0 for any free one")
    return int(text)
