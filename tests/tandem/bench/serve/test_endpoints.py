"""Both endpoints, over real sockets: what is counted, and what every way of going wrong is called. Server-sent events
come out whole, however the bytes are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.serve import openai_endpoint
from tandem.bench.serve.endpoint import Answer, Endpoint, PlannedRequest, RequestFailed
from tandem.bench.serve.grpc_endpoint import GrpcEndpoint
from tandem.bench.serve.load import run_load
from tandem.bench.serve.openai_endpoint import EventTooLong, OpenAIEndpoint, event_data
from tests.tandem.bench.serve.fake_servers import Behaviour, FakeOpenAI, FakeTandem
from tests.tcp import TcpServer

REQUEST = PlannedRequest(0.0, (11, 12, 13), 6)
BOTH = pytest.mark.parametrize("kind", ["grpc", "openai"])
GUARD_S = 30.0


@asynccontextmanager
async def served(
    kind: str, behaviour: Behaviour | None = None
) -> AsyncIterator[tuple[Endpoint, FakeTandem | FakeOpenAI]]:
    """A fake server and the endpoint for it."""
    if kind == "grpc":
        async with FakeTandem(behaviour) as tandem:
            endpoint: Endpoint = GrpcEndpoint(tandem.address, num_connections=2)
            yield endpoint, tandem
            await endpoint.close()
    else:
        async with FakeOpenAI(behaviour) as openai:
            endpoint = OpenAIEndpoint(openai.url)
            yield endpoint, openai
            await endpoint.close()


async def generated(endpoint: Endpoint, request: PlannedRequest = REQUEST) -> tuple[Answer, list[int]]:
    """The answer, and the number of tokens of each message."""
    counts: list[int] = []
    async with asyncio.timeout(GUARD_S):
        answer = await endpoint.generate(request, counts.append)
    return answer, counts


async def failure(kind: str, behaviour: Behaviour) -> tuple[RequestFailed, int]:
    """How it failed, and the number of tokens before."""
    counts: list[int] = []
    async with served(kind, behaviour) as (endpoint, _), asyncio.timeout(GUARD_S):
        with pytest.raises(RequestFailed) as failed:
            await endpoint.generate(REQUEST, counts.append)
    return failed.value, sum(counts)


@BOTH
async def test_token_ids_go_out_and_every_token_is_counted(kind: str) -> None:
    async with served(kind) as (endpoint, server):
        answer, counts = await generated(endpoint)
    assert counts == [1] * 6
    assert (answer.finish_reason, answer.num_reported_tokens) == ("length", None)
    assert [list(prompt) for prompt in server.prompts] == [[11, 12, 13]]


@BOTH
async def test_messages_of_several_tokens_are_counted_by_what_they_say(kind: str) -> None:
    async with served(kind, Behaviour(pack=3)) as (endpoint, _):
        answer, counts = await generated(endpoint)
        assert (answer.num_reported_tokens, answer.num_prompt_tokens) == (None, None if kind == "grpc" else 3)
        assert counts == [1, 3, 2]
        assert {"grpc": "token ids of each", "openai": "usage agrees"}[kind] in endpoint.counting


@BOTH
@pytest.mark.parametrize("usage", ["each", "end"])
async def test_tokens_from_caches_are_as_the_endpoint_reports_them(kind: str, usage: str) -> None:
    async with served(kind, Behaviour(cached=2, usage=usage)) as (endpoint, _):
        answer, _ = await generated(endpoint)
        [record] = await run_load(endpoint, [REQUEST])
    stored = 1 if kind == "grpc" else 0
    assert (answer.num_cached_tokens, answer.num_stored_tokens) == (2, stored)
    assert (record.num_cached_tokens, record.num_stored_tokens) == (2, stored)


@pytest.mark.parametrize("usage", ["each", "none"])
async def test_an_endpoint_that_reports_no_cached_tokens_has_not_reported_none(usage: str) -> None:
    async with served("openai", Behaviour(usage=usage)) as (endpoint, _):
        assert (await generated(endpoint))[0].num_cached_tokens is None


@BOTH
async def test_an_overloaded_server_is_a_refusal(kind: str) -> None:
    failed, num_tokens = await failure(kind, Behaviour(refuse=True))
    assert failed.refused
    assert failed.status == {"grpc": "RESOURCE_EXHAUSTED", "openai": "HTTP 503"}[kind]
    assert "full" in failed.message
    assert num_tokens == 0


@BOTH
async def test_an_error_in_the_middle_is_a_failure_by_name(kind: str) -> None:
    failed, num_tokens = await failure(kind, Behaviour(fail_at=2))
    assert not failed.refused
    assert failed.status == {"grpc": "INTERNAL", "openai": "ERROR IN STREAM"}[kind]
    assert "the engine is gone" in failed.message
    assert num_tokens == 2


@BOTH
async def test_a_stream_that_ends_without_a_reason_is_a_failure(kind: str) -> None:
    failed, num_tokens = await failure(kind, Behaviour(hang_up_at=4))
    assert failed.status == {"grpc": "DATA_LOSS", "openai": "CONNECTION LOST"}[kind]
    assert "after 4 tokens" in failed.message
    assert num_tokens == 4


@BOTH
@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_is_cut_short_is_a_failure(kind: str, reason: str) -> None:
    failed, num_tokens = await failure(kind, Behaviour(reason=reason))
    assert failed.status == reason.upper()
    assert failed.message == f"the answer ended with {reason} after 6 tokens"
    assert num_tokens == 6


async def test_a_token_that_is_missing_is_noticed() -> None:
    failed, num_tokens = await failure("grpc", Behaviour(skip_at=3))
    assert failed.status == "DATA_LOSS"
    assert "token_index 4 where 3 was expected" in failed.message
    assert num_tokens == 3


@BOTH
async def test_cancellation_cancels_the_request_at_the_endpoint(kind: str) -> None:
    async with served(kind, Behaviour(hang_at=2)) as (endpoint, server), asyncio.timeout(GUARD_S):
        task = asyncio.create_task(generated(endpoint))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while server.in_flight:  # the server notices
            await asyncio.sleep(0.01)


@BOTH
async def test_a_load_of_many_keeps_to_its_connections_and_its_limit(kind: str) -> None:
    requests = [PlannedRequest(0.0, (11,), 3)] * 12
    async with served(kind, Behaviour(first_s=0.05, gap_s=0.01)) as (endpoint, server):
        records = await run_load(endpoint, requests, max_concurrency=5)
    assert all(record.succeeded and record.num_output_tokens == 3 for record in records)
    assert server.max_in_flight == 5
    if kind == "grpc":
        assert len(server.peers) == 2


@BOTH
async def test_an_unreachable_server_is_reported_with_what_to_type(kind: str) -> None:
    endpoint = GrpcEndpoint("127.0.0.1:1") if kind == "grpc" else OpenAIEndpoint("http://127.0.0.1:1")
    with pytest.raises(RequestFailed) as failed:
        await endpoint.served_model()
    assert failed.value.status == "UNAVAILABLE"
    assert {"grpc": "give host:port", "openai": "check the address"}[kind] in failed.value.message
    with pytest.raises(RequestFailed) as failed:
        await endpoint.generate(REQUEST, lambda count: None)
    assert failed.value.status == {"grpc": "UNAVAILABLE", "openai": "CONNECTION REFUSED"}[kind]
    await endpoint.close()


@BOTH
async def test_what_is_served_is_known(kind: str) -> None:
    async with served(kind) as (endpoint, _):
        found = await endpoint.served_model()
    assert (found.model, found.max_model_len) == ("fake", 4096)
    assert found.vocab_size == (400 if kind == "grpc" else None)


# Counting where events do not say how many tokens they carry


async def test_usage_at_the_end_gives_the_number_and_the_spread_stays_open() -> None:
    async with served("openai", Behaviour(pack=3, usage="end")) as (endpoint, _):
        answer, counts = await generated(endpoint)
        assert (answer.num_reported_tokens, counts) == (6, [1, 1, 1])
        assert "at the end" in endpoint.counting


async def test_usage_at_the_end_that_equals_the_events_leaves_nothing_open() -> None:
    async with served("openai", Behaviour(usage="end", blank_at=2)) as (endpoint, _):
        answer, counts = await generated(endpoint)
        assert (answer.num_reported_tokens, counts) == (None, [1] * 6)
        assert "agrees" in endpoint.counting


async def test_a_server_without_usage_in_each_event_gets_the_option_once() -> None:
    async with served("openai", Behaviour(usage="end")) as (endpoint, server):
        await asyncio.gather(generated(endpoint), generated(endpoint))
        assert server.num_requests == 4
        await generated(endpoint)
        assert server.num_requests == 5


async def test_without_usage_events_are_counted_and_this_is_reported() -> None:
    async with served("openai", Behaviour(pack=3, usage="none")) as (endpoint, _):
        answer, counts = await generated(endpoint)
        assert (answer.num_reported_tokens, answer.num_prompt_tokens, counts) == (None, None, [1, 1, 1])
        assert "no usage" in endpoint.counting


@pytest.mark.parametrize("usage", ["each", "end"])
async def test_a_single_token_without_text_counts_by_usage(usage: str) -> None:
    async with served("openai", Behaviour(usage=usage, blank_at=0)) as (endpoint, _):
        assert (await generated(endpoint, PlannedRequest(0.0, (11,), 1)))[1] == [1]


@asynccontextmanager
async def answering(body: bytes, head: bytes = b"") -> AsyncIterator[OpenAIEndpoint]:
    """The endpoint of a server that answers every request with `body`, and with `head` among the headers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + head + b"\r\n" + body)
        await writer.drain()

    async with TcpServer(serve) as server:
        endpoint = OpenAIEndpoint(f"http://{server.address}/v1/")
        yield endpoint
        await endpoint.close()


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (b"{nonsense", "malformed"),
        (b'{"choices": [{"text": "\xe2\x82"}]}', "not UTF-8"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"usage": {"completion_tokens": 1000000000000}, "choices": [{}]}', "<= "),
        (b'{"usage": {"completion_tokens": -5}, "choices": [{}]}', ">= 0"),
    ],
)
async def test_an_invalid_event_is_a_failure_of_its_request(event: bytes, problem: str) -> None:
    async with answering(b"data: " + event + b"\n\n") as endpoint:
        with pytest.raises(RequestFailed, match="BAD EVENT") as failed:
            await generated(endpoint)
    assert problem in failed.value.message


