"""How a switch gets into the pods: the next generation, the push, and who confirmed.

    spec, rollback, kill switch ──resolve──► plan ──► ConfigMap ──► every pod's admin port ──► confirmation

One task per pod pushes the newest message until the pod runs that generation, so that a pod that hangs holds
up neither the other pods nor the next reconcile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from firsttoken_api.resources import KillSwitch
from firsttoken_api.switches import Setting, SwitchMessage, killed_names
from firsttoken_operator.runtime_client import PodAddress, PodError, PodErrorKind, PodState, RuntimeClient
from firsttoken_operator.workqueue import Backoff

logger = logging.getLogger(__name__)

ServiceKey = tuple[str, str]
"""Namespace and name of an InferenceService."""

PUSH_BACKOFF = Backoff(0.2, 15.0)


@dataclass(frozen=True)
class Plan:
    """The message that the pods are to run, and whether the ConfigMap has to be written for it."""

    message: SwitchMessage
    write: bool


def plan(
    resolved: Mapping[str, Setting], written: SwitchMessage | None, written_generation: int, observed: int
) -> Plan:
    """The next message.

    written: what the ConfigMap says, None when missing or unreadable. written_generation: its generation even
    so. observed: the highest generation any pod was seen with. The generation grows when the switches change,
    and when a pod is ahead of the ConfigMap (it was deleted or put back); otherwise it stays.
    """
    unchanged = written is not None and dict(written.switches) == dict(resolved)
    if unchanged and written is not None and written.generation >= max(observed, 1):
        return Plan(written, write=False)
    return Plan(SwitchMessage(max(written_generation, observed) + 1, resolved), write=True)


def killed_here(kill_switch: KillSwitch | None, namespace: str, labels: Mapping[str, str]) -> frozenset[str]:
    """The optimizations that the kill switch takes back from a service with this namespace and labels."""
    if kill_switch is None or not kill_switch.spec.engaged or kill_switch.metadata.deletion_timestamp:
        return frozenset()
    if not kill_switch.spec.concerns(namespace, labels):
        return frozenset()
    return killed_names(frozenset(kill_switch.spec.optimizations))


@dataclass(frozen=True)
class Instance:
    """One running container of a pod; a restarted container is another instance and knows nothing.

    container: the container's id.
    """

    uid: str
    container: str
    pod: str
    address: PodAddress


@dataclass(frozen=True)
class Confirmation:
    """What is known of one instance: its last answer, and the last error since."""

    state: PodState | None = None
    error: PodError | None = None

    def confirms(self, generation: int) -> bool:
        return self.state is not None and self.state.generation == generation

    def why_not(self, generation: int) -> str:
        """Why the pod has not confirmed, in words."""
        if self.error is not None:
            return str(self.error)
        if self.state is None:
            return "has not answered yet"
        return f"runs generation {self.state.generation}, not {generation}"


@dataclass
class _Conversation:
    instance: Instance
    token: str
    message: SwitchMessage
    known: Confirmation = Confirmation()
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    attempted: asyncio.Event = field(default_factory=asyncio.Event)
    # The reconcile that pushed has gone on; tell it when there is news.
    detached: bool = False


class Pusher:
    """Talks to all pods of all services."""

    def __init__(
        self,
        client: RuntimeClient,
        on_news: Callable[[ServiceKey], None],
    ) -> None:
        """on_news: called with the service when a pod confirmed or failed after `push` had returned."""
        self._client = client
        self._on_news = on_news
        self._services: dict[ServiceKey, dict[Instance, _Conversation]] = {}
        self._observed: dict[ServiceKey, int] = {}

    def observed_generation(self, key: ServiceKey) -> int:
        """The highest generation that any pod of the service was seen with since the operator started."""
        return self._observed.get(key, 0)

    def confirmations(self, key: ServiceKey) -> dict[Instance, Confirmation]:
        return {instance: talk.known for instance, talk in self._services.get(key, {}).items()}

    async def learn(self, key: ServiceKey, instances: Collection[Instance], token: str) -> None:
        """Ask the pods which generation they run: needed before a generation is made without a ConfigMap."""
        answers = await asyncio.gather(
            *(self._client.state(instance.address, token) for instance in instances), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, PodState):
                self._saw(key, answer.generation)

    async def push(
        self,
        key: ServiceKey,
        instances: Collection[Instance],
        token: str,
        message: SwitchMessage,
        wait_seconds: float,
    ) -> dict[Instance, Confirmation]:
        """Make every instance run `message`; returns what is known after at most `wait_seconds`.

        Instances that confirmed this very message already are not asked again. Those that are not in
        `instances` any more are dropped.
        """
        talks = self._services.setdefault(key, {})
        for gone in set(talks) - set(instances):
            self._end(talks.pop(gone))
        pending: list[_Conversation] = []
        for instance in instances:
            talk = talks.get(instance)
            if talk is None:
                talk = talks[instance] = _Conversation(instance, token, message)
            changed = talk.message != message or talk.token != token
            talk.message, talk.token = message, token
            if talk.known.confirms(message.generation) and not changed:
                continue
            talk.attempted.clear()
            talk.detached = False
            if talk.task is None or talk.task.done():
                talk.task = asyncio.create_task(self._converse(key, talk))
            elif changed:
                talk.wake.set()
            pending.append(talk)
        if pending:
            waits = [asyncio.ensure_future(talk.attempted.wait()) for talk in pending]
            _, late = await asyncio.wait(waits, timeout=wait_seconds)
            for wait in late:
                wait.cancel()
            for talk in pending:
                talk.detached = True
        return self.confirmations(key)

    async def refresh(self, key: ServiceKey) -> bool:
        """Ask every instance for its state (read-only). True when one of them is not where it should be,
        or a switch's effective state changed."""
        talks = list(self._services.get(key, {}).values())
        known = [talk.known for talk in talks]
        answers = await asyncio.gather(
            *(self._client.state(talk.instance.address, talk.token) for talk in talks), return_exceptions=True
        )
        news = False
        for talk, before, answer in zip(talks, known, answers, strict=True):
            if talk.known is not before:
                continue  # a push was answered meanwhile, and knows better
            if isinstance(answer, PodState):
                self._saw(key, answer.generation)
                talk.known = Confirmation(answer)
                news |= before.error is not None or before.state is None
                news |= before.state is not None and (
                    before.state.switches != answer.switches or before.state.generation != answer.generation
                )
            elif isinstance(answer, PodError):
                talk.known = Confirmation(before.state, answer)
                news |= before.error is None
            elif isinstance(answer, BaseException):
                raise answer
        return news

    def forget(self, key: ServiceKey) -> None:
        """Stop talking to the pods of a service that is gone."""
        for talk in self._services.pop(key, {}).values():
            self._end(talk)
        self._observed.pop(key, None)

    async def aclose(self) -> None:
        tasks = [talk.task for talks in self._services.values() for talk in talks.values() if talk.task]
        for key in list(self._services):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _saw(self, key: ServiceKey, generation: int) -> None:
        self._observed[key] = max(self._observed.get(key, 0), generation)

    @staticmethod
    def _end(talk: _Conversation) -> None:
        if talk.task is not None:
            talk.task.cancel()

    async def _converse(self, key: ServiceKey, talk: _Conversation) -> None:
        failures = 0
        while True:
            message, before = talk.message, talk.known
            talk.wake.clear()
            try:
                state = await self._client.put_switches(talk.instance.address, talk.token, message)
            except PodError as error:
                failures += 1
                talk.known = Confirmation(talk.known.state, error)
                if error.kind is PodErrorKind.AHEAD:
                    # At the same generation it has other switches: only a higher one makes it move.
                    self._saw(key, max(error.generation or 0, message.generation + 1))
            else:
                failures = 0
                talk.known = Confirmation(state)
                self._saw(key, state.generation)
            if talk.message is message:
                talk.attempted.set()
            if talk.detached and _is_news(before, talk.known):
                self._on_news(key)
            if talk.message is not message:
                continue
            error_now = talk.known.error
            if error_now is None:
                return
            if error_now.kind is PodErrorKind.AHEAD:
                # Only a new generation helps, and the reconcile that makes it starts a new conversation.
                self._on_news(key)
                return
            await self._pause(talk, PUSH_BACKOFF.after(failures))

    async def _pause(self, talk: _Conversation, seconds: float) -> None:
        try:
            await asyncio.wait_for(talk.wake.wait(), seconds)
        except TimeoutError:
            return


def _is_news(before: Confirmation, now: Confirmation) -> bool:
    if (before.error is None) != (now.error is None) or before.state != now.state:
        return True
    return before.error is not None and str(before.error) != str(now.error)
