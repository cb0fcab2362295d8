"""The HTTP endpoints.

    POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    POST /tokenize, /detokenize
    GET  /v1/models, /v1/models/{name}, /health, /metrics, /version, /openapi.json, /; HEAD too

A request is one call of the router (router/dispatch/handler.py) for each of its prompts: validated, admitted, counted
and logged like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, Literal, Self, TypeVar

from fastapi import FastAPI, Request, Response, status
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import InvalidRequest
from engine.sampling.params import validate_prompt
from protos.tandem.v1 import generation_pb2
from router.api.grpc import GenerationService
from router.api.openai.blocks import BlocksBuilder
from router.api.openai.chat_messages import Message, Tool
from router.api.openai.exchange import Authorizer, Exchange, Handler, HttpError, HttpLimits
from router.api.openai.messages_api import CountTokensRequest, MessagesBuilder, MessagesExchange, MessagesRequest
from router.api.openai.requests import Body, ChatBody, CompletionBody, Int64, RequestBody, template_variables_on_wire
from router.api.openai.responses import (
    ChatFormat,
    CompletionFormat,
    Format,
    ResponseBody,
    ResponseBuilder,
    StreamedResponse,
    TokenTexts,
    WholeResponse,
)
from router.api.openai.responses_api import ResponsesBuilder, ResponsesExchange, ResponsesRequest
from router.api.openai.strict_model import StrictModel
from router.dispatch.dispatcher import run_together
from router.dispatch.handler import RequestHandler, Siblings
from router.request.validation import ModelLimits, check_model, prompt_ids, service_errors
from serving.errors import Unavailable, invalid_argument
from serving.limits import CONTROL

_PROBLEMS = {
    status.HTTP_404_NOT_FOUND: "unknown path; docs/openai.md lists the endpoints",
    status.HTTP_405_METHOD_NOT_ALLOWED: "this path does not support this method",
}

_PRIVATE_NETWORK: dict[str, Any] = (
    {"allow_private_network": True} if "allow_private_network" in inspect.signature(CORSMiddleware).parameters else {}
)
"""For a public page that calls a private address: Chrome asks first, and older Starlettes have no answer."""

B = TypeVar("B", bound=Body)
Builder = ResponseBuilder | BlocksBuilder[Any]
"""Makes the response to one HTTP request out of its calls' messages."""


class TokenizeBody(StrictModel):
    """The body of /tokenize: a text, or the messages of a chat."""

    renamed: ClassVar = {
        "text": "prompt", "chat.messages": "messages", "chat.tools": "tools",
        "template_variables": "chat_template_kwargs",
    }  # fmt: skip

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = Field([])
    """Of the chat."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Of the chat: the template's own switches."""
    add_special_tokens: bool = True
    """Of a text: what the tokenizer puts around it. A chat has what its template writes."""
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid_argument("prompt", "exactly one of prompt and messages is required")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise invalid_argument(name, "requires messages")
        return self

    def request(self) -> generation_pb2.GenerateRequest:
        """The prompt alone."""
        if self.messages is None:
            return generation_pb2.GenerateRequest(model=self.model, text=self.prompt)
        chat = {
            "messages": [message.on_wire() for message in self.messages],
            "tools": [tool.function.on_wire() for tool in self.tools],
            "template_variables": template_variables_on_wire(self.chat_template_kwargs),
        }
        return generation_pb2.GenerateRequest(model=self.model, chat=chat)  # type: ignore[arg-type]


class DetokenizeBody(StrictModel):
    """The body of /detokenize."""

    renamed: ClassVar = {"prompt": "tokens", "token_ids": "tokens"}

    model: str = ""
    tokens: list[Int64]


