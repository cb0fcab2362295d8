"""Endpoints that answer at known times: Tandem's GenerationService, and `/v1/completions` with server-sent events.

Both count what they see (`num_requests`, `max_in_flight`, `prompts`) and do what `Behaviour` says, which may differ
from one request to the next. A token's moment is fixed when its request arrives, so delays do not add up.

    async with FakeTandem(Behaviour(first_s=0.1)) as server: ... server.address
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.tcp import TcpServer

VOCAB_SIZE = 400
MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class Behaviour:
    """Of one request."""

    first_s: float = 0.0
    """Until the first message."""
    gap_s: float = 0.0
    """Between two messages."""
    pack: int = 1
    """Tokens of each message after the first, which has one."""
    refuse: bool = False
    fail_at: int | None = None
    """An error in place of the message with this token."""
    hang_up_at: int | None = None
    """The stream ends, as if all were well but without a reason, in place of the message with this token."""
    hang_at: int | None = None
    """Nothing more comes in place of the message with this token."""
    skip_at: int | None = None
    """This token is left out."""
    reason: str = "length"
    """Of the last message."""
    usage: str = "each"
    """Of the SSE server: in each event, or at the end or none, and then to ask for it in each event is an error."""
    cached: int | None = None
    """Prompt tokens that are reported as cached, the last of them from a store."""
    blank_at: int | None = None
    """Of the SSE server: the event of this token has no text."""

    def messages(self, num_tokens: int) -> list[tuple[float, int, int]]:
        """(seconds after arrival, first token, number of tokens) of each message."""
        planned, begin, at_s = [], 0, self.first_s
        while begin < num_tokens:
            count = min(1 if begin == 0 else self.pack, num_tokens - begin)
            planned.append((at_s, begin, count))
            begin, at_s = begin + count, at_s + self.gap_s
        return planned


class _Server:
    """What both have in common."""

    def __init__(self, behaviour: Behaviour | Callable[[int], Behaviour] | None = None) -> None:
        self._behaviour = behaviour or Behaviour()
        self.num_requests = 0
        self.in_flight = 0
        self.max_in_flight = 0
        self.prompts: list[Any] = []
        self.requested: set[str] = set()
        """Models, by gRPC."""
        self.peers: set[str] = set()
        self.headers: dict[str, str] = {}

    def _begin(self, prompt: Any, peer: str) -> Behaviour:
        number = self.num_requests
        self.num_requests += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.prompts.append(prompt)
        self.peers.add(peer)
        return self._behaviour(number) if callable(self._behaviour) else self._behaviour

    async def _paced(self, behaviour: Behaviour, num_tokens: int) -> AsyncIterator[tuple[int, int]]:
        arrived_s = asyncio.get_running_loop().time()
        for at_s, begin, count in behaviour.messages(num_tokens):
            await asyncio.sleep(arrived_s + at_s - asyncio.get_running_loop().time())
            if behaviour.hang_at is not None and begin >= behaviour.hang_at:
                await asyncio.Event().wait()
            yield begin, count


class FakeTandem(_Server, generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService on a loopback port."""

    address = ""
    lora_adapters: Sequence[str] = ()

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def GetModelInfo(self, request: Any, context: Any) -> generation_pb2.GetModelInfoResponse:
        return generation_pb2.GetModelInfoResponse(
            model="fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[60],
            lora_adapters=self.lora_adapters,
        )

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.headers = {key: str(value) for key, value in context.invocation_metadata()}
        self.requested.add(request.model)
        behaviour = self._begin(tuple(request.token_ids.ids), context.peer())
        num_tokens = request.sampling.max_tokens
        assert request.sampling.ignore_eos
        try:
            if behaviour.refuse:
                details = f"the house is full (request id {self.num_requests})"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
            async for begin, count in self._paced(behaviour, num_tokens):
                if behaviour.fail_at is not None and begin >= behaviour.fail_at:
                    await context.abort(grpc.StatusCode.INTERNAL, "the engine is gone")
                if behaviour.hang_up_at is not None and begin >= behaviour.hang_up_at:
                    return
                if begin == behaviour.skip_at:
                    continue
                chunk = common_pb2.TokenChunk(token_index=begin, token_ids=range(begin, begin + count))
                if begin + count == num_tokens:
                    chunk.finish.reason = common_pb2.FinishReason.Value(f"FINISH_REASON_{behaviour.reason.upper()}")
                    if behaviour.cached is not None:
                        chunk.finish.usage.cached_tokens, chunk.finish.usage.stored_tokens = behaviour.cached, 1
                yield generation_pb2.GenerateResponse(tokens=chunk)
        finally:
            self.in_flight -= 1


