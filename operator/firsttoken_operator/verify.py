"""A pod counts as ready only after it has generated one real token.

Once per running container: a restarted container is verified again, a reconcile never repeats it, and after a
restart of the operator every pod is verified anew. The pod leaves the request out of its TTFT (see
`firsttoken_api.verification`); one of an image that does not know the mark yet counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from firsttoken_operator.runtime_client import PodError, RuntimeClient
from firsttoken_operator.switches import Instance, ServiceKey
from firsttoken_operator.workqueue import Backoff

VERIFY_BACKOFF = Backoff(1.0, 30.0)


@dataclass(frozen=True)
class Verification:
    """answered: the pod generated a token. error: why the last try failed, in words."""

    answered: bool = False
    error: str | None = None


class Verifier:
    """Runs the verifications in the background."""

    def __init__(self, client: RuntimeClient, on_news: Callable[[ServiceKey], None]) -> None:
        """on_news: called with the service when a verification of it succeeded or newly failed."""
        self._client = client
        self._on_news = on_news
        self._known: dict[ServiceKey, dict[Instance, Verification]] = {}
        self._tasks: dict[tuple[ServiceKey, Instance], asyncio.Task[None]] = {}
        self._served: dict[ServiceKey, set[str]] = {}

    def ensure(
        self, key: ServiceKey, instances: Collection[Instance], token: str, model: str
    ) -> dict[Instance, Verification]:
        """What is known of these instances; starts verifying those not yet verified, drops all others.

        token: of the pods' admin port; a mark of it goes along. model: the name a request asks for.
        """
        known = self._known.setdefault(key, {})
        for gone in set(known) - set(instances):
            known.pop(gone)
            self._cancel(key, gone)
        for instance in instances:
            result = known.setdefault(instance, Verification())
            if not result.answered and (key, instance) not in self._tasks:
                task = asyncio.create_task(self._verify(key, instance, token, model))
                self._tasks[key, instance] = task
        return dict(known)

    def served(self, key: ServiceKey, uids: Collection[str]) -> frozenset[str]:
        """Those of the pods with these uids that have generated a token, in this or an earlier container."""
        found = self._served.setdefault(key, set())
        found &= set(uids)
        return frozenset(found)

    def forget(self, key: ServiceKey) -> None:
        self._served.pop(key, None)
        for instance in self._known.pop(key, {}):
            self._cancel(key, instance)

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        for key in list(self._known):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, key: ServiceKey, instance: Instance) -> None:
        task = self._tasks.pop((key, instance), None)
        if task is not None:
            task.cancel()

    async def _verify(self, key: ServiceKey, instance: Instance, token: str, model: str) -> None:
        failures = 0
        while True:
            try:
                await self._client.generate_one(instance.address, token, model)
            except PodError as error:
                failures += 1
                result = Verification(False, str(error))
                news = self._known[key].get(instance) != result
                self._known[key][instance] = result
                if news:
                    self._on_news(key)
                await asyncio.sleep(VERIFY_BACKOFF.after(failures))
            else:
                self._known[key][instance] = Verification(True)
                self._served.setdefault(key, set()).add(instance.uid)
                self._tasks.pop((key, instance), None)
                self._on_news(key)
                return
