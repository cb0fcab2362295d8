"""Errors of a service as their client sees them."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2
from serving.errors import FieldViolation, InvalidArgument, Overloaded, Unavailable
from serving.interceptor import Context
from serving.server import Server, ServerSettings
from tandem import AsyncClient, TandemError
from tandem.client.errors import ConnectionLost, NotRunning, StreamError, from_rpc
from tests.tcp import TcpServer

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]


class Failing:
    """Every call fails: one with field violations, one with a retry delay, one for its instances."""

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> Any:
        yield self._refused()

    def _refused(self) -> generation_pb2.GenerateResponse:
        violations = [FieldViolation("sampling.temperature", "is 9; allowed: 0 … 2")]
        raise InvalidArgument("sampling.temperature: is 9; allowed: 0 … 2", violations)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        raise Overloaded("the queue is full", retry_after_s=2.5)

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        raise Unavailable("no prefill instance is available: kv_connector of prefill-0 is nixl, of decode-0 redis")


async def failure(call: Any) -> TandemError:
    try:
        await call
    except TandemError as error:
        return error
    raise AssertionError("it succeeded")


async def test_violations_retry_delay_and_limits_reach_the_client() -> None:
    server = Server(ServerSettings(drain_accept_s=0.0))
    await server.register(SERVICE, Failing())
    await server.start()
    try:
        async with AsyncClient(server.address) as client:
            invalid = await failure(client.generate("go"))
            too_long = await failure(client.generate("a" * (5 << 20)))
            overloaded = await failure(client.abort("label"))
            unavailable = await failure(client.model_info())
    finally:
        await server.stop()
    assert (invalid.status, invalid.retry_after_s) == ("INVALID_ARGUMENT", None)
    assert invalid.message.endswith("is 9; allowed: 0 ... 2")  # without a request id, which would not help
    assert too_long.message.endswith(f"bytes; the server at {server.address} accepts at most 4194304")
    [(field, problem)] = invalid.violations
    assert field == "sampling.temperature"
    assert problem.startswith("is 9; allowed: 0")
    assert (overloaded.status, overloaded.retry_after_s, overloaded.violations) == ("RESOURCE_EXHAUSTED", 2.5, ())
    assert unavailable.message.startswith("no prefill instance is available: kv_connector"), "the router has answered"
    assert (unavailable.status, unavailable.retry_after_s) == ("UNAVAILABLE", 1.0)


async def test_a_port_of_http_is_named_as_such() -> None:
    """`tandem up` prints the address of the OpenAI API too."""
    async with TcpServer(_answer_http) as server, AsyncClient(server.address) as client:
        error = await failure(client.model_info())
    assert error.status == "UNIMPLEMENTED"
    assert error.message.startswith(
        f"the server at {server.address} speaks HTTP/1, as a router's OpenAI API does: give"
    )


async def _answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    await reader.read()


@pytest.mark.parametrize(
    ("code", "details", "explained"),
    [
        (
            grpc.StatusCode.UNAUTHENTICATED,
            "no bearer token (request id r)",
            "no bearer token; give it as token or token_file (--token-file)",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Socket closed",
            "the connection to the router at a:1 broke (Socket closed): send the request again",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Cancelling all calls",
            "the connection to the router at a:1 broke (Cancelling all calls): send the request again",
        ),
        *(
            (
                grpc.StatusCode.UNAVAILABLE,
                text,
                f"the connection to the router at a:1 broke ({text}): send the request again",
            )
            for text in ("recvmsg:Connection timed out", "recvmsg:No route to host", "sendmsg:Network is unreachable")
        ),
    ],
)
def test_an_error_says_what_to_do(code: grpc.StatusCode, details: str, explained: str) -> None:
    nothing = grpc.aio.Metadata()
    assert from_rpc(grpc.aio.AioRpcError(code, nothing, nothing, details), "a:1").message == explained


def test_an_error_without_a_status_is_unknown() -> None:
    error = from_rpc(grpc.RpcError("broken"), "router:1")
    assert (error.status, error.message, error.violations) == ("UNKNOWN", "broken", ())


ERRORS = [
    TandemError("INVALID_ARGUMENT", "n: is 0", retry_after_s=1.5, violations=(("n", "is 0"),)),
    ConnectionLost("UNAVAILABLE", "Socket closed"),
    StreamError("choice 0 continued after its end"),
    NotRunning("--admin", is_starting=True),
]


def raise_one(index: int) -> None:
    raise ERRORS[index]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_is_copied_and_pickled_whole(error: TandemError, copied: Callable[[TandemError], TandemError]) -> None:
    other = copied(error)
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def test_an_error_of_a_worker_process_reaches_its_pool() -> None:
    """A pool whose worker's error cannot be unpickled hangs or breaks."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for index, error in enumerate(ERRORS):
            raised = pool.submit(raise_one, index).exception(timeout=60)
            assert (type(raised), str(raised)) == (type(error), str(error))
