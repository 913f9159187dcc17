"""Server-side apply, only when something is to be changed, and never over somebody else's object."""

from __future__ import annotations

import logging

from firsttoken_api.resources import InferenceService
from firsttoken_operator.cluster import CONFIG_MAP, Body, Cluster
from firsttoken_operator.desired.names import APPLIED_ANNOTATION
from firsttoken_operator.drift import Verdict, stamped, verdict

logger = logging.getLogger(__name__)


class NameTakenError(Exception):
    """An object that the service needs exists and is not its own. outgoing: it is about to be collected."""

    def __init__(self, message: str, outgoing: bool) -> None:
        super().__init__(message)
        self.outgoing = outgoing


class Applier:
    """Applies manifests of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Applied, and still not as asked for: another controller or a default of the API server insists.
        # Without this the two would write in turns for ever. By object: what was asked for, what it became.
        self._disputed: dict[tuple[str, str], tuple[str, str]] = {}

    async def apply(self, owner: InferenceService, manifest: Body, live: Body | None) -> Body:
        """The live object as it is afterwards. Raises NameTakenError and ClusterError."""
        desired = stamped(manifest)
        match verdict(desired, live, owner.metadata.uid):
            case Verdict.FOREIGN:
                raise NameTakenError(_taken_words(desired, owner), outgoing=False)
            case Verdict.OUTGOING:
                words = f"waits for {_words(desired)} of a deleted service of the same name to be removed"
                raise NameTakenError(words, outgoing=True)
            case Verdict.KEEP if live is not None:
                return live
        key = (desired["kind"], _name(desired))
        asked: str = desired["metadata"]["annotations"][APPLIED_ANNOTATION]
        if live is not None and self._disputed.get(key) == (asked, _version(live)):
            return live
        if live is not None and desired["kind"] == CONFIG_MAP.kind:
            # `firsttoken kill` writes the same ConfigMap: whoever read it first must not win unseen.
            version = live["metadata"]["resourceVersion"]
            desired = {**desired, "metadata": {**desired["metadata"], "resourceVersion": version}}
        applied = await self._cluster.apply(desired)
        if verdict(stamped(manifest), applied, owner.metadata.uid) is not Verdict.KEEP:
            logger.warning(
                "%s is not as applied; a webhook or another controller changes it", _words(desired)
            )
            self._disputed[key] = (asked, _version(applied))
        else:
            self._disputed.pop(key, None)
        return applied

    @staticmethod
    def owns(owner: InferenceService, live: Body) -> bool:
        """Whether the live object belongs to this very service."""
        return any(
            reference.get("uid") == owner.metadata.uid
            for reference in live["metadata"].get("ownerReferences") or []
        )


def _name(desired: Body) -> str:
    metadata = desired["metadata"]
    return f"{metadata.get('namespace')}/{metadata['name']}"


def _version(live: Body) -> str:
    """What changes when somebody changes the object's content: its generation, or else its version."""
    metadata = live["metadata"]
    return f"{metadata.get('uid')}/{metadata.get('generation') or metadata.get('resourceVersion')}"


def _words(desired: Body) -> str:
    return f"{desired['kind']} {_name(desired)}"


def _taken_words(desired: Body, owner: InferenceService) -> str:
    return (
        f"{_words(desired)} exists and does not belong to InferenceService {owner.metadata.name}: delete it, "
        "or give the InferenceService another name"
    )
