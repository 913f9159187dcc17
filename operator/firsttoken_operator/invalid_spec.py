"""Objects whose spec the API server let through and this operator cannot read.

It happens when the CRDs are of another release, or were validated by nobody. What runs is then left alone,
but its switches are not: an emergency must not wait until somebody has found a typing error. Optimizations
and roll-backs are read one by one as far as they can be; of the rest counts what was written last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from firsttoken_api.optimizations import CATALOGUE
from firsttoken_api.resources import (
    InferenceService,
    InferenceServiceStatus,
    KillSwitch,
    KillSwitchStatus,
    Metadata,
)
from firsttoken_api.resources.base import ConditionStatus
from firsttoken_api.resources.inference_service_status import KillSwitchView
from firsttoken_api.switches import Setting, SwitchMessage, resolve
from firsttoken_operator.cluster import Body
from firsttoken_operator.desired.names import selector_text
from firsttoken_operator.events import Notice
from firsttoken_operator.kill_status import EFFECTIVE
from firsttoken_operator.status import READY, Facts, Finding, conditions
from firsttoken_operator.ttft import ttft_status

REASON = "SpecInvalid"

Resource = TypeVar("Resource", InferenceService, KillSwitch)
Status = TypeVar("Status", InferenceServiceStatus, KillSwitchStatus)

_flags: TypeAdapter[dict[str, bool]] = TypeAdapter(dict[str, bool])


def read_resource(model: type[Resource], body: Body) -> Resource:
    """The resource in `body`; a status that another version wrote and this one cannot read is left aside.

    Raises ValidationError when it is the spec that cannot be read.
    """
    try:
        return model.model_validate(body)
    except ValidationError:
        return model.model_validate({**body, "status": {}})


def read_kill_switch(body: Body) -> KillSwitch:
    """The KillSwitch. A released one takes nothing back, whatever else it says: then `engaged` alone is read.

    Raises ValidationError for one that is, or may be, engaged and cannot be read.
    """
    try:
        return read_resource(KillSwitch, body)
    except ValidationError:
        if _part(body, "spec", "engaged") is not False:
            raise
        return read_resource(KillSwitch, {**body, "spec": {"engaged": False}})


@dataclass(frozen=True)
class Asked:
    """One InferenceService and what it asks of its switches.

    invalid: what is wrong with its spec, in words; None for a good one. Otherwise `owner` has metadata and no
    spec.
    """

    owner: InferenceService
    spec: Any
    invalid: str | None = None

    def switches(self, killed: frozenset[str], written: SwitchMessage | None) -> dict[str, Setting]:
        """The resolved switches. written: what the ConfigMap says, for what cannot be read."""
        if self.invalid is not None:
            return resolve(_optimizations(self.spec, written), _rollback(self.spec, written), killed)
        spec = self.owner.spec
        return resolve(spec.written_optimizations(), spec.rollback, killed)


def read_asked(body: Body) -> Asked:
    """Never fails: the metadata are the API server's own."""
    try:
        return Asked(read_resource(InferenceService, body), body.get("spec"))
    except ValidationError as error:
        bare = InferenceService.model_construct(
            metadata=Metadata.model_validate(body["metadata"]), status=_status(InferenceServiceStatus, body)
        )
        return Asked(bare, body.get("spec"), words(error))


def words(error: ValidationError) -> str:
    """The first problem, and what to do."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}; correct this field"


def service_status(asked: Asked, facts: Facts) -> InferenceServiceStatus:
    """The status of a service with an invalid spec: what can be said without one."""
    owner, before = asked.owner, asked.owner.status
    finding = Finding(ConditionStatus.FALSE, REASON, asked.invalid or "")
    known = [facts.confirmations.get(pod.uid) for pod in facts.switched_pods()]
    return InferenceServiceStatus(
        observed_generation=owner.metadata.generation,
        conditions=conditions({READY: finding}, before.conditions, owner.metadata.generation, facts.now),
        replicas=sum(pod.counts for pod in facts.pods),
        ready_replicas=sum(pod.ready for pod in facts.pods if pod.counts),
        selector=selector_text(owner.metadata.name),
        switch_generation=facts.message.generation if facts.message else None,
        ttft=ttft_status([item.state for item in known if item is not None and item.state], before.ttft),
        kill_switch=KillSwitchView(engaged=True, optimizations=sorted(facts.killed), reason=facts.kill_reason)
        if facts.killed
        else None,
    )


def kill_switch_status(body: Body, error: ValidationError, now: datetime) -> KillSwitchStatus:
    """The status of an engaged kill switch that cannot be read: said, and the counts left as they were."""
    before, generation = _status(KillSwitchStatus, body), body["metadata"].get("generation", 0)
    finding = Finding(
        ConditionStatus.FALSE,
        REASON,
        f"{words(error)}. Until then what was killed stays killed, and nothing more is",
    )
    return before.model_copy(
        update={
            "observed_generation": generation,
            "conditions": conditions({EFFECTIVE: finding}, before.conditions, generation, now),
            "effective_at": None,
        }
    )


def kill_switch_notices(body: Body, after: KillSwitchStatus) -> list[Notice]:
    """A Warning when the problem is new, or another one."""
    (now,) = after.conditions
    before = _status(KillSwitchStatus, body).conditions
    if any((was.reason, was.message) == (now.reason, now.message) for was in before):
        return []
    return [Notice(now.reason, now.message, warning=True)]


def _status(model: type[Status], body: Body) -> Status:
    try:
        return model.model_validate(body.get("status") or {})
    except ValidationError:
        return model()


def _part(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _optimizations(spec: Any, written: SwitchMessage | None) -> dict[str, Mapping[str, Any]]:
    """Each optimization as the spec has it, or else as it was written last.

    A switch that was off because it was taken back has lost what it was; it goes back to its default.
    """
    found: dict[str, Mapping[str, Any]] = {}
    given = spec.get("optimizations") if isinstance(spec, dict) else ()
    for entry in CATALOGUE:
        one = given.get(entry.name) if isinstance(given, dict) else given
        try:
            settings = entry.settings.model_validate({} if one is None else one)
        except ValidationError:
            last = written.switches[entry.name] if written is not None else Setting(entry.default)
            enabled = last.enabled if last.cause is None else None
            found[entry.name] = {**last.parameters, "enabled": enabled}
        else:
            found[entry.name] = settings.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def _rollback(spec: Any, written: SwitchMessage | None) -> dict[str, bool]:
    """The flags of the spec; where they cannot be read, whatever is taken back stays so."""
    try:
        given = spec.get("rollback") if isinstance(spec, dict) else ()
        return _flags.validate_python({} if given is None else given)
    except ValidationError:
        last = written.switches if written is not None else {}
        return {name: True for name, setting in last.items() if setting.cause is not None}
