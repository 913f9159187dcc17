"""Observe, desire, apply, push, verify, report: one InferenceService from whatever state it is in.

Level-based and idempotent: `Reconciler.service(key)` looks at what is there and never at what happened. The
switches go first, because somebody may be waiting for one; the slower work follows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pydantic import ValidationError

from firsttoken_api.resources import InferenceService, InferenceServiceStatus, Metadata
from firsttoken_api.resources.inference_service_status import FailureReason, FailureStatus, TtftStatus
from firsttoken_api.resources.kill_switch import KILL_SWITCH_NAME
from firsttoken_operator.accelerators import Accelerator
from firsttoken_operator.apply import Applier, NameTakenError
from firsttoken_operator.cluster import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    INFERENCE_SERVICE,
    KILL_SWITCH,
    NETWORK_POLICY,
    POD,
    REPLICA_SET,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Body,
    Cluster,
    ClusterError,
    ConflictError,
    Kind,
)
from firsttoken_operator.desired import access, disruption, network, workload
from firsttoken_operator.desired.names import SERVICE_LABEL, admin_secret_name, selector, switches_name
from firsttoken_operator.desired.pod import template_inputs
from firsttoken_operator.desired.switches import read_switches, switches_config_map, written_generation
from firsttoken_operator.events import Notice, event_body, kill_notices, notices
from firsttoken_operator.invalid_spec import (
    Asked,
    kill_switch_notices,
    kill_switch_status,
    read_asked,
    read_kill_switch,
    service_status,
)
from firsttoken_operator.kill_state import KillMemory, KillState
from firsttoken_operator.kill_status import ServiceReport, kill_status, service_report
from firsttoken_operator.model_source import ModelSourceError, model_source
from firsttoken_operator.observe import PodFacts, pod_facts, workload_facts
from firsttoken_operator.settings import Settings
from firsttoken_operator.status import Facts, compute_status
from firsttoken_operator.switches import Confirmation, Instance, Pusher, ServiceKey, plan
from firsttoken_operator.ttft import ttft_status
from firsttoken_operator.verify import Verifier

logger = logging.getLogger(__name__)

# How long a reconcile waits for the pods' answers before it writes the status without them.
PUSH_WAIT_SECONDS = 0.3
# An object of a deleted namesake is collected within moments.
OUTGOING_SECONDS = 1.0
# Somebody wrote between our read and our write: read again at once.
CONFLICT_SECONDS = 0.05
BLOCKED_SECONDS = 30.0


# Children that bear the service's own name.
_NAMESAKES = (SERVICE_ACCOUNT, NETWORK_POLICY, SERVICE, DISRUPTION_BUDGET, DEPLOYMENT)


@dataclass(frozen=True)
class Children:
    """The live objects of one service, as one round of reads found them."""

    kill: KillState
    config_map: Body | None
    secret: Body | None
    namesakes: Mapping[Kind, Body | None]
    replica_sets: Sequence[Body]
    pods: Sequence[PodFacts]


class Reconciler:
    """All reconciling; owns nothing but the memory of what pods confirmed and generated."""

    def __init__(
        self,
        cluster: Cluster,
        pusher: Pusher,
        verifier: Verifier,
        settings: Settings,
        *,
        on_report: Callable[[], None] = lambda: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """on_report: called when what a service reports of its pods changed, for the kill switch's status."""
        self._cluster = cluster
        self._applier = Applier(cluster)
        self._pusher = pusher
        self._verifier = verifier
        self._settings = settings
        self._on_report = on_report
        self._now = now
        self._kill = KillMemory()
        self._reports: dict[ServiceKey, ServiceReport] = {}
        # Looked at, and nothing could be found out: their pods are reported as not confirmed.
        self._unreported: set[ServiceKey] = set()
        self._shown_ttft: dict[ServiceKey, TtftStatus | None] = {}

    async def service(self, key: ServiceKey) -> float | None:
        """Bring one service to what its spec asks for; returns seconds after which to look again, or None.

        Raises ClusterError; the work queue tries again.
        """
        body = await self._cluster.get(INFERENCE_SERVICE, *key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            self.forget(key)
            return None
        asked = read_asked(body)
        bring = self._bring if asked.invalid is None else self._hold
        try:
            return await bring(key, body, asked)
        except ConflictError:
            return CONFLICT_SECONDS
        except ClusterError:
            self._no_report(key)
            raise

    async def _bring(self, key: ServiceKey, body: Body, asked: Asked) -> float | None:
        owner, children = asked.owner, await self._observe(key)
        facts = Facts(service=owner, pods=children.pods, now=self._now())
        again: float | None = None
        try:
            token = await self._token(owner, children.secret)
            facts = await self._switches(key, asked, children, token)
            facts = await self._workload(owner, children, facts, token)
        except NameTakenError as error:
            blocked = FailureStatus(reason=FailureReason.POD_REFUSED, message=str(error))
            facts = replace(facts, blocked=blocked)
            again = OUTGOING_SECONDS if error.outgoing else None
        await self._report(key, body, facts, compute_status(facts))
        # What blocks it may be lifted where nothing tells the operator: a quota, somebody else's object.
        return again or (BLOCKED_SECONDS if facts.blocked else None)

    async def _hold(self, key: ServiceKey, body: Body, asked: Asked) -> float | None:
        """A spec that the CRD let through and nobody here can read: say so, and leave what runs alone.

        Its switches are brought up to date all the same, because the kill switch counts everywhere.
        """
        owner, children = asked.owner, await self._observe(key)
        written = read_switches(children.config_map)
        killed = children.kill.killed(key[0], owner.metadata.labels, written)
        facts = Facts(service=owner, pods=children.pods, killed=killed, now=self._now())
        again: float | None = None
        # Of a service that was never brought up there is nothing to switch.
        if children.config_map is not None or children.namesakes[DEPLOYMENT] is not None:
            try:
                token = await self._token(owner, children.secret)
                facts = await self._switches(key, asked, children, token)
            except NameTakenError as error:
                logger.warning("%s/%s: switches not written: %s", *key, error)
                again = OUTGOING_SECONDS if error.outgoing else None
        await self._report(key, body, facts, service_status(asked, facts))
        return again

    async def poll(self, key: ServiceKey) -> bool:
        """Ask the service's pods for their state; reads only. True when the service is to be looked at."""
        news = await self._pusher.refresh(key)
        states = [known.state for known in self._pusher.confirmations(key).values() if known.state]
        shown = self._shown_ttft.get(key)
        return news or ttft_status(states, shown) != shown

    def knows(self, key: ServiceKey) -> bool:
        """Whether the service was there when last looked at."""
        return key in self._reports

    def forget(self, key: ServiceKey) -> None:
        """The service is gone; its children follow by their owner references."""
        self._pusher.forget(key)
        self._verifier.forget(key)
        self._shown_ttft.pop(key, None)
        self._unreported.discard(key)
        if self._reports.pop(key, None) is not None:
            self._on_report()

    async def kill_switch(self) -> float | None:
        """Bring the status of the KillSwitch up to date. Raises ClusterError."""
        body = await self._cluster.get(KILL_SWITCH, None, KILL_SWITCH_NAME)
        if body is None or body["metadata"].get("deletionTimestamp"):
            return None
        try:
            found = read_kill_switch(body)
        except ValidationError as error:
            return await self._refuse_kill_switch(body, error)
        services = {
            (item["metadata"]["namespace"], item["metadata"]["name"]): item["metadata"].get("labels") or {}
            for namespace in self._settings.namespaces or (None,)
            for item in await self._cluster.list(INFERENCE_SERVICE, namespace, {})
            if not item["metadata"].get("deletionTimestamp")
        }
        unseen = services.keys() - self._reports.keys() - self._unreported
        if unseen and found.status.observed_generation == found.metadata.generation:
            # The operator has just started; what was confirmed before still stands until it is looked at.
            return None
        status = kill_status(found, services, self._reports, self._now())
        content = status.to_json()
        if content != (body.get("status") or {}):
            try:
                await self._cluster.replace_status({**body, "status": content})
            except ConflictError:
                return CONFLICT_SECONDS
            await self._tell(KILL_SWITCH, found.metadata, kill_notices(found, status))
        return None

    def _no_report(self, key: ServiceKey) -> None:
        """The service was looked at in vain: the kill switch's status must not wait for it any longer."""
        if key not in self._reports and key not in self._unreported:
            self._unreported.add(key)
            self._on_report()

    async def _refuse_kill_switch(self, body: Body, error: ValidationError) -> float | None:
        """An engaged kill switch that cannot be read changes nothing; here it is said that it does not."""
        status = kill_switch_status(body, error, self._now())
        content = status.to_json()
        if content == (body.get("status") or {}):
            return None
        try:
            await self._cluster.replace_status({**body, "status": content})
        except ConflictError:
            return CONFLICT_SECONDS
        told = kill_switch_notices(body, status)
        for notice in told:
            logger.error("KillSwitch %s: %s", KILL_SWITCH_NAME, notice.message)
        await self._tell(KILL_SWITCH, Metadata.model_validate(body["metadata"]), told)
        return None

    async def _observe(self, key: ServiceKey) -> Children:
        namespace, name = key
        get, listed = self._cluster.get, self._cluster.list
        singles = asyncio.gather(
            get(CONFIG_MAP, namespace, switches_name(name)),
            get(SECRET, namespace, admin_secret_name(name)),
            *(get(kind, namespace, name) for kind in _NAMESAKES),
        )
        lists = asyncio.gather(
            listed(REPLICA_SET, namespace, selector(name)), listed(POD, namespace, {SERVICE_LABEL: name})
        )
        kill_body, (config_map, secret, *namesakes), (replica_sets, pods) = await asyncio.gather(
            get(KILL_SWITCH, None, KILL_SWITCH_NAME), singles, lists
        )
        return Children(
            kill=self._kill.look(kill_body),
            config_map=config_map,
            secret=secret,
            namesakes=dict(zip(_NAMESAKES, namesakes, strict=True)),
            replica_sets=replica_sets,
            pods=[pod_facts(pod) for pod in pods],
        )

    async def _switches(self, key: ServiceKey, asked: Asked, children: Children, token: str) -> Facts:
        """ConfigMap first, so that a pod that starts now comes up right; then the push."""
        owner, written = asked.owner, read_switches(children.config_map)
        killed = children.kill.killed(key[0], owner.metadata.labels, written)
        resolved = asked.switches(killed, written)
        instances = [pod.instance for pod in children.pods if pod.started and pod.instance is not None]
        if written is None and instances:
            await self._pusher.learn(key, instances, token)
        found = plan(
            resolved,
            written,
            written_generation(children.config_map),
            self._pusher.observed_generation(key),
        )
        await self._applier.apply(owner, switches_config_map(owner, found.message), children.config_map)
        known = await self._pusher.push(key, instances, token, found.message, PUSH_WAIT_SECONDS)
        return Facts(
            service=owner,
            pods=children.pods,
            message=found.message,
            confirmations=_by_uid(known),
            killed=killed,
            kill_reason=children.kill.reason,
            now=self._now(),
        )

    async def _workload(self, owner: InferenceService, children: Children, facts: Facts, token: str) -> Facts:
        """Everything else; returns the facts with the workload and the verifications in them."""
        apply, key = self._applier.apply, (owner.metadata.namespace or "", owner.metadata.name)
        await apply(owner, access.service_account(owner), children.namesakes[SERVICE_ACCOUNT])
        policy = network.network_policy(owner, self._settings.operator_namespace)
        await apply(owner, policy, children.namesakes[NETWORK_POLICY])
        await apply(owner, access.service(owner), children.namesakes[SERVICE])
        await self._budget(owner, children.namesakes[DISRUPTION_BUDGET])
        deployment, blocked, model, gpu_type = (
            children.namesakes[DEPLOYMENT],
            None,
            owner.metadata.name,
            None,
        )
        try:
            source, accelerator = model_source(owner.spec.model.uri), self._accelerator(owner)
        except ModelSourceError as error:
            blocked = FailureStatus(reason=FailureReason.MODEL_SOURCE_UNSUPPORTED, message=str(error))
        except UnknownAcceleratorError as error:
            blocked = FailureStatus(reason=FailureReason.ACCELERATOR_UNKNOWN, message=str(error))
        else:
            image = workload.pinned_image(children.namesakes[DEPLOYMENT], self._settings.runtime_image)
            inputs = template_inputs(owner.metadata.name, owner.spec, source, accelerator, image)
            model = inputs.served_name
            gpu_type = owner.spec.accelerator.type if inputs.uses_gpu else None
            wanted = workload.deployment(
                owner, inputs, self._settings.pull_policy, children.namesakes[DEPLOYMENT]
            )
            try:
                deployment = await apply(owner, wanted, children.namesakes[DEPLOYMENT])
            except ClusterError as error:
                if error.status not in (403, 422):
                    raise
                # The API server's own words (a quota, a policy, a field it does not take) are for the user.
                blocked = FailureStatus(reason=FailureReason.POD_REFUSED, message=str(error)[:1000])
        found = workload_facts(deployment, children.replica_sets)
        looked = replace(facts, workload=found, blocked=blocked, gpu_type=gpu_type, now=self._now())
        ready = [pod.instance for pod in looked.newest_pods() if pod.ready and pod.instance is not None]
        verifications = self._verifier.ensure(key, ready, token, model)
        by_uid = {instance.uid: verification for instance, verification in verifications.items()}
        served = self._verifier.served(key, [pod.uid for pod in looked.pods])
        return replace(looked, verifications=by_uid, served=served)

    async def _token(self, owner: InferenceService, live: Body | None) -> str:
        """The admin token: made once, never rotated here, never logged."""
        owned = live is not None and self._applier.owns(owner, live)
        if live is not None and owned and (token := access.read_token(live)) is not None:
            return token
        token = secrets.token_urlsafe(32)
        manifest = access.admin_secret(owner, token)
        if live is None:
            await self._cluster.create(manifest)
        else:
            await self._applier.apply(owner, manifest, live)
        return token

    async def _budget(self, owner: InferenceService, live: Body | None) -> None:
        wanted = disruption.disruption_budget(owner)
        if wanted is not None:
            await self._applier.apply(owner, wanted, live)
        elif live is not None and self._applier.owns(owner, live):
            metadata = live["metadata"]
            await self._cluster.delete(
                DISRUPTION_BUDGET, metadata["namespace"], metadata["name"], metadata["uid"]
            )

    def _accelerator(self, owner: InferenceService) -> Accelerator:
        name = owner.spec.accelerator.type
        try:
            return self._settings.accelerators[name]
        except KeyError:
            known = ", ".join(sorted(self._settings.accelerators))
            raise UnknownAcceleratorError(
                f"accelerator.type {name!r} is not in the operator's catalogue; use one of {known}, or add "
                "it to the Helm value accelerators"
            ) from None

    async def _report(
        self, key: ServiceKey, body: Body, facts: Facts, status: InferenceServiceStatus
    ) -> None:
        """Write the status whole when it changed, tell Events of what changed, tell the kill switch."""
        content = status.to_json()
        if content != (body.get("status") or {}):
            await self._cluster.replace_status({**body, "status": content})
            await self._tell(INFERENCE_SERVICE, facts.service.metadata, notices(facts.service, status))
        self._shown_ttft[key] = status.ttft
        self._unreported.discard(key)
        report = service_report(facts)
        if self._reports.get(key) != report:
            self._reports[key] = report
            self._on_report()

    async def _tell(self, kind: Kind, about: Metadata, told: Sequence[Notice]) -> None:
        for notice in told:
            try:
                await self._cluster.create(event_body(kind, about, notice, self._now()))
            except ClusterError as error:
                # An Event is a courtesy: a service must not fail because one cannot be written.
                logger.warning("%s %s: event not written: %s", kind.kind, about.name, error)


class UnknownAcceleratorError(ValueError):
    """spec.accelerator.type is not in the catalogue; the text lists it."""


def _by_uid(known: dict[Instance, Confirmation]) -> dict[str, Confirmation]:
    return {instance.uid: confirmation for instance, confirmation in known.items()}
