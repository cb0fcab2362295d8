"""One HTTP request: its id, its end by disconnect, abort or drain, silences, and limits shared with the gRPC port."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.registry import Collector

from protos.tandem.v1 import generation_pb2
from router.api.openai import exchange
from router.api.openai.requests import ChatBody, CompletionBody
from serving import limits
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import RunHttp
from tests.router.rig import PROMPT, SEED, SHORT, slow
from tests.waiting import until


async def test_the_clients_request_id_is_returned(run_http: RunHttp) -> None:
    async with run_http() as http:
        answer = await http.openai.completions.with_raw_response.create(
            model="fake", prompt=SHORT, max_tokens=2, extra_headers={"X-Request-Id": "mine-7"}
        )
        assert answer.headers["x-request-id"] == "mine-7"
        nameless = await http.post(prompt=SHORT, max_tokens=2)
        assert nameless.json()["id"] == f"cmpl-{nameless.headers['x-request-id']}"
        for wrong in ("x" * 129, "a b", "esc\x1b[31m"):
            response = await http.http.post(
                "/v1/completions", json={"prompt": SHORT, "max_tokens": 2}, headers={"x-request-id": wrong}
            )
            assert response.status_code == 200
            assert response.headers["x-request-id"] != wrong


@pytest.mark.parametrize(
    "path", ["/v1/models", "/version", "/metrics", "/", "/live", "/nowhere", "/health", "/openapi.json"]
)
async def test_answers_have_the_clients_request_id_but_for_those_that_the_docs_except(
    run_http: RunHttp, path: str
) -> None:
    async with run_http() as http:
        answer = await http.http.get(path, headers={"x-request-id": "mine-7"})
        excepted = ("/health", "/openapi.json")
        assert answer.headers.get("x-request-id") == (None if path in excepted else "mine-7")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_answers_to_equal_request_ids_have_ids_of_their_own(run_http: RunHttp, path: str, stream: bool) -> None:
    """A mesh gives all calls that serve one request of its own the same."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    bodies: dict[str, Any] = {"/v1/completions": {"prompt": "hi", "max_tokens": 2}, "/v1/responses": {"input": "hi"}}
    body = {**bodies.get(path, chat), "model": "fake", "stream": stream}
    async with run_http() as http:
        answers = [await http.http.post(path, json=body, headers={"x-request-id": "mine-7"}) for _ in range(2)]
        first, second = (set(re.findall(r'"(?:id|item_id)": ?"([^"]+)"', answer.text)) for answer in answers)
        assert first
        assert second
        assert first.isdisjoint(second)
        assert [answer.headers["x-request-id"] for answer in answers] == ["mine-7"] * 2
        assert "mine-7" not in answers[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_route_is_in_the_headers(run_http: RunHttp, stream: bool) -> None:
    async with run_http() as http:
        response = await http.post(prompt=PROMPT, max_tokens=3, stream=stream)
        headers = response.headers
        assert (headers["tandem-disaggregated"], headers["tandem-prefill"]) == ("yes", "prefill-0")
        assert headers["tandem-decode"] == "decode-0"
        assert "100 tokens" in headers["tandem-reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_have_no_route(run_http: RunHttp, stream: bool) -> None:
    async with run_http() as http:
        response = await http.post(prompt=[PROMPT, PROMPT], max_tokens=3, stream=stream)
        assert response.status_code == 200
        assert "tandem-decode" not in response.headers


async def test_the_route_is_ascii_whatever_an_instance_is_called(run_http: RunHttp) -> None:
    async with run_http(prefill=0, decode=[FakeInstance("decode", "décode-日")]) as http:
        response = await http.post(prompt=SHORT, max_tokens=2)
        assert (response.status_code, response.headers["tandem-decode"]) == (200, r"d\xe9code-\u65e5")
        assert (await http.rig.generate(prompt=SHORT)).trailers["tandem-decode"] == r"d\xe9code-\u65e5"


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
async def test_a_disconnect_from_a_stream_ends_its_request(run_http: RunHttp, num_tokens: int) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode]) as http:
        opening = http.http.stream(
            "POST", "/v1/completions", json={"prompt": SHORT, "max_tokens": 2000, "stream": True}
        )
        if num_tokens == 0:
            asking = asyncio.create_task(opening.__aenter__())
            await decode.until("decode")
            asking.cancel()
            await asyncio.wait({asking})
        else:
            async with opening as response:
                lines = response.aiter_lines()
                for _ in range(2 * num_tokens):
                    await anext(lines)
        [ended] = await decode.until("decode cancelled")
        assert len(decode.recorded("token")) < 20
        assert ended.request_id
        await http.rig.until_idle()


