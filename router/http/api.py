"""The endpoints: which path leads where, what is answered to paths that lead nowhere, and one request's way.

    POST /v1/completions, /v1/chat/completions     GET /v1/models, /v1/models/{name}, /health, /metrics, /openapi.json

A request is one call of the router (router/call.py) for each of its prompts: validated, admitted, counted and logged
like any other. Nothing here decides about tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response, status
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from protos.tandem.v1 import generation_pb2
from router.call import GenerateCall
from router.http.answer import Answer, StreamedAnswer, WholeAnswer, ways
from router.http.chat import ChatBody, ChatDialect
from router.http.completions import CompletionBody, CompletionDialect
from router.http.errors import BadHttp
from router.http.exchange import Bounds, Exchange, Gate, Work
from router.http.logprobs import TokenTexts
from router.model import ServedModel
from router.service import GenerationService
from serving.bad_callers import BadCallers
from serving.errors import NotFound, ServiceError, Unavailable
from serving.open_calls import OpenCalls

_RETRY_AFTER_S = 1.0
_PROBLEMS = {
    status.HTTP_404_NOT_FOUND: "there is nothing at this path; see docs/openai.md for what is served",
    status.HTTP_405_METHOD_NOT_ALLOWED: "this path does not take this method",
}


class OpenAIApi:
    """Everything behind the HTTP port. Belongs to the router's event loop."""

    def __init__(
        self,
        service: GenerationService,
        model: ServedModel,
        calls: OpenCalls,
        bad_callers: BadCallers,
        bounds: Bounds,
        registry: CollectorRegistry,
        is_serving: Callable[[], bool],
        gate: Gate | None = None,
    ) -> None:
        """`gate` None lets everybody ask; /health is open in any case."""
        self._service = service
        self._model = model
        self._calls = calls
        self._bad_callers = bad_callers
        self._bounds = bounds
        self._registry = registry
        self._is_serving = is_serving
        self._gate = gate
        self._texts = TokenTexts(model.tokenizer)
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="Tandem", docs_url=None, redoc_url=None)
        app.add_exception_handler(HTTPException, self._no_such_path)
        for path, endpoint, body in (
            ("/v1/completions", self.completions, CompletionBody),
            ("/v1/chat/completions", self.chat_completions, ChatBody),
        ):
            schema = {"application/json": {"schema": body.model_json_schema()}}
            app.post(path, openapi_extra={"requestBody": {"content": schema, "required": True}})(endpoint)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.one_model)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        return app

    async def completions(self) -> Response:
        """Goes on with a text."""

        async def work(exchange: Exchange) -> None:
            body = CompletionBody.parse(await exchange.read_body())
            await self._generate(exchange, body, CompletionDialect(body, self._texts))

        return self._exchange(work, CompletionBody.renamed)

    async def chat_completions(self) -> Response:
        """Answers a chat."""

        async def work(exchange: Exchange) -> None:
            body = ChatBody.parse(await exchange.read_body())
            await self._generate(exchange, body, ChatDialect(body, self._texts))

        return self._exchange(work, ChatBody.renamed)

    async def models(self) -> Response:
        """What is served."""

        async def work(exchange: Exchange) -> None:
            await exchange.answer({"object": "list", "data": [self._described()]}, {})

        return self._exchange(work)

    async def one_model(self, name: str) -> Response:
        """What is known of one model."""

        async def work(exchange: Exchange) -> None:
            if name != self._model.name:
                raise NotFound(f"model: {name[:64]!r} is not served here; served: {self._model.name!r}")
            await exchange.answer(self._described(), {})

        return self._exchange(work)

    async def health(self) -> Response:
        """200 while a request could be served, 503 otherwise, also while the router drains."""
        if self._is_serving():
            return PlainTextResponse("serving\n")
        return PlainTextResponse("not serving\n", 503, {"retry-after": str(int(_RETRY_AFTER_S))})

    async def metrics(self) -> Response:
        """Prometheus' text. Collected on a thread: the collector asks this loop for what it tells."""

        async def work(exchange: Exchange) -> None:
            text = await asyncio.to_thread(generate_latest, self._registry)
            await exchange.answer_bytes(text, CONTENT_TYPE_PLAIN_0_0_4)

        return self._exchange(work)

    def _exchange(self, work: Work, renamed: Mapping[str, str] | None = None) -> Exchange:
        return Exchange(self._calls, self._bad_callers, self._bounds, work, renamed, self._gate)

    async def _generate(
        self, exchange: Exchange, body: CompletionBody | ChatBody, dialect: CompletionDialect | ChatDialect
    ) -> None:
        head = {
            "id": f"{dialect.id_prefix}-{exchange.request_id}",
            "created": int(time.time()),
            "model": self._model.name,
            "system_fingerprint": self._fingerprint(),
        }
        answer: Answer
        if body.stream:
            usage = {"tells_usage": body.tells_usage, "continues_usage": body.continues_usage}
            answer = StreamedAnswer(exchange, dialect, head, body.n, **usage)
        else:
            answer = WholeAnswer(exchange, dialect, head, body.n)
        requests = body.requests(exchange.request_id)
        async with exchange.while_connected():
            if len(requests) == 1:
                call = await self._call(exchange, answer, 0, requests[0])
                await answer.finish(ways(call))
            else:
                await self._call_all(exchange, answer, requests)
                await answer.finish({})

    async def _call(
        self, exchange: Exchange, answer: Answer, index: int, request: generation_pb2.GenerateRequest
    ) -> GenerateCall:
        call = self._service.call()
        sink = answer.taking(index, call)
        await call.run(request, sink, metadata=exchange.metadata, remaining_s=exchange.remaining_s())
        return call

    async def _call_all(
        self, exchange: Exchange, answer: Answer, requests: list[generation_pb2.GenerateRequest]
    ) -> None:
        """Side by side; one that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(self._call(exchange, answer, index, request))
        except BaseExceptionGroup as failed:
            errors = failed.exceptions
            raise next((error for error in errors if isinstance(error, ServiceError)), errors[0]) from failed

    def _described(self) -> dict[str, Any]:
        described = {"id": self._model.name, "object": "model", "created": self._created, "owned_by": "tandem"}
        try:
            return {**described, "max_model_len": self._service.limits().max_model_len}
        except Unavailable:  # no instance has said so yet
            return described

    def _fingerprint(self) -> str | None:
        """What OpenAI's clients compare before they expect a seed to give the same tokens again."""
        fingerprint = self._service.fingerprint
        return None if fingerprint is None else f"fp_{fingerprint[:12]}"

    async def _no_such_path(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status_code, problem = error.status_code, _PROBLEMS.get(error.status_code, error.detail)

        async def work(exchange: Exchange) -> None:
            raise BadHttp(status_code, problem)

        return self._exchange(work)
