"""How a pod knows the operator's verification: the one-token request that makes a pod count as ready.

It goes through the real API port, like a user's request, but is nobody's traffic and does not belong in TTFT.
So it carries a mark that only a holder of the pod's admin token can make, and a caller without the token has
no way to hide from the metrics. The mark is derived from the token: whoever sees one on the API port can
administer nothing with it.
"""

from __future__ import annotations

import hashlib
import hmac

HEADER = "x-firsttoken-verification"
_PURPOSE = b"firsttoken verification"


def verification_mark(token: str) -> str:
    """The header's value for a pod with this admin token: HMAC-SHA256 in hexadecimal."""
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()
