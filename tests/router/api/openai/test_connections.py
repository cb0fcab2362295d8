"""What ends an HTTP connection: an error before its body is read, bytes behind a request, a client that leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from router.api.openai.server import _Connection
from serving.limits import LARGE_BYTES
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.api.openai.test_limits import HEAD, opened, still_serves, until_closed
from tests.router.api.test_security import ALICE, write_tokens
from tests.router.rig import SHORT, slow
from tests.waiting import until

CLOSE = b"Connection: close\r\n"
EACH_BEHIND = pytest.mark.parametrize(
    "behind", [b"\r\n", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["CRLF", "request"]
)
_BODY = b"x" * (1 << 20)


def post(path: str = "/v1/completions", version: str = "1.1", kind: str = "application/json") -> bytes:
    return f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: {kind}\r\n".encode()


def whole(**body: Any) -> bytes:
    data = msgspec.json.encode({"model": "fake", "prompt": SHORT, **body})
    return b"Content-Length: %d\r\n\r\n%s" % (len(data), data)


async def answer_to(http: HttpRig, head: bytes, body: bytes = _BODY) -> bytes:
    """To a client that writes its whole body, some of it late, before it reads."""
    reader, writer = await opened(http)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
    try:
        for start in range(0, len(body), 1 << 17):
            await asyncio.sleep(0.05)
            writer.write(body[start : start + (1 << 17)])
            await writer.drain()
        return await until_closed(reader)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (post("/v1/unknown") + CLOSE, b"404"),
        (post("/v1/unknown", version="1.0"), b"404"),
        (post("/v1/models") + CLOSE, b"405"),
        (post(kind="text/plain") + CLOSE, b"415"),
        (post(kind="text/plain") + b"connection: keep-alive, Close\r\n", b"415"),
    ],
)
async def test_an_early_error_reaches_a_client_that_is_still_sending(
    run_http: RunHttp, head: bytes, status: bytes
) -> None:
    async with run_http() as http:
        assert (await answer_to(http, head)).split()[1:2] == [status]
        await still_serves(http)


async def test_an_unknown_client_that_is_still_sending_gets_its_401(run_http: RunHttp, tmp_path: Path) -> None:
    async with run_http(auth={"tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE])}) as http:
        assert (await answer_to(http, post() + CLOSE)).split()[1:2] == [b"401"]


async def test_a_client_that_is_still_sending_gets_the_503_of_a_drain(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode], server={"drain_grace_s": 60.0}) as http:
        asking = asyncio.create_task(http.post(prompt=SHORT, max_tokens=2000))
        await decode.until("token")
        draining = asyncio.create_task(http.rig.app.drain())
        await until(lambda: http.rig.app._server.calls.draining)
        answer = await answer_to(http, post())
        assert answer.split()[1:2] == [b"503"]
        assert b"connection: close" in answer
        for task in (asking, draining):
            task.cancel()
        await asyncio.wait({asking, draining})


@pytest.mark.parametrize("length", [100, 1 << 20])
async def test_a_client_that_waits_for_100_continue_is_not_asked_for_its_body(run_http: RunHttp, length: int) -> None:
    async with run_http(http={"read_timeout_s": 600.0}) as http:
        reader, writer = await opened(http)
        writer.write(post("/v1/unknown") + CLOSE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % length)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 404 ")
        writer.close()


async def test_a_body_that_is_much_too_long_is_not_awaited_before_an_early_error(run_http: RunHttp) -> None:
    async with run_http(http={"read_timeout_s": 600.0, "max_body_bytes": 10_000}) as http:
        reader, writer = await opened(http)
        writer.write(post("/v1/unknown") + CLOSE + b"Content-Length: 40001\r\n\r\n")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 404 ")
        writer.close()


async def test_a_body_that_does_not_arrive_leaves_an_early_error_as_it_was(run_http: RunHttp) -> None:
    async with run_http(http={"read_timeout_s": 3.0}) as http:  # the headers have as long
        reader, writer = await opened(http)
        writer.write(post("/v1/unknown") + CLOSE + b"Content-Length: 100\r\n\r\n")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 404 ")
        writer.close()


@pytest.mark.parametrize("head", [post() + CLOSE, post(version="1.0")], ids=["close", "1.0"])
@EACH_BEHIND
async def test_bytes_behind_a_connections_last_request_are_ignored(
    run_http: RunHttp, head: bytes, behind: bytes
) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.02))
    async with run_http(prefill=0, decode=[decode]) as http:
        reader, writer = await opened(http)
        writer.write(head + whole(max_tokens=40))
        await decode.until("token")
        for _ in range(3):
            writer.write(behind)
            await asyncio.sleep(0.05)
        answer = await until_closed(reader)
        assert (answer.split()[1], answer.count(b"HTTP/1.1 ")) == (b"200", 1)
        assert b'"completion_tokens":40' in answer
        writer.close()


@EACH_BEHIND
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_behind_further_bytes_ends_its_request(
    run_http: RunHttp, stream: bool, behind: bytes
) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode]) as http:
        _, writer = await opened(http)
        writer.write(HEAD + whole(max_tokens=2000, stream=stream))
        await decode.until("token")
        writer.write(behind)
        await asyncio.sleep(0.1)
        writer.close()
        await decode.until("decode cancelled")
        await http.rig.until_idle()


async def test_a_request_behind_another_is_answered_after_it(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.02))
    async with run_http(prefill=0, decode=[decode]) as http:
        reader, writer = await opened(http)
        writer.write(HEAD + whole(max_tokens=20))
        await decode.until("token")
        for piece in (b"GET /vers", b"ion HTTP/1.1\r\nHost: x\r\n\r\n", HEAD + CLOSE + whole(max_tokens=3)):
            writer.write(piece)
            await asyncio.sleep(0.02)
        answer = await until_closed(reader)
        parts = [answer.index(part) for part in (b'"completion_tokens":20', b'"version":', b'"completion_tokens":3')]
        assert parts == sorted(parts)
        writer.close()


async def test_bytes_behind_a_request_take_bounded_memory(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode]) as http:
        _, writer = await opened(http)
        writer.write(HEAD + whole(max_tokens=2000))
        await decode.until("token")
        server = http.rig.app._http
        assert server is not None
        [connection] = server._server.server_state.connections
        assert isinstance(connection, _Connection)
        writer.write(b"x" * (16 << 20))
        await until(lambda: connection.flow.read_paused)
        assert HIGH_WATER_LIMIT < len(connection.conn.trailing_data[0]) < 1 << 20
        writer.transport.abort()
        http.rig.app._server.calls.cut_off()
        await http.rig.until_idle()


async def test_a_disconnect_ends_the_wait_of_a_large_body(run_http: RunHttp) -> None:
    client = "ipv4:127.0.0.1"
    async with run_http(prefill=0) as http:
        large = http.rig.app._server.large
        await large._acquire(client)
        _, writer = await opened(http)
        writer.write(HEAD + whole(prompt=[1] * LARGE_BYTES))
        await until(lambda: large._num_waiting[client])
        writer.close()
        await until(lambda: not large._num_waiting[client])
        assert http.rig.app._server.calls.num_open == 0
        large._release(client)
        await still_serves(http)
