"""What the two applications share: errors as JSON in every case, bodies with a limit."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from firsttoken_runtime.api.engine_client import EngineLost
from firsttoken_runtime.api.errors import ApiError, error_response
from firsttoken_runtime.api.respond import engine_lost

log = logging.getLogger("firsttoken")


class DocumentedApi(FastAPI):
    """Routes read their bodies themselves; `bodies` puts those in /openapi.json all the same."""

    bodies: tuple[type[BaseModel], ...] = ()

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            described = super().openapi()
            inputs: list[tuple[type[BaseModel], JsonSchemaMode]] = [
                (body, "validation") for body in self.bodies
            ]
            _, schemas = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
            described.setdefault("components", {}).setdefault("schemas", {}).update(schemas.get("$defs", {}))
        return self.openapi_schema or {}


def body_reference(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes this body."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def make_app(title: str, version: str) -> DocumentedApi:
    """An application that answers every error in the OpenAI shape."""
    app = DocumentedApi(title=title, version=version, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(EngineLost, _engine_lost)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 beyond the limit, without reading the rest."""
    too_large = ApiError(
        413,
        f"the body is larger than the limit of {limit_bytes} bytes",
        code="request_too_large",
        close=True,
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def _api_error(request: Request, error: Any) -> Response:
    return error_response(error)


async def _engine_lost(request: Request, error: Any) -> Response:
    return error_response(engine_lost(error))


async def _http_error(request: Request, error: Any) -> Response:
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        answer = ApiError(404, f"there is no route {method} {path}", code="not_found")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        answer = ApiError(405, f"{path} does not take {method}; use {allowed}", code="method_not_allowed")
    else:
        answer = ApiError(error.status_code, str(error.detail), code="http_error")
    response = error_response(answer)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Any) -> Response:
    return Response(status_code=499)  # nobody reads it; the status is for logs, as nginx has it


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(
        ApiError(500, "the server failed on this request; see its log", code="internal_error")
    )
