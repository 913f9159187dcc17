"""What the operator says to a runtime pod, and what the pod answers.

Admin port: `GET /admin/v1/state`, `PUT /admin/v1/switches`, bearer token. API port: one real generation of
one token. Everything has a deadline: a pod that hangs must never hold a reconcile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import aiohttp

from firsttoken_api import verification
from firsttoken_api.switches import SwitchMessage

ADMIN_TIMEOUT_SECONDS = 2.0
GENERATE_TIMEOUT_SECONDS = 60.0
# Most bytes of an answer that are read: a pod gone wrong must not fill the operator's memory.
ANSWER_BYTES = 1 << 20


class PodErrorKind(StrEnum):
    UNREACHABLE = "unreachable"
    """No connection, or no answer in time."""
    UNAUTHORIZED = "unauthorized"
    """The pod runs with another token than the Secret holds now."""
    AHEAD = "ahead"
    """The pod has a newer generation, or other switches under the same generation."""
    REFUSED = "refused"
    """The pod understood and said no."""


class PodError(Exception):
    """A pod that did not do what it was asked; the text is a sentence for status.

    generation: the pod's own generation where it said so.
    """

    def __init__(self, kind: PodErrorKind, message: str, generation: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.generation = generation


@dataclass(frozen=True)
class PodAddress:
    """Where one pod listens."""

    host: str
    api_port: int
    admin_port: int

    def url(self, port: int, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}{path}"


@dataclass(frozen=True)
class SwitchState:
    """One switch as a pod says it is: state is a firsttoken_api.switches.State value."""

    name: str
    state: str
    reason: str | None = None


@dataclass(frozen=True)
class PodState:
    """What one pod says of itself."""

    generation: int
    switches: tuple[SwitchState, ...] = ()
    ready: bool = False
    draining: bool = False
    version: str | None = None
    ttft: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: Mapping[str, Any] = field(default_factory=dict)

    def states(self) -> dict[str, SwitchState]:
        return {switch.name: switch for switch in self.switches}


def parse_state(body: Any) -> PodState:
    """Read a state answer; raises PodError (REFUSED) when it is not one."""
    try:
        switches = tuple(
            SwitchState(str(item["name"]), str(item["state"]), item.get("reason") or None)
            for item in body["switches"]
        )
        return PodState(
            generation=int(body["generation"]),
            switches=switches,
            ready=bool(body.get("ready", False)),
            draining=bool(body.get("draining", False)),
            version=body.get("version"),
            ttft=body.get("ttft") or {},
            prompt_tokens=body.get("prompt_tokens") or {},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PodError(PodErrorKind.REFUSED, f"answered something that is not a state ({error!r})") from None


class RuntimeClient(Protocol):
    """Every method raises PodError."""

    async def state(self, pod: PodAddress, token: str) -> PodState: ...

    async def put_switches(self, pod: PodAddress, token: str, message: SwitchMessage) -> PodState: ...

    async def generate_one(self, pod: PodAddress, token: str, model: str) -> None: ...


class HttpRuntimeClient:
    """`RuntimeClient` over the pods' own addresses. Close it with `aclose`."""

    def __init__(self) -> None:
        # Never through a proxy: pods are addressed directly, and the token is for them alone.
        self._session = aiohttp.ClientSession(
            trust_env=False, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )

    async def aclose(self) -> None:
        await self._session.close()

    async def state(self, pod: PodAddress, token: str) -> PodState:
        url = pod.url(pod.admin_port, "/admin/v1/state")
        return parse_state(await self._ask("GET", url, _bearer(token), None, ADMIN_TIMEOUT_SECONDS))

    async def put_switches(self, pod: PodAddress, token: str, message: SwitchMessage) -> PodState:
        url = pod.url(pod.admin_port, "/admin/v1/switches")
        body = message.to_json()
        return parse_state(await self._ask("PUT", url, _bearer(token), body, ADMIN_TIMEOUT_SECONDS))

    async def generate_one(self, pod: PodAddress, token: str, model: str) -> None:
        """Through the API port, as users come; marked, so that it does not count as their TTFT."""
        url = pod.url(pod.api_port, "/v1/completions")
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        headers = {verification.HEADER: verification.verification_mark(token)}
        answer = await self._ask("POST", url, headers, body, GENERATE_TIMEOUT_SECONDS)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict) or "text" not in first:
            raise PodError(PodErrorKind.REFUSED, "answered without a completion")

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], body: Any, seconds: float) -> Any:
        try:
            async with self._session.request(
                method,
                url,
                json=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as response:
                text = (await _whole(response.content)).decode("utf-8", "replace")
                status = response.status
        except TimeoutError:
            raise PodError(PodErrorKind.UNREACHABLE, f"no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise PodError(PodErrorKind.UNREACHABLE, _connection_words(error)) from None
        return answer_of(status, text)


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def _whole(content: aiohttp.StreamReader) -> bytes:
    """The answer to its end, or to ANSWER_BYTES: one `read` gives only what has arrived so far."""
    found = bytearray()
    while len(found) < ANSWER_BYTES and (part := await content.read(ANSWER_BYTES - len(found))):
        found += part
    return bytes(found)


def answer_of(status: int, text: str) -> Any:
    """The JSON body of a good answer; raises PodError with the pod's own words for any other."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if status < 300:
        return body
    words = _error_words(body) or f"HTTP {status}"
    if status == 401:
        raise PodError(
            PodErrorKind.UNAUTHORIZED,
            "refused the admin token; a changed Secret reaches a pod within about a minute",
        )
    if status == 409:
        raise PodError(PodErrorKind.AHEAD, words, _generation_of(body))
    if status in (502, 503, 504):
        raise PodError(PodErrorKind.UNREACHABLE, words)
    raise PodError(PodErrorKind.REFUSED, words)


def _error_words(body: Any) -> str | None:
    if not isinstance(body, dict):
        return None
    error = body.get("error", body.get("detail", body.get("message")))
    if isinstance(error, dict):
        error = error.get("message")
    return str(error)[:500] if error else None


def _generation_of(body: Any) -> int | None:
    found: Any = body.get("generation") if isinstance(body, dict) else None
    if found is None and isinstance(body, dict) and isinstance(body.get("error"), dict):
        found = body["error"].get("generation")
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _connection_words(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"connection failed ({error.os_error.strerror or error.os_error})"
    return f"connection broke ({type(error).__name__})"
