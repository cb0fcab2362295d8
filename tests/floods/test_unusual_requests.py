"""Single unusual requests: each is answered by its own rule, and other clients are not affected."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import common_pb2, generation_pb2
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.floods import http2
from tests.floods.floods import GENERATE
from tests.floods.http2 import Connection, frame, message
from tests.grpc_calls import of_bytes
from tests.router.conftest import Run, model, model_folder, run
from tests.router.rig import SHORT, request_of
from tests.waiting import until

__all__ = ["model", "model_folder", "run"]


async def test_fifty_requests_with_one_id_get_their_own_answers(run: Run) -> None:
    async with run(prefill=0) as rig:
        prompts = [[20 + number, *SHORT] for number in range(50)]
        answers = await asyncio.gather(*(rig.generate(prompt=prompt, request_id="same") for prompt in prompts))
        assert all(answer.is_exactly(12, prompt=prompt) for answer, prompt in zip(answers, prompts, strict=True))


async def test_a_very_long_grpc_timeout_is_cut_to_the_servers_limit(run: Run) -> None:
    slow = FakeInstance("decode", behaviour=Behaviour(token_s=60))
    async with run(prefill=0, decode=[slow], server={"max_deadline_s": 0.5}) as rig:
        async with Connection(rig.app.address) as connection:
            stream_id = connection.open_call(GENERATE, (b"grpc-timeout", b"99999999H"))
            data = message(request_of(SHORT).SerializeToString())
            connection.send(frame(http2.DATA, http2.END_STREAM, stream_id, data))
            await slow.until("decode")
            await slow.until("decode cancelled", timeout_s=20)
        await rig.until_idle(5)


@pytest.mark.parametrize("field", [b"\xf2\x3e", b"\x1a"], ids=["unknown field", "text"])
async def test_a_pickle_is_not_a_prompt(run: Run, field: bytes) -> None:
    pickled = b"\x80\x04\x95\x1e\x00cbuiltins\nexec\n."
    async with run(prefill=0) as rig:
        call = of_bytes(rig.channel, GENERATE)(field + bytes([len(pickled)]) + pickled)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["\ud800x", "\udfff"])
async def test_a_lone_surrogate_is_rejected(run: Run, text: str) -> None:
    wire = text.encode("utf-8", "surrogatepass")
    async with run(prefill=0) as rig:
        call = of_bytes(rig.channel, GENERATE)(b"\x1a" + bytes([len(wire)]) + wire)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_ten_thousand_combining_marks_are_served_or_rejected(run: Run) -> None:
    async with run(prefill=0, decode=[FakeInstance("decode", max_model_len=30_000)]) as rig:
        sampling = common_pb2.SamplingParams(max_tokens=1)
        wanted = generation_pb2.GenerateRequest(text="e" + "\u0301" * 10_000, sampling=sampling)
        assert len((await rig.generate(wanted)).ids()) == 1


async def test_streams_beyond_the_limit_of_a_connection_wait_and_other_connections_are_served(run: Run) -> None:
    slow = FakeInstance("decode", behaviour=Behaviour(token_s=0.02))
    async with run(prefill=0, decode=[slow], server={"max_streams_per_connection": 4}) as rig:
        calls = [rig.call(max_tokens=1000) for _ in range(4)]
        await slow.until("decode", 4)
        fifth = asyncio.create_task(rig.generate(prompt=SHORT))
        async with grpc.aio.insecure_channel(rig.app.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            reading = other.unary_stream(GENERATE, response_deserializer=generation_pb2.GenerateResponse.FromString)
            answer = [response async for response in reading(request_of(SHORT).SerializeToString())]
            assert sum(len(response.tokens.token_ids) for response in answer) == 12
        assert not fifth.done()
        for call in calls:
            call.cancel()
        assert (await fifth).is_exactly(12, prompt=SHORT)
        await rig.until_idle(5)


async def test_a_disconnect_before_the_message_leaves_nothing(run: Run) -> None:
    async with run(prefill=0) as rig:
        async with Connection(rig.app.address) as connection:
            for _ in range(20):
                connection.open_call(GENERATE)
            await connection.sent()
            await until(lambda: rig.app._server.calls.num_open == 20)
        await until(lambda: rig.app._server.calls.num_open == 0)
        assert (await rig.generate(prompt=SHORT)).is_exactly(12, prompt=SHORT)
