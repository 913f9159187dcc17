"""The admin port: state, switches, requests, integrity. Every route needs the bearer token."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from firsttoken_api.switches import SwitchError, parse_message
from firsttoken_api.verification import verification_mark
from firsttoken_runtime.api.base import make_app, read_body
from firsttoken_runtime.api.errors import ApiError, bad_request, error_response, json_response
from firsttoken_runtime.api.middleware import Entry
from firsttoken_runtime.api.recorder import KEPT_REQUESTS, Order
from firsttoken_runtime.api.service import ANSWER_SECONDS, Service, StaleGeneration

log = logging.getLogger("firsttoken")
MOST_BODY_BYTES = 1 << 20
# The API server's pod proxy removes Authorization; a push that goes through it uses this header.
TOKEN_HEADER = "x-firsttoken-token"  # noqa: S105  the name of a header


class TokenFile:
    """The admin token, read at every check: a rotated Secret counts at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def allows(self, offered: str) -> bool:
        """Whether this is the token, in constant time. A missing or empty file allows nobody."""
        token = self._read()
        return bool(token) and hmac.compare_digest(token.encode(), offered.encode())

    def marks(self, offered: str) -> bool:
        """Whether this is the mark of a verification, made from the token; in constant time."""
        token = self._read()
        return bool(token) and hmac.compare_digest(verification_mark(token).encode(), offered.encode())

    def _read(self) -> str:
        try:
            return self.path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            log.error("admin token file %s cannot be read: %s", self.path, error)
            return ""


class BearerAuth:
    """Lets requests with the token through, and answers 401 to all others before they reach a route."""

    def __init__(self, app: ASGIApp, token: TokenFile) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._token.allows(_offered(Headers(scope=scope))):
            error = ApiError(
                401, "the admin port needs the header Authorization: Bearer TOKEN", code="unauthorized"
            )
            response = error_response(error)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _requests_query(query: Mapping[str, str]) -> tuple[Order, int]:
    """Raises ApiError 400."""
    if unknown := sorted(set(query) - {"order", "limit"}):
        raise bad_request(f"unknown query parameter {unknown[0][:50]!r}; there are order and limit")
    try:
        order = Order(query.get("order", Order.SLOWEST))
    except ValueError:
        raise bad_request(f"order must be one of {', '.join(Order)}", param="order") from None
    limit = query.get("limit", "100")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 6 or int(limit) > KEPT_REQUESTS:
        raise bad_request(f"limit must be a number from 0 to {KEPT_REQUESTS}", param="limit")
    return order, int(limit)


def _offered(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else headers.get(TOKEN_HEADER, "")


# What the routes read themselves, for /openapi.json.
_DESCRIBED: dict[str, dict[str, Any]] = {
    "/admin/v1/switches": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "generation": {"type": "integer", "minimum": 0},
                            "switches": {"type": "object", "additionalProperties": {"type": "object"}},
                        },
                        "required": ["generation", "switches"],
                    }
                }
            },
        }
    },
    "/admin/v1/requests": {
        "parameters": [
            {"name": "order", "in": "query", "schema": {"enum": list(Order)}},
            {"name": "limit", "in": "query", "schema": {"type": "integer", "maximum": KEPT_REQUESTS}},
        ]
    },
}


def build_admin_app(service: Service, token: TokenFile) -> ASGIApp:
    """The application for `--admin-port`."""
    routes = AdminRoutes(service)
    app = make_app("firsttoken admin", service.version)
    for method, path, handler in (
        ("GET", "/admin/v1/state", routes.state),
        ("PUT", "/admin/v1/switches", routes.put_switches),
        ("GET", "/admin/v1/requests", routes.requests),
        ("GET", "/admin/v1/integrity", routes.integrity),
        ("POST", "/admin/v1/prefix-cache/flush", routes.flush),
        ("POST", "/admin/v1/profile", routes.profile),
    ):
        app.add_api_route(path, handler, methods=[method], openapi_extra=_DESCRIBED.get(path))
    return Entry(BearerAuth(app, token))


class AdminRoutes:
    """One method per route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def state(self) -> Response:
        return json_response(await self._service.state())

    async def put_switches(self, request: Request) -> Response:
        body = await read_body(request, MOST_BODY_BYTES)
        try:
            message = parse_message(json.loads(body), ignore_unknown=True)
        except SwitchError as error:
            raise bad_request(str(error), code="invalid_switches") from None
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
        try:
            return json_response(await self._service.set_switches(message))
        except StaleGeneration as stale:
            refused = ApiError(409, str(stale), code="stale_generation", param="generation")
            return json_response({"generation": stale.generation, **refused.body()}, 409)

    async def requests(self, request: Request) -> Response:
        """The engine's own list, and the requests of this process with their parts: `running`, and
        `finished`, the last ones that ended. Query: `order` slowest (default) or newest, `limit` of the
        finished, 100 by default."""
        order, limit = _requests_query(request.query_params)
        ledger = self._service.records.ledger
        answer = await self._answer(self._service.engine.requests(ANSWER_SECONDS))
        return json_response(
            {**answer, "running": ledger.running(), "finished": ledger.finished(order, limit)}
        )

    async def integrity(self) -> Response:
        return json_response(await self._answer(self._service.engine.integrity(ANSWER_SECONDS)))

    async def flush(self) -> Response:
        return json_response(await self._answer(self._service.engine.flush_prefix_cache(ANSWER_SECONDS)))

    async def profile(self) -> Response:
        raise ApiError(501, "profiling is not in this build", code="not_in_this_build")

    async def _answer(self, asked: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        try:
            return await asked
        except TimeoutError:
            raise ApiError(
                503, f"the engine did not answer within {ANSWER_SECONDS:.0f} s", code="engine_busy"
            ) from None