async def test_openais_client_cancels_in_mid_stream(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(decode=[decode]) as http:
        stream = await http.openai.completions.create(model="fake", prompt=PROMPT, max_tokens=2000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await decode.until("decode cancelled")
        await http.rig.until_idle()


async def test_a_disconnect_before_a_whole_answer_ends_its_request(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode]) as http:
        asking = asyncio.create_task(http.post(prompt=SHORT, max_tokens=2000, n=2))
        await decode.until("token", 2)
        asking.cancel()
        await decode.until("decode cancelled", 2)
        await http.rig.until_idle()


async def test_a_disconnect_from_the_queue_frees_its_place(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode], admission={"max_requests": 1, "queue_timeout_s": 60}) as http:
        running = asyncio.create_task(http.post(prompt=SHORT, max_tokens=2000))
        await decode.until("token")
        waiting = asyncio.create_task(http.post(prompt=SHORT, max_tokens=2000))
        await until(lambda: http.rig.app.service.abort_registry.num_requests >= 2)
        for task in (waiting, running):
            task.cancel()
        await http.rig.until_idle()
        assert len(decode.recorded("decode")) == 1


async def test_an_abort_by_name_ends_an_answer(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode]) as http:
        asking = asyncio.create_task(
            http.http.post(
                "/v1/completions",
                json={"prompt": SHORT, "max_tokens": 2000, "seed": SEED},
                headers={"x-request-id": "mine"},
            )
        )
        await decode.until("token", 3)
        aborted = await http.rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        assert aborted.num_aborted == 1
        [choice] = (await asking).json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert choice["text"]


async def test_both_ports_share_the_limits_on_open_calls(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode], server={"max_calls_per_peer": 1}) as http:
        asking = asyncio.create_task(http.rig.generate(prompt=SHORT, max_tokens=20))
        await decode.until("token")
        response = await http.post(prompt=SHORT, max_tokens=2)
        assert response.status_code == 429
        assert "open calls" in response.json()["error"]["message"]
        await asking


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/v1/models/fake", "/version", "/"])
async def test_what_the_router_says_of_itself_is_no_request(run_http: RunHttp, path: str) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    limits = {"max_calls_per_peer": 1, "drain_grace_s": 60.0}
    async with run_http(prefill=0, decode=[decode], server=limits) as http:
        asking = asyncio.create_task(http.rig.generate(prompt=SHORT, max_tokens=2000))
        await decode.until("token")
        assert (await http.post(prompt=SHORT, max_tokens=2)).status_code == 429
        assert (await http.http.get(path)).status_code == 200
        draining = asyncio.create_task(http.rig.app.drain())
        await until(lambda: http.rig.app._server.calls.draining)
        assert (await http.post(prompt=SHORT, max_tokens=2)).status_code == 503
        assert (await http.http.get(path)).status_code == 200
        for task in (asking, draining):
            task.cancel()
        await asyncio.wait({asking, draining})