@dataclass(eq=False)
class OpenAIApi:
    """The application behind the HTTP port. Belongs to the router's event loop."""

    service: GenerationService
    limits: HttpLimits
    registry: CollectorRegistry
    authorizer: Authorizer | None
    """None admits every caller; /health and /openapi.json are open in any case."""
    allowed_origins: Sequence[str] = ()
    """Of web pages whose scripts may call (CORS)."""
    page: Callable[[Request], Response] | None = None
    """What a browser gets at /; None: the same as others."""

    def __post_init__(self) -> None:
        self.model = self.service.model
        self._texts = TokenTexts(self.model.tokenizer)
        self._created = int(time.time())

    def app(self) -> FastAPI:
        app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, redirect_slashes=False)
        app.add_middleware(WithoutLastSlash)
        app.add_exception_handler(HTTPException, self._http_exception)
        app.post("/v1/completions", **_documented(CompletionBody))(self.completions)
        app.post("/v1/chat/completions", **_documented(ChatBody))(self.chat_completions)
        app.post("/v1/responses", **_documented(ResponsesRequest))(self.responses)
        app.post("/v1/messages", **_documented(MessagesRequest))(self.messages)
        app.post("/v1/messages/count_tokens", **_documented(CountTokensRequest))(self.count_tokens)
        app.post("/tokenize", **_documented(TokenizeBody))(self.tokenize)
        app.post("/detokenize", **_documented(DetokenizeBody))(self.detokenize)
        add_get(app, "/v1/models", self.models)
        add_get(app, "/v1/models/{name:path}", self.one_model)
        add_get(app, "/health", self.health)
        add_get(app, "/metrics", self.metrics)
        add_get(app, "/version", self.version)
        add_get(app, "/", self.index)
        if self.allowed_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self.allowed_origins,
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["*"],
                expose_headers=["*"],
                **_PRIVATE_NETWORK,
            )
        return app

    async def completions(self) -> Response:
        """Continues a text."""
        return self._generation(
            CompletionBody, lambda exchange, body: self._builder(exchange, CompletionFormat(body, self._texts))
        )

    async def chat_completions(self) -> Response:
        """Answers a chat."""
        return self._generation(ChatBody, lambda exchange, body: self._builder(exchange, ChatFormat(body, self._texts)))

    async def responses(self) -> Response:
        """Answers a chat, as OpenAI's Responses API without its store."""
        return self._generation(
            ResponsesRequest,
            lambda exchange, body: ResponsesBuilder(exchange, body, self._name_for(body), self._texts),
            ResponsesExchange,
        )

    async def messages(self) -> Response:
        """Answers a chat, as Anthropic's Messages API."""
        return self._generation(
            MessagesRequest,
            lambda exchange, body: MessagesBuilder(exchange, body, self._name_for(body)),
            MessagesExchange,
        )

    async def count_tokens(self) -> Response:
        """The length of a prompt of the Messages API."""

        async def handler(exchange: Exchange) -> None:
            def parsed(data: bytes) -> generation_pb2.GenerateRequest:
                return CountTokensRequest.parse(data).requests(exchange.request_id)[0]

            request = await exchange.parsed_body(parsed)
            ids = await self._prompt_ids(request, self.service.limits())
            await exchange.send_json({"input_tokens": len(ids)})

        return self._exchange(handler, CountTokensRequest.renamed, MessagesExchange)

    async def tokenize(self) -> Response:
        """The token ids of a text or a chat."""

        async def handler(exchange: Exchange) -> None:
            def parsed(data: bytes) -> tuple[TokenizeBody, generation_pb2.GenerateRequest]:
                body = TokenizeBody.parse(data)
                return body, body.request()

            body, request = await exchange.parsed_body(parsed)
            limits = self.service.limits()
            ids = await self._prompt_ids(request, limits, add_special_tokens=body.add_special_tokens)
            strings = [self._texts.of(token_id) for token_id in ids] if body.return_token_strs else None
            sizes = {"count": len(ids), "max_model_len": limits.max_model_len}
            await exchange.send_json({**sizes, "tokens": ids, "token_strs": strings})

        return self._exchange(handler, TokenizeBody.renamed)

    async def detokenize(self) -> Response:
        """The text of token ids, special ones included."""

        async def handler(exchange: Exchange) -> None:
            body, limits = await exchange.parsed_body(DetokenizeBody.parse), self.service.limits()
            check_model(body.model, self.model, limits.lora_adapters)
            with service_errors():
                if self.model.tokenizer is None:
                    raise InvalidRequest("tokens", "this model has no tokenizer")
                validate_prompt(body.tokens, limits.vocab_size, limits.max_model_len)
            await exchange.send_json({"prompt": self._texts.of_all(body.tokens)})

        return self._exchange(handler, DetokenizeBody.renamed)

    async def _prompt_ids(
        self, request: generation_pb2.GenerateRequest, limits: ModelLimits, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """The tokens of a request that is not run."""
        check_model(request.model, self.model, limits.lora_adapters)
        with service_errors():
            tools = await self.model.tools_of(request.chat)
            return await prompt_ids(request, self.model, limits, tools=tools, add_special_tokens=add_special_tokens)

    async def version(self) -> Response:
        """The router's version."""
        return self._control(lambda exchange: exchange.send_json({"version": version("tandem-llm")}))

    async def index(self, request: Request) -> Response:
        """What is served here; for a browser, the live page if it is on."""
        if self.page is not None and "text/html" in request.headers.get("accept", ""):
            return self.page(request)
        paths = sorted(request.app.openapi()["paths"])
        served = {"service": "tandem", "version": version("tandem-llm"), "model": self.model.name, "paths": paths}
        return self._control(lambda exchange: exchange.send_json(served))

    async def models(self) -> Response:
        """The served model and its LoRA adapters."""

        async def handler(exchange: Exchange) -> None:
            described = self._descriptions(self.model.name, *sorted(self._adapters()))
            await exchange.send_json({"object": "list", "data": described})

        return self._control(handler)

    async def one_model(self, name: str) -> Response:
        """One served model, or one of its LoRA adapters."""

        async def handler(exchange: Exchange) -> None:
            check_model(name, self.model, self._adapters())
            await exchange.send_json(self._descriptions(name)[0])

        return self._control(handler)

    async def health(self) -> Response:
        """200 while a request could be served; 503 otherwise, also while the router drains."""
        if self.limits.is_serving():
            return PlainTextResponse("serving\n")
        headers = {"retry-after": "1", "connection": "close"}
        return PlainTextResponse("not serving\n", status.HTTP_503_SERVICE_UNAVAILABLE, headers)

    async def metrics(self) -> Response:
        """Metrics in Prometheus text format."""

        async def handler(exchange: Exchange) -> None:
            # On a thread: the collector waits for this event loop.
            try:
                text = await asyncio.to_thread(generate_latest, self.registry)
            except TimeoutError as error:  # the loop has been blocked
                raise Unavailable(str(error)) from None
            await exchange.send(Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4))

        return self._control(handler)

    def _exchange(
        self, handler: Handler, renamed: Mapping[str, str] | None = None, kind: type[Exchange] = Exchange
    ) -> Exchange:
        return kind(self.limits, handler, self.authorizer, renamed)

    def _control(self, handler: Handler) -> Exchange:
        """No request: answered beside any number of them, and in a drain."""
        return Exchange(self.limits, handler, self.authorizer, policy=CONTROL)

    def _generation(
        self, body_type: type[B], new_builder: Callable[[Exchange, B], Builder], kind: type[Exchange] = Exchange
    ) -> Exchange:
        async def handler(exchange: Exchange) -> None:
            def parsed(data: bytes) -> tuple[B, list[generation_pb2.GenerateRequest]]:
                body = body_type.parse(data)  # its errors have the client's names
                exchange.renamed = body.client_names()
                return body, body.requests(exchange.request_id)

            body, requests = await exchange.parsed_body(parsed)
            builder = new_builder(exchange, body)
            async with exchange.while_connected():
                calls = await self._call_all(exchange, builder, requests)
                await builder.finish(dict(calls[0].trace.trailers()) if len(calls) == 1 else {})

        return self._exchange(handler, kind=kind)

    def _builder(self, exchange: Exchange, form: Format[RequestBody]) -> ResponseBuilder:
        response = ResponseBody(
            id=f"{form.id_prefix}-{exchange.answer_id}",
            created=int(time.time()),
            model=self._name_for(form.body),
            system_fingerprint=self._fingerprint(),
        )
        return (StreamedResponse if form.body.stream else WholeResponse)(exchange, form, response)

    async def _call_all(
        self, exchange: Exchange, builder: Builder, requests: list[generation_pb2.GenerateRequest]
    ) -> list[RequestHandler]:
        """Concurrently; one that fails ends the others."""
        calls: list[RequestHandler] = []
        siblings = Siblings()

        async def answer(index: int, request: generation_pb2.GenerateRequest) -> None:
            call = self.service.handler(siblings)  # made in the task of its own, whose current span is its own
            calls.append(call)
            sink = functools.partial(builder.add, index, call)
            await call.handle(request, sink, metadata=exchange.metadata, remaining_s=exchange.remaining_s())

        await run_together(*map(answer, range(len(requests)), requests))
        return calls

    def _name_for(self, body: Body) -> str:
        """The model's name in an answer: an adapter's if the request names one. Of an unknown name none is sent."""
        return body.model or self.model.name

    def _adapters(self) -> frozenset[str]:
        return self.service.dispatcher.pools.lora_adapters() - {self.model.name}

    def _descriptions(self, *names: str) -> list[dict[str, Any]]:
        common: dict[str, Any] = {"object": "model", "created": self._created, "owned_by": "tandem"}
        with contextlib.suppress(Unavailable):  # no instance is known yet
            common["max_model_len"] = self.service.limits().max_model_len
        adapters = {name: {"root": name, "parent": self.model.name} for name in names if name != self.model.name}
        return [{"id": name, **common, **adapters.get(name, {})} for name in names]

    def _fingerprint(self) -> str | None:
        """OpenAI's clients compare it before they expect a seed to repeat an answer."""
        fingerprint = self.service.fingerprint
        return None if fingerprint is None else f"fp_{fingerprint[:12]}"

    async def _http_exception(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = HttpError(error.status_code, _PROBLEMS.get(error.status_code, error.detail), error.headers)

        async def handler(exchange: Exchange) -> None:
            raise problem

        is_anthropics = f"{request.scope['path']}/".startswith("/v1/messages/")
        return self._exchange(handler, kind=MessagesExchange if is_anthropics else Exchange)


@functools.cache  # computing a schema takes a tenth of a second
def _documented(body: type[StrictModel]) -> dict[str, Any]:
    schema = {"application/json": {"schema": body.model_json_schema()}}
    return {"openapi_extra": {"requestBody": {"content": schema, "required": True}}}


def add_get(app: FastAPI, path: str, endpoint: Callable[..., Any], *, in_schema: bool = True) -> None:
    """Routes GET and HEAD of `path` to `endpoint`. The server leaves out the body that answers HEAD."""
    # One route for both, so that a 405 lists both. In the schema it would be two operations of one name.
    app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(endpoint)
    if in_schema:
        app.get(path)(endpoint)  # never reached


class WithoutLastSlash:
    """Treats a path with slashes at its end as the one without. Starlette would redirect, with the scheme and the
    host of this port, which behind a proxy are not the client's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)
