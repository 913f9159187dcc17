"""Whether a live object is what was asked for, decided without a write.

An idle cluster sees no writes: an object is applied when it is missing, when the manifest is not the one that
was applied last (its digest is an annotation), or when somebody changed a field the manifest names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from firsttoken_api.quantity import QuantityError, parse_quantity
from firsttoken_operator.cluster import Body
from firsttoken_operator.desired.names import APPLIED_ANNOTATION, digest


class Verdict(StrEnum):
    KEEP = "keep"
    APPLY = "apply"
    FOREIGN = "foreign"
    """Somebody else's object has the name; it is never touched."""
    OUTGOING = "outgoing"
    """It belonged to a deleted service of the same name and is about to be collected: wait."""


def stamped(manifest: Body) -> Body:
    """The manifest with its own digest as annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def verdict(desired: Body, live: Body | None, owner_uid: str) -> Verdict:
    """What to do about one object. `desired` is stamped; owner_uid: uid of the InferenceService."""
    if live is None:
        return Verdict.APPLY
    owner = _controller(live)
    if owner is None:
        return Verdict.FOREIGN
    if owner.get("uid") != owner_uid:
        same_kind = owner.get("kind") == "InferenceService" and str(owner.get("apiVersion", "")).startswith(
            "firsttoken.dev/"
        )
        return Verdict.OUTGOING if same_kind else Verdict.FOREIGN
    if live["metadata"].get("deletionTimestamp"):
        return Verdict.OUTGOING
    return Verdict.KEEP if covers(live, desired) else Verdict.APPLY


def covers(live: Any, desired: Any) -> bool:
    """Whether every field that `desired` names has that value in `live`; `live` may have more fields.

    Lists must have the same length: an item more is a change somebody made. Quantities compare by value.
    """
    if desired is None:
        return live is None
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(covers(live.get(key), value) for key, value in desired.items())
    if isinstance(desired, list):
        # The API server leaves an empty list out.
        if not desired:
            return not live
        return (
            isinstance(live, list)
            and len(live) == len(desired)
            and all(covers(one, other) for one, other in zip(live, desired, strict=True))
        )
    return bool(live == desired) or _same_quantity(live, desired)


def _same_quantity(live: Any, desired: Any) -> bool:
    if not isinstance(live, str) or not isinstance(desired, str | int):
        return False
    try:
        return parse_quantity(live) == parse_quantity(desired)
    except QuantityError:
        return False


def _controller(live: Body) -> dict[str, Any] | None:
    for reference in live["metadata"].get("ownerReferences") or []:
        if reference.get("controller"):
            return dict(reference)
    return None