async def test_answers_to_many_invalid_requests_are_delayed(run_http: RunHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    async with run_http(prefill=0, server={"max_bad_calls_per_s": 1.0}) as http:
        for _ in range(2):
            assert (await http.post(prompt=SHORT, max_tokens=-1)).status_code == 400
        began_s = time.monotonic()
        asking = asyncio.create_task(http.post(prompt=SHORT, max_tokens=-1))
        assert (await http.post(prompt=SHORT, max_tokens=2)).status_code == 200
        assert (await asking).status_code == 400
        assert time.monotonic() - began_s >= 1.0  # one a second, and none came back before


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A collection of all that other tests have left takes CPU time of the thread in which it begins."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_a_large_body_is_parsed_off_the_event_loop(run_http: RunHttp) -> None:
    body = msgspec.json.encode({"prompt": [1] * 1_000_000, "max_tokens": 2})
    async with run_http(prefill=0) as http:
        began_s = time.thread_time()
        CompletionBody.parse(body).requests("oracle")
        parsing_s, began_s = time.thread_time() - began_s, time.thread_time()
        response = await http.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert time.thread_time() - began_s < parsing_s  # this thread's CPU time: also the client's and the sockets'
        assert response.status_code == 400
        assert "1000000 tokens" in response.json()["error"]["message"]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        *(pytest.param(path, marks=pytest.mark.slow) for path in ("/v1/messages/count_tokens", "/tokenize")),
    ],
)
async def test_many_messages_are_checked_off_the_event_loop_and_before_the_template(
    run_http: RunHttp, path: str
) -> None:
    messages = [{"role": "user", "content": ""}] * 50_000
    body = msgspec.json.encode({"model": "fake", "messages": messages})
    async with run_http(prefill=0) as http:
        began_s = time.thread_time()
        ChatBody.parse(body).requests("oracle")
        parsing_s, began_s = time.thread_time() - began_s, time.thread_time()
        response = await http.http.post(path, content=body, headers={"content-type": "application/json"})
        assert time.thread_time() - began_s < parsing_s / 2
        assert response.status_code == 400
        assert "50000 messages; allowed: at most 4095" in response.json()["error"]["message"]


async def test_a_drain_finishes_running_requests_and_rejects_new_ones(run_http: RunHttp) -> None:
    permits = asyncio.Semaphore(1)
    decode = FakeInstance("decode", behaviour=slow(permits=permits))
    async with run_http(prefill=0, decode=[decode], server={"drain_grace_s": 30.0}) as http:
        asking = asyncio.create_task(http.post(prompt=SHORT, max_tokens=40))
        await decode.until("token")
        assert (await http.http.get("/health")).status_code == 200
        draining = asyncio.create_task(http.rig.app.drain())
        async with asyncio.timeout(20):
            while (await http.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
        await until(lambda: http.rig.app._server.calls.draining)
        assert (refused := await http.post(prompt=SHORT, max_tokens=1)).status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert "draining" in refused.json()["error"]["message"]
        assert not asking.done()
        for _ in range(40):
            permits.release()
        assert (await asking).json()["usage"]["completion_tokens"] == 40
        assert await draining, "the drain has cut something off"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drain_ends_the_connections_that_clients_keep(run_http: RunHttp, stream: bool) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.01))
    async with run_http(prefill=0, decode=[decode], server={"drain_accept_s": 600.0}) as http:
        kept = await http.post(prompt=SHORT, max_tokens=2, stream=stream)
        assert (kept.status_code, kept.headers.get("connection")) == (200, None)
        draining = asyncio.create_task(http.rig.app.drain())
        async with asyncio.timeout(20):
            while (health := await http.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
        assert health.headers["connection"] == "close"
        last = await http.post(prompt=SHORT, max_tokens=2, stream=stream)
        assert (last.status_code, last.headers.get("connection")) == (200, "close")
        draining.cancel()
        await asyncio.wait({draining})


async def test_a_stop_ends_streams_with_an_error_event(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode]) as http:
        asking = asyncio.create_task(http.post(prompt=SHORT, max_tokens=2000, stream=True))
        await decode.until("token", 10)  # so that the first one has begun the stream
        assert not await http.rig.app.stop()
        events = (await asking).text.split("\n\n")
        assert "the server ended before the request was finished" in events[-3]
        assert events[-2:] == ["data: [DONE]", ""]
        assert http.rig.app.service.metrics.ended == {"unavailable": 1}