class FakeOpenAI(_Server):
    """`/v1/models` and `/v1/completions` on a loopback port, one request for each connection."""

    url = ""
    models: Sequence[dict[str, Any]] = ({"id": "fake", "max_model_len": MAX_MODEL_LEN},)
    tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Self:
        self._server = TcpServer(self._serve, tls=self.tls)
        await self._server.__aenter__()
        self.url = f"http{'s' if self.tls else ''}://{self._server.address}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.__aexit__(*exception)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers = {}
        for name, _, value in (line.partition(": ") for line in head.splitlines()[1:] if line):
            given = self.headers.get(name.lower())
            self.headers[name.lower()] = value if given is None else f"{given}, {value}"
        body = json.loads(await reader.readexactly(int(self.headers.get("content-length", "0"))) or "{}")
        if head.startswith("GET /v1/models "):
            _respond(writer, 200, {"data": self.models})
        elif head.startswith("POST /v1/completions "):
            await self._complete(body, reader, writer)
        else:
            _respond(writer, 404, {"error": "there is no such page"})
        await writer.drain()

    async def _complete(self, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behaviour = self._begin(body["prompt"], str(writer.get_extra_info("peername")))
        streaming = asyncio.create_task(self._stream(body, behaviour, writer))
        gone = asyncio.create_task(reader.read())  # ends when the client hangs up
        try:
            await asyncio.wait((streaming, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            streaming.cancel()
            gone.cancel()
            await asyncio.gather(streaming, gone, return_exceptions=True)
            self.in_flight -= 1

    async def _stream(self, body: Any, behaviour: Behaviour, writer: asyncio.StreamWriter) -> None:
        if behaviour.refuse:
            return _respond(writer, 503, {"error": "the house is full"})
        if behaviour.usage != "each" and "continuous_usage_stats" in body["stream_options"]:
            return _respond(writer, 400, {"error": "stream_options.continuous_usage_stats: not permitted"})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n: a comment\n\n")
        num_tokens = body["max_tokens"]
        async for begin, count in self._paced(behaviour, num_tokens):
            if behaviour.fail_at is not None and begin >= behaviour.fail_at:
                return _event(writer, {"error": {"message": "the engine is gone"}})
            if behaviour.hang_up_at is not None and begin >= behaviour.hang_up_at:
                return None
            # U+2028 ends a line for Python's splitlines, and must not for an event.
            text = "" if begin == behaviour.blank_at else "\u2028" * count
            is_last = begin + count == num_tokens
            event: dict[str, Any] = {
                "choices": [{"text": text, "finish_reason": behaviour.reason if is_last else None}]
            }
            if behaviour.usage == "each":
                event["usage"] = _usage(body, begin + count, None)
            _event(writer, event)
        if behaviour.usage != "none":
            _event(writer, {"choices": [], "usage": _usage(body, num_tokens, behaviour.cached)})
        writer.write(b"data: [DONE]\n\n")
        return None


def _usage(body: Any, num_tokens: int, cached: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens, "prompt_tokens_details": details
    }  # fmt: skip


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n")


def _respond(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