@pytest.mark.parametrize("models", [b'{"data": [{"id": "\xff"}]}', b'{"x": ' + b"[" * 100_000])
async def test_an_invalid_list_of_models_is_reported_with_what_to_type(models: bytes) -> None:
    async with answering(models) as endpoint:
        with pytest.raises(RequestFailed, match="give --model"):
            await endpoint.served_model()


ANSWER = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def keeping_connections(*pieces: bytes) -> AsyncIterator[tuple[OpenAIEndpoint, list[int]]]:
    """The endpoint of a server that answers every request with these chunks, and the number of requests on each of its
    connections. An empty chunk ends the answer; without one the answer never ends."""
    num_requests: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_requests.append(0)
        number = len(num_requests) - 1
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(length.partition(b":")[2]))
            num_requests[number] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in pieces:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0.01)

    async with TcpServer(serve) as server:
        endpoint = OpenAIEndpoint(f"http://{server.address}")
        yield endpoint, num_requests
        await endpoint.close()


@pytest.mark.parametrize("pieces", [(ANSWER + DONE, b""), (ANSWER, DONE, b": a comment\n\ndata: {nonsense\n\n", b"")])
async def test_requests_one_after_another_share_a_connection(
    pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_endpoint, "_REST_TIMEOUT_S", GUARD_S)
    monkeypatch.setattr(openai_endpoint, "_IDLE_S", GUARD_S)
    async with keeping_connections(*pieces) as (endpoint, num_requests):
        for _ in range(3):
            assert (await generated(endpoint))[1] == [1]
            await asyncio.gather(*endpoint._rests)
    assert num_requests == [3]


