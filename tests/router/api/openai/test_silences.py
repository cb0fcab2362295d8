"""A stream that has begun and gives no event sends a sign of life, since proxies end silent ones."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from router.api.openai import exchange
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import RunHttp
from tests.waiting import until

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
