"""Limits on HTTP clients: long or slow bodies and headers, many connections, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import msgspec
import pytest

from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai import server
from serving.limits import LARGE_BYTES
from serving.logging import Repeats
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.rig import SHORT
from tests.waiting import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def opened(http: HttpRig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*http.host_and_port)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server ends the connection."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def still_serves(http: HttpRig) -> None:
    assert (await http.post(prompt=SHORT, max_tokens=2)).status_code == 200


@pytest.mark.parametrize("num_chars", [20_000, 1_000_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_long_is_a_413(run_http: RunHttp, chunked: bool, num_chars: int) -> None:
    async with run_http(http={"max_body_bytes": 10_000}) as http:
        body = json.dumps({"prompt": "x" * num_chars}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        asking = http.http.post(
            "/v1/completions", content=pieces() if chunked else body, headers={"content-type": "application/json"}
        )
        try:
            response = await asking
        except httpx.TransportError:  # a client that sends much more may not receive the answer
            assert num_chars == 1_000_000
        else:
            assert response.status_code == 413
            assert "10000 bytes" in response.json()["error"]["message"]
            assert response.headers["connection"] == "close"
        await still_serves(http)


async def test_a_body_that_does_not_arrive_is_a_408(run_http: RunHttp) -> None:
    async with run_http(http={"read_timeout_s": 0.3}) as http:
        reader, writer = await opened(http)
        writer.write(HEAD + b'Content-Length: 100\r\n\r\n{"prompt"')
        said = await until_closed(reader)
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"the body was not received within" in said
        writer.close()
        await still_serves(http)


@pytest.mark.parametrize("beginning", [b"", b"POST /v1/comple", HEAD])
async def test_headers_that_do_not_arrive_end_the_connection(run_http: RunHttp, beginning: bytes) -> None:
    async with run_http(http={"read_timeout_s": 0.3}) as http:
        reader, writer = await opened(http)
        writer.write(beginning)
        for byte in b"X-A: b" if beginning else b"":
            await asyncio.sleep(0.01)
            writer.write(bytes([byte]))
        assert await until_closed(reader) == b""
        writer.close()
        await still_serves(http)


async def test_slow_headers_on_a_kept_connection_end_it(run_http: RunHttp) -> None:
    async with run_http(http={"read_timeout_s": 0.3}) as http:
        reader, writer = await opened(http)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await reader.readline()
        writer.write(b"GET /he")
        assert b"HTTP/1.1" not in await until_closed(reader)
        writer.close()


async def test_a_body_behind_its_answer_leaves_the_connection_as_it_was(run_http: RunHttp) -> None:
    async with run_http(http={"read_timeout_s": 0.3}) as http:
        reader, writer = await opened(http)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 404 " in head
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await reader.readexactly(int(length[1]))
        writer.write(b"body")
        await asyncio.sleep(1.0)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_an_answer_may_take_longer_than_its_headers(run_http: RunHttp) -> None:
    decode = FakeInstance("decode")
    decode.behaviour.token_s = 0.1
    async with run_http(prefill=0, decode=[decode], http={"read_timeout_s": 0.3}) as http:
        response = await http.post(prompt=SHORT, max_tokens=8)
        assert response.json()["usage"]["completion_tokens"] == 8


async def test_headers_that_are_too_long_are_rejected(run_http: RunHttp) -> None:
    async with run_http(http={"max_header_bytes": 4096}) as http:
        reader, writer = await opened(http)
        writer.write(HEAD + b"X-Long: " + b"x" * 10_000)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        await still_serves(http)


@pytest.mark.parametrize("segment_bytes", [1000, 100_000])
@pytest.mark.parametrize(("length", "status"), [(4096, b"200"), (4097, b"400"), (4900, b"400")])
async def test_the_longest_headers_do_not_depend_on_segments(
    run_http: RunHttp, length: int, status: bytes, segment_bytes: int
) -> None:
    async with run_http(http={"max_header_bytes": 4096}) as http:
        head = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: "
        head += b"x" * (length - len(head) - 4) + b"\r\n\r\n"
        reader, writer = await opened(http)
        for start in range(0, length, segment_bytes):
            writer.write(head[start : start + segment_bytes])
            await asyncio.sleep(0.02)
        answer = await until_closed(reader)
        assert answer.split()[1:2] == [status]
        problem = b'"the request\'s headers are longer than 4096 bytes (http.max_header_bytes)"'
        assert (problem in answer) == (status == b"400")
        writer.close()


@pytest.mark.parametrize("segment_bytes", [1000, 100_000])
async def test_a_head_request_with_long_headers_has_an_answer_without_body(
    run_http: RunHttp, segment_bytes: int
) -> None:
    async with run_http(http={"max_header_bytes": 4096}) as http:
        head = b"HEAD /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 5000 + b"\r\n\r\n"
        reader, writer = await opened(http)
        for start in range(0, len(head), segment_bytes):
            writer.write(head[start : start + segment_bytes])
            await asyncio.sleep(0.02)
        assert (await until_closed(reader)).split()[1:2] == [b"400"]
        writer.close()


async def test_a_body_does_not_count_as_headers(run_http: RunHttp) -> None:
    body = msgspec.json.encode({"prompt": SHORT, "max_tokens": 2}) + b" " * 5000
    async with run_http(http={"max_header_bytes": 1024}) as http:
        reader, writer = await opened(http)
        for _ in range(2):  # in one segment with the headers, and in the next request of the connection
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"}}")
        writer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"nonsense\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    ],
    ids=lambda said: repr(said[-24:]),
)
async def test_invalid_http_is_rejected(run_http: RunHttp, said: bytes) -> None:
    async with run_http(http={"read_timeout_s": 2}) as http:
        reader, writer = await opened(http)
        writer.write(said)
        answer = await until_closed(reader)
        assert answer.split()[1] in {b"400", b"404", b"501"}
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head
        assert b"x-request-id: " in head
        error = json.JSONDecoder().raw_decode(body.decode())[0]["error"]  # another response may follow
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        writer.close()
        await still_serves(http)


async def test_connections_without_http_write_one_log_line(
    run_http: RunHttp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_repeats", Repeats())
    async with run_http() as http:
        for _ in range(5):
            reader, writer = await opened(http)
            writer.write(b"\x16\x03\x01 garbage\r\n\r\n")
            await until_closed(reader)
            writer.close()
    assert [record.getMessage() for record in caplog.records if "Invalid HTTP" in record.getMessage()] == [
        "Invalid HTTP request received."
    ]


async def test_the_error_of_invalid_http_says_what_is_wrong(run_http: RunHttp) -> None:
    async with run_http() as http:
        reader, writer = await opened(http)
        writer.write(HEAD + b"Content-Length: -5\r\n\r\n")
        assert b"not valid HTTP/1.1: bad Content-Length" in await until_closed(reader)
        writer.close()


async def test_a_request_with_two_kinds_of_length_is_rejected_with_what_follows(run_http: RunHttp) -> None:
    """It is another client's, where a proxy in front goes by the other length."""
    async with run_http() as http:
        reader, writer = await opened(http)
        lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        writer.write(HEAD + lengths + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await until_closed(reader)
        assert b"not valid HTTP/1.1: Content-Length and Transfer-Encoding" in answer
        assert b"200 OK" not in answer
        writer.close()


@pytest.mark.parametrize("num_chunks", [200, 2000])
async def test_a_body_has_few_small_chunks(run_http: RunHttp, num_chunks: int) -> None:
    """Each of which keeps the loop."""
    body = json.dumps({"prompt": [20], "max_tokens": 1}).ljust(num_chunks).encode()
    async with run_http() as http:
        reader, writer = await opened(http)
        writer.write(HEAD + b"Connection: close\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in body))
        writer.write(b"0\r\n\r\n")
        answer = await until_closed(reader)
        if num_chunks < 1024:
            assert answer.startswith(b"HTTP/1.1 200 OK")
        else:
            assert b"not valid HTTP/1.1: the body has more than 1024 chunks, of fewer than 64 bytes" in answer
        writer.close()
        await still_serves(http)


async def test_an_invalid_rest_of_an_answered_request_ends_the_connection_without_a_traceback(
    run_http: RunHttp, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_http() as http:
        reader, writer = await opened(http)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"404" in await reader.readline()
        writer.write(b"no chunk\r\n")
        with contextlib.suppress(TimeoutError):
            await until_closed(reader)
        writer.close()
        await still_serves(http)
    assert not [record for record in caplog.records if record.exc_info]


async def test_connections_beyond_the_limit_are_closed_at_once(run_http: RunHttp) -> None:
    async with run_http(http={"max_connections": 8}) as http:
        kept = [await opened(http) for _ in range(8)]
        await asyncio.sleep(0.05)
        reader, writer = await opened(http)
        assert await until_closed(reader) == b""
        writer.close()
        for _, one in kept:
            one.close()
        await asyncio.gather(*(until_closed(one) for one, _ in kept))
        await still_serves(http)


async def test_a_client_that_does_not_read_is_dropped(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", max_model_len=300_000)
    # The flood keeps this loop busy: no instance may be taken for dead.
    patient = {"beat_timeout_s": 60.0}
    async with run_http(prefill=0, decode=[decode], server={"write_timeout_s": 0.5}, pools=patient) as http:
        # Each of the eight choices begins with an echo that takes 1.2 MB of JSON: more than the sockets take.
        wanted = {"prompt": "\x01" * 200_000, "echo": True, "n": 8, "max_tokens": 50_000, "stream": True}
        body = json.dumps(wanted).encode()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        await asyncio.get_running_loop().sock_connect(deaf, http.host_and_port)
        await asyncio.get_running_loop().sock_sendall(deaf, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await decode.until("decode cancelled", timeout_s=60)
        deaf.close()
        await http.rig.until_idle()
        await still_serves(http)


async def test_large_requests_of_one_tenant_do_not_wait_for_those_of_another(run_http: RunHttp) -> None:
    """Behind a gateway all come from one address."""
    body = msgspec.json.encode({"model": "fake", "prompt": [1] * LARGE_BYTES, "max_tokens": 2})

    async with run_http(prefill=0, admission={"tenant_key": "x-tenant"}) as http:

        async def ask(tenant: str) -> int:
            headers = {"content-type": "application/json", "x-tenant": tenant}
            return (await http.http.post("/v1/completions", content=body, headers=headers)).status_code

        large = http.rig.app._server.large
        await large._acquire("alice\0ipv4:127.0.0.1")
        waiting = asyncio.create_task(ask("alice"))
        await until(lambda: large._num_waiting["alice\0ipv4:127.0.0.1"])
        assert await ask("bob") == 400, "the prompt is too long"
        request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[1] * LARGE_BYTES))
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await anext(aiter(http.rig.stub.Generate(request, metadata=(("x-tenant", "bob"),), timeout=60)))
        assert not waiting.done()
        large._release("alice\0ipv4:127.0.0.1")
        assert await waiting == 400


async def test_the_setting_is_how_many_large_messages_are_parsed_at_a_time(run_http: RunHttp) -> None:
    async with run_http(prefill=0, server={"max_large_messages_per_peer": 3}) as http:
        large = http.rig.app._server.large
        for _ in range(3):
            async with asyncio.timeout(20):
                await large._acquire("a")
        waiting = asyncio.create_task(large._acquire("a"))
        await until(lambda: large._num_waiting["a"])
        for _ in range(4):
            large._release("a")
            await waiting