async def test_an_answer_without_an_end_of_its_message_costs_the_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_endpoint, "_REST_TIMEOUT_S", 0.05)
    async with keeping_connections(ANSWER, DONE) as (endpoint, num_requests):
        for _ in range(2):
            assert (await generated(endpoint))[1] == [1]
            await asyncio.gather(*endpoint._rests)
    assert num_requests == [1, 1]


async def test_a_request_ends_with_its_answer_though_its_message_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_endpoint, "_REST_TIMEOUT_S", 10 * GUARD_S)
    async with keeping_connections(ANSWER, DONE) as (endpoint, num_requests):
        records = await run_load(endpoint, [REQUEST] * 2, max_concurrency=1, timeout_s=10.0)
    assert [record.error for record in records] == ["", ""]
    assert num_requests == [1, 1]


async def test_a_connection_that_is_lost_after_the_answer_is_no_failure() -> None:
    async with answering(ANSWER + DONE, head=b"Content-Length: 10000\r\n") as endpoint:
        assert (await generated(endpoint))[1] == [1]


async def test_prompts_may_go_as_text_and_the_body_may_be_changed() -> None:
    async with FakeOpenAI() as server:
        endpoint = OpenAIEndpoint(server.url, to_text=lambda ids: f"{len(ids)} words", extra_body={"max_tokens": 2})
        answer, counts = await generated(endpoint)
        await endpoint.close()
    assert server.prompts == ["3 words"]
    assert counts == [1, 1]
    assert answer.num_prompt_tokens == len("3 words")  # as the server counts


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write one like http://"):
        OpenAIEndpoint(url)


def data_of(chunks: list[bytes]) -> list[bytes]:
    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def collect() -> list[bytes]:
        return [data async for data in event_data(stream())]

    return asyncio.run(collect())


DATA = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1).map(str.encode)


@given(st.lists(DATA, max_size=5), st.sampled_from([b"\n", b"\r\n"]), st.integers(1, 7))
def test_data_survives_any_cut_and_either_end_of_line(events: list[bytes], end: bytes, step: int) -> None:
    whole = b"".join(b": comment" + end + b"data: " + data + end + b"id: 7" + end + end for data in events)
    assert data_of([whole[at : at + step] for at in range(0, len(whole), step)]) == events


def test_lines_of_one_event_are_joined_and_half_an_event_is_none() -> None:
    assert data_of([b"data:one\ndata: two\n\n\n", b"event: x\n\n", b"data: half\n"]) == [b"one\ntwo"]


@pytest.mark.parametrize("chunk", [b"data: 12345678", b"data: 1234567\n"])
def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch, chunk: bytes) -> None:
    monkeypatch.setattr(openai_endpoint, "MAX_EVENT_BYTES", 20)
    with pytest.raises(EventTooLong):
        data_of([chunk] * 4)