async def test_health_follows_the_pools(run_http: RunHttp) -> None:
    async with run_http(prefill=0) as http:
        async with asyncio.timeout(20):
            while (await http.http.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
        await http.rig.decode[0].kill()
        async with asyncio.timeout(20):
            while (sick := await http.http.get("/health")).status_code != 503:
                await asyncio.sleep(0.01)
        assert sick.headers["retry-after"] == "1"


async def test_models_are_listed(run_http: RunHttp) -> None:
    async with run_http() as http:
        [model] = [model async for model in http.openai.models.list()]
        assert (model.id, model.owned_by) == ("fake", "tandem")
        assert model.model_extra == {"max_model_len": 4096}
        assert (await http.openai.models.retrieve("fake")).id == "fake"


async def test_metrics_count_http_requests(run_http: RunHttp) -> None:
    async with run_http() as http:
        await http.post(prompt=SHORT, max_tokens=2)
        response = await http.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        [line] = [line for line in response.text.splitlines() if "requests_ended_total" in line and "finished" in line]
        assert line.endswith(" 1.0")


async def test_a_scrape_that_the_event_loop_does_not_answer_in_time_is_no_internal_error(
    run_http: RunHttp, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(Collector):
        def collect(self) -> Iterator[Metric]:
            raise TimeoutError("the event loop has not answered for 2 s")

    async with run_http() as http:
        http.rig.app._metrics_server.registry.register(Late())
        response = await http.http.get("/metrics")
        assert (response.status_code, response.json()["error"]["message"]) == (
            503,
            "the event loop has not answered for 2 s",
        )
        assert not [record for record in caplog.records if record.exc_info]


async def test_the_api_describes_itself(run_http: RunHttp) -> None:
    async with run_http() as http:
        paths = (await http.http.get("/openapi.json")).json()["paths"]
        body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"prompt", "temperature", "top_k"} <= set(body["properties"])
        assert body["required"] == ["prompt"]


COMMENT = ":\n\n"
PING = 'event: ping\ndata: {"type": "ping"}\n\n'
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
SIGNS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": (COMMENT, {"prompt": "hi", "max_tokens": 6}),
    "/v1/chat/completions": (COMMENT, CHAT),
    "/v1/responses": (COMMENT, {"input": "hi", "max_output_tokens": 6}),
    "/v1/messages": (PING, CHAT),
}


def permit(permits: asyncio.Semaphore, num_tokens: int) -> None:
    for _ in range(num_tokens):
        permits.release()


@pytest.mark.parametrize("path", SIGNS)
async def test_a_silent_stream_gives_signs_of_life(
    run_http: RunHttp, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(exchange, "MAX_SILENCE_S", 0.02)
    permits = asyncio.Semaphore(2)
    decode = FakeInstance("decode", behaviour=Behaviour(permits=permits))
    sign, body = SIGNS[path]
    async with run_http(prefill=0, decode=[decode]) as http:
        async with http.http.stream("POST", path, json={**body, "model": "fake", "stream": True}) as response:
            text, is_held = "", True
            async for piece in response.aiter_text():
                text += piece
                if is_held and text.count(sign) >= 2:  # it goes on, while nothing else comes
                    is_held = False
                    permit(permits, 4)
        assert not is_held
        rest = text.replace(sign, "").strip().split("\n\n")
        assert all(part.startswith(("data: ", "event: ")) for part in rest), "an event was cut"
        await http.rig.until_idle()


async def test_openais_client_reads_past_the_signs(run_http: RunHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_SILENCE_S", 0.02)
    num_signs, sent_sign = 0, exchange.Exchange._send_sign

    async def counted(self: exchange.Exchange) -> None:
        nonlocal num_signs
        await sent_sign(self)
        num_signs += 1

    monkeypatch.setattr(exchange.Exchange, "_send_sign", counted)
    permits = asyncio.Semaphore(2)
    decode = FakeInstance("decode", behaviour=Behaviour(permits=permits))
    async with run_http(prefill=0, decode=[decode]) as http:
        stream = await http.openai.completions.create(model="fake", prompt="hi", max_tokens=6, seed=1, stream=True)
        texts = [(await anext(stream)).choices[0].text for _ in range(2)]
        num_before = num_signs
        await until(lambda: num_signs >= num_before + 2)
        permit(permits, 4)
        texts += [event.choices[0].text async for event in stream]
        permit(permits, 6)
        whole = await http.openai.completions.create(model="fake", prompt="hi", max_tokens=6, seed=1)
        assert "".join(texts) == whole.choices[0].text


async def test_a_stream_that_ends_leaves_no_timer(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=Behaviour(permits=asyncio.Semaphore(9)))
    async with run_http(prefill=0, decode=[decode]) as http:
        await http.post(prompt="hi", max_tokens=6, stream=True)
        async with http.http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            await anext(response.aiter_text())
        await decode.until("decode cancelled")
        await http.rig.until_idle()
        # By its exact type: `isinstance` asks a dead weak proxy, and raises.
        timers = [one for one in gc.get_objects() if type(one) is asyncio.TimerHandle and not one.cancelled()]
        assert not [one for one in timers if "_check_silence" in repr(one)]
