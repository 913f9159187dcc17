"""The OpenAI routes, health and metrics: what callers and Kubernetes see on `--port`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from firsttoken_runtime.api.bodies import ChatShape, CompletionShape, Prompt
from firsttoken_runtime.api.choices import Choices
from firsttoken_runtime.api.connection import TRANSPORT, Connection
from firsttoken_runtime.api.engine_client import refused
from firsttoken_runtime.api.errors import ApiError, bad_request, check_token_ids, json_response
from firsttoken_runtime.api.generation import Generation
from firsttoken_runtime.api.middleware import ARRIVAL, REQUEST_ID, Entry
from firsttoken_runtime.api.prepare import (
    completion_grammar,
    completion_prompt,
    conversation,
    follower,
    sampling_params,
    ttft_limit,
)
from firsttoken_runtime.api.respond import GenerationResponse
from firsttoken_runtime.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from firsttoken_runtime.api.service import Service
from firsttoken_runtime.api.timeline import NOBODY, RequestFacts, Timeline
from firsttoken_runtime.engine import requests as engine
from firsttoken_runtime.engine.admission import Limits, check_length
from firsttoken_runtime.engine.requests import AdmissionError
from firsttoken_runtime.model.errors import ChatTemplateError, ModelError
from firsttoken_runtime.model.windows import Window
from firsttoken_runtime.timing import Stamps

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """What a request asks of the engine beside its sampling parameters.

    kept: special tokens that are shown.
    """

    tokens: list[list[int]]
    prompts: list[Prompt]
    grammar: str | None
    kept: frozenset[int] = frozenset()


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
        body = await self._begin(request, ChatRequest)
        tokenizer, _ = self._service.loaded()
        with self._counting_errors():
            talk = conversation(body, tokenizer.chat_template)
            grammar = talk.grammar(tokenizer)
        prompt = await self._tokens(lambda: talk.render(tokenizer), "messages")
        asked = Asked(
            [prompt],
            [Prompt(prompt, scored=body.prompt_logprobs is not None)],
            grammar,
            talk.kept_tokens(tokenizer),
        )
        shape = partial(ChatShape, parser=talk.parser())
        return await self._respond(request, body, asked, shape, "chatcmpl")

    async def completions(self, request: Request) -> Response:
        body = await self._begin(request, CompletionRequest)
        tokenizer, _ = self._service.loaded()
        with self._counting_errors():
            grammar = completion_grammar(body)

        def encode() -> list[Prompt]:
            return [completion_prompt(body, text, tokenizer) for text in body.prompt]

        prompts = await self._tokens(encode, "prompt")
        asked = Asked([list(prompt.tokens) for prompt in prompts], prompts, grammar)
        shape = partial(CompletionShape, empty=body.max_tokens == 0)
        return await self._respond(request, body, asked, shape, "cmpl")

    async def tokenize(self, request: Request) -> Response:
        body = (await self._read(request, TokenizeRequest)).one_source()
        self._service.check_model(body.model)
        tokenizer, ready = self._service.loaded()

        def encode() -> tuple[list[int], list[str] | None]:
            if body.messages is not None:
                tokens = conversation(body, tokenizer.chat_template).render(tokenizer)
            else:
                tokens = tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
            texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
            return tokens, texts

        tokens, texts = await self._tokens(encode, "prompt")
        counted = {"tokens": tokens, "count": len(tokens), "max_model_len": ready.max_model_len}
        return json_response(counted if texts is None else {**counted, "token_strs": texts})

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
            body.refuse_contradictions()
        except ApiError as error:
            self._count_error(error)
            raise
        request.state.stamps = Stamps(request.scope[ARRIVAL], parsed_ns=time.monotonic_ns())
        return body

    async def _read(self, request: Request, schema: type[Body]) -> Body:
        return parse(schema, await read_body(request, self._service.max_body_bytes))

    async def _tokens(self, encode: Callable[[], Result], param: str) -> Result:
        """Token ids, or what is made of them, from a worker thread.

        Raises ApiError 400 for messages the template cannot render.
        """
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

    @contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            self._count_error(error)
            raise

    async def _respond(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        asked: Asked,
        shape_type: Callable[..., CompletionShape],
        prefix: str,
    ) -> Response:
        service = self._service
        tokenizer, ready = service.loaded()
        id = name = f"{prefix}-{request.scope[REQUEST_ID]}"
        if "x-request-id" in request.headers:  # the caller may use it for several requests at once
            name = f"{id}-{uuid.uuid4().hex[:8]}"
        stamps: Stamps = request.state.stamps
        for tokens in asked.tokens:
            self._must_fit(id, len(tokens), ready)
        if asked.grammar is not None:
            await service.load_vocabulary()
        stamps.tokenized_ns = time.monotonic_ns()
        with self._counting_errors():
            limit = ttft_limit(request.headers)
        samplings = [
            sampling_params(body, ready.max_model_len, service.seeds, asked.grammar) for _ in asked.tokens
        ]

        n = body.n or 1
        timeline = Timeline(
            _facts(id, request, body, prefix, n * len(samplings)),
            stamps,
            NOBODY if self._is_verification(request) else service.records,
            sum(map(len, asked.tokens)),
            Connection(request.scope.get(TRANSPORT)),
        )

        def generation(prompt: int, answer: int) -> Generation:
            sampling = samplings[prompt]
            return Generation(
                service.engine,
                engine.Request(
                    id=name if prompt == answer == 0 else f"{name}-{prompt}-{answer}",
                    prompt=tuple(asked.tokens[prompt]),
                    sampling=follower(sampling, answer) if answer else sampling,
                    # A further answer begins when the first one is on its way.
                    arrival_ns=time.monotonic_ns() if answer else request.scope[ARRIVAL],
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    follows=answer > 0,
                    ttft_limit_seconds=None if answer else limit,
                ),
                tokenizer.detokenizer(body.skip_special_tokens is not False, asked.kept),
                body.stop or (),
                timeline,
                include_stop=bool(body.include_stop_str_in_output),
            )

        leads = [generation(prompt, 0) for prompt in range(len(samplings))]
        choices = Choices(leads, n, generation, empty=body.token_limit == 0)
        shape = shape_type(
            id=id,
            created=int(time.time()),
            model=service.served_name,
            spelling=tokenizer,
            logprobs=body.top_logprobs is not None,
            prompts=lambda index: asked.prompts[index // n],
        )
        return GenerationResponse(
            choices,
            shape,
            timeline,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            on_error=self._count_error,
        )

    def _must_fit(self, id: str, length: int, ready: ipc.Ready) -> None:
        """Raises ApiError 400 for a prompt that the engine would refuse for its length.

        Asked here as well: millions of tokens on their way to the engine would hold up everyone's next step.
        """
        try:
            window = Window(ready.window) if ready.window else None
            limits = Limits(ready.max_model_len, ready.total_pages, ready.page_tokens, window=window)
            check_length(length, limits)
        except AdmissionError as error:
            too_long = refused(ipc.Refused(id, error.code, str(error), error.status))
            self._count_error(too_long)
            raise too_long from None

    def _is_verification(self, request: Request) -> bool:
        mark = request.headers.get(verification.HEADER)
        return mark is not None and self._token.marks(mark)


_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion"}


def _facts(
    id: str, request: Request, body: ChatRequest | CompletionRequest, prefix: str, choices: int
) -> RequestFacts:
    """What of a request may be told to others."""
    given = {
        "max_tokens": body.token_limit,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
    }
    return RequestFacts(
        id,
        _OPERATIONS[prefix],
        bool(body.stream),
        {name: value for name, value in given.items() if value is not None},
        body.priority or 0,
        choices,
        request.headers.get("traceparent", ""),
        request.headers.get("tracestate", ""),
    )
