"""The OpenAI routes, health and metrics: what callers and Kubernetes see on `--port`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp

from firsttoken_api import verification
from firsttoken_runtime import ipc
from firsttoken_runtime.api.admin import TokenFile
from firsttoken_runtime.api.base import body_reference, make_app, read_body
from firsttoken_runtime.api.bodies import ChatShape, CompletionShape
from firsttoken_runtime.api.engine_client import refused
from firsttoken_runtime.api.errors import ApiError, bad_request, check_token_ids, json_response
from firsttoken_runtime.api.generation import Generation
from firsttoken_runtime.api.middleware import ARRIVAL, Entry
from firsttoken_runtime.api.respond import GenerationResponse
from firsttoken_runtime.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from firsttoken_runtime.api.service import Service, new_id
from firsttoken_runtime.engine import requests as engine
from firsttoken_runtime.engine.admission import Limits, check_length
from firsttoken_runtime.engine.requests import AdmissionError
from firsttoken_runtime.model.errors import ChatTemplateError, ModelError

Body = TypeVar("Body", bound=BaseModel)


def build_app(service: Service, token: TokenFile) -> ASGIApp:
    """The application for `--port`. token: of the admin port; it says which requests are verifications."""
    routes = Routes(service, token)
    app = make_app("firsttoken", service.version)
    app.bodies = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    for path, handler, schema in (
        ("/v1/chat/completions", routes.chat, ChatRequest),
        ("/v1/completions", routes.completions, CompletionRequest),
        ("/tokenize", routes.tokenize, TokenizeRequest),
        ("/detokenize", routes.detokenize, DetokenizeRequest),
    ):
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=body_reference(schema))
    gets: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/metrics", routes.metrics),
        ("/version", routes.version),
    )
    for path, answer in gets:
        app.add_api_route(path, answer, methods=["GET"])
    return Entry(app, service.count)


class Routes:
    """One method per route."""

    def __init__(self, service: Service, token: TokenFile) -> None:
        self._service = service
        self._token = token

    async def chat(self, request: Request) -> Response:
        service = self._service
        body = await self._begin(request, ChatRequest)
        tokenizer, _ = service.loaded()

        def render() -> list[int]:
            return tokenizer.encode_chat(
                body.template_messages(),
                add_generation_prompt=body.add_generation_prompt is not False,
                **(body.chat_template_kwargs or {}),
            )

        prompt = await self._tokens(render, "messages")
        return self._respond(request, body, prompt, ChatShape, "chatcmpl")

    async def completions(self, request: Request) -> Response:
        service = self._service
        body = await self._begin(request, CompletionRequest)
        tokenizer, _ = service.loaded()
        text = body.prompt
        if isinstance(text, str):
            prompt = await self._tokens(lambda: tokenizer.encode(text), "prompt")
        else:
            prompt = text
        return self._respond(request, body, prompt, CompletionShape, "cmpl")

    async def tokenize(self, request: Request) -> Response:
        body = (await self._read(request, TokenizeRequest)).one_source()
        self._service.check_model(body.model)
        tokenizer, ready = self._service.loaded()

        def encode() -> list[int]:
            if body.messages is not None:
                messages = [message.model_dump(exclude_unset=True) for message in body.messages]
                return tokenizer.encode_chat(messages, body.add_generation_prompt is not False)
            return tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)

        tokens = await self._tokens(encode, "prompt")
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": ready.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        self._service.check_model(body.model)
        tokenizer, _ = self._service.loaded()
        check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
        text = await self._service.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return json_response({"prompt": text})

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        self._service.check_model(name)
        return json_response(self._model())

    async def health(self) -> Response:
        reason = self._service.not_alive()
        return json_response({"status": reason or "ok"}, 503 if reason else 200)

    async def ready(self) -> Response:
        reason = self._service.not_ready()
        return json_response({"ready": reason is None, "reason": reason}, 503 if reason else 200)

    async def metrics(self) -> Response:
        return Response(self._service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        return json_response({"version": self._service.version})

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.served_name,
            "object": "model",
            "created": service.created,
            "owned_by": "firsttoken",
            "max_model_len": service.ready.max_model_len if service.ready else None,
        }

    async def _begin(self, request: Request, schema: type[Body]) -> Body:
        """The body of a completion, checked; errors count in the metrics."""
        try:
            self._service.loaded()
            body = await self._read(request, schema)
            assert isinstance(body, GenerationRequest)
            self._service.check_model(body.model)
            body.refuse_unsupported()
        except ApiError as error:
            self._count_error(error)
            raise
        return body

    async def _read(self, request: Request, schema: type[Body]) -> Body:
        return parse(schema, await read_body(request, self._service.max_body_bytes))

    async def _tokens(self, encode: Callable[[], list[int]], param: str) -> list[int]:
        """Token ids from a worker thread. Raises ApiError 400 for messages the template cannot render."""
        try:
            return await self._service.in_thread(encode)
        except (ChatTemplateError, ModelError) as problem:
            error = bad_request(str(problem), param=param, code="chat_template")
        except UnicodeEncodeError:
            error = bad_request(f"{param}: half a surrogate pair is no character", param=param)
        self._count_error(error)
        raise error

    def _count_error(self, error: ApiError) -> None:
        self._service.metrics.refused(error.code)

    def _respond(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompt: list[int],
        shape_type: type[CompletionShape],
        prefix: str,
    ) -> Response:
        service = self._service
        tokenizer, ready = service.loaded()
        id = new_id(prefix)
        self._must_fit(id, len(prompt), ready)
        generation = Generation(
            service.engine,
            engine.Request(
                id=id,
                prompt=tuple(prompt),
                sampling=sampling_params(body, ready.max_model_len, service.seeds),
                arrival_ns=request.scope[ARRIVAL],
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            ),
            tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False),
            body.stop or (),
            service.metrics,
            service.window,
            recorded=not self._is_verification(request),
        )
        shape = shape_type(
            id=id,
            created=int(time.time()),
            model=service.served_name,
            token_text=tokenizer.token_text,
            token_bytes=tokenizer.token_bytes,
            logprobs=body.top_logprobs is not None,
        )
        return GenerationResponse(
            generation,
            shape,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            on_error=self._count_error,
        )

    def _must_fit(self, id: str, length: int, ready: ipc.Ready) -> None:
        """Raises ApiError 400 for a prompt that the engine would refuse for its length.

        Asked here as well: millions of tokens on their way to the engine would hold up everyone's next step.
        """
        try:
            check_length(length, Limits(ready.max_model_len, ready.total_pages, ready.page_tokens))
        except AdmissionError as error:
            too_long = refused(ipc.Refused(id, error.code, str(error), error.status))
            self._count_error(too_long)
            raise too_long from None

    def _is_verification(self, request: Request) -> bool:
        mark = request.headers.get(verification.HEADER)
        return mark is not None and self._token.marks(mark)


def sampling_params(
    body: ChatRequest | CompletionRequest, max_model_len: int, seeds: random.Random
) -> engine.SamplingParams:
    """What the engine needs to pick tokens; what the caller left out has the OpenAI defaults.

    max_model_len: the limit of an answer without one; the engine cuts it to what the prompt leaves.
    seeds: draws the seed of a request that brings none.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    return engine.SamplingParams(
        max_tokens=body.token_limit or max_model_len,
        temperature=temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=seeds.getrandbits(63) if body.seed is None and temperature > 0 else body.seed,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.top_logprobs,
        logit_bias={int(key): value for key, value in (body.logit_bias or {}).items()},
    )
