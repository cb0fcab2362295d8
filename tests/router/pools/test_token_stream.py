"""All calls to an instance are answered in one stream: nothing that holds for a call of its own is lost by that."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import router.dispatch.instance_call
import router.pools.token_stream
from protos.tandem.v1 import common_pb2, decode_pb2, generation_pb2
from router.app import RouterApp
from router.pools.settings import PoolSettings
from router.pools.token_stream import GatherTime, ReceiveBuffer, TokenStream, TokenStreams
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids
from tests.router.conftest import Run
from tests.router.failing import busy, deaf_client, decodes
from tests.router.rig import PROMPT, SEED, Answer, Rig, request_of, settings_of, slow
from tests.waiting import until

HANG_S = 20.0
_MANY = 2000
"""Tokens with log-probabilities, of which the windows of a connection let less than half through."""


@pytest.fixture
def run(run: Run) -> Run:
    """Nothing here is about silence, which is what a busy machine makes of the living."""
    return partial(run, pools={"beat_timeout_s": HANG_S})


async def until_open(rig: Rig, num_open: int = 1) -> None:
    """Waits until each decode instance has that many token streams."""
    await until(lambda: all(fake.token_streams.num_open == num_open for fake in rig.decode))
    await until(lambda: all(one.token_streams and one.token_streams.current for one in rig.app.pools.decode.instances))


def stream_of(rig: Rig, index: int = 0) -> TokenStream:
    """What the router has open to a decode instance."""
    address = rig.decode[index].address
    (streams,) = [instance.token_streams for instance in rig.app.pools.decode.instances if instance.address == address]
    assert streams is not None
    assert streams.current is not None
    return streams.current


def num_in_batches(rig: Rig, index: int = 0) -> int:
    """Answers of a decode instance that left in token streams."""
    return sum(record.detail for record in rig.decode[index].recorded("batch"))


@pytest.mark.parametrize(("disaggregation", "num_before"), [("always", 2), ("never", 0)])
async def test_the_answers_of_many_calls_come_in_one_stream(run: Run, disaggregation: str, num_before: int) -> None:
    mode = {"mode": disaggregation}
    async with run(decode=decodes(slow(0.02)), disaggregation=mode) as rig:
        await until_open(rig)
        prompts = [[20 + i, *PROMPT] for i in range(16)]
        answers = await asyncio.gather(*(rig.generate(request_of(prompt)) for prompt in prompts))
        assert all(answer.is_exactly(12, prompt=prompt) for answer, prompt in zip(answers, prompts, strict=True))
        num_there = num_before + 12 - (disaggregation == "always")  # the first token is the prefill instance's
        assert num_in_batches(rig) == 16 * num_there
        assert max(record.detail for record in rig.decode[0].recorded("batch")) > 1
        assert rig.decode[0].token_streams.num_open == 1


@pytest.mark.parametrize("disaggregation", ["always", "never"])
async def test_an_older_instance_answers_each_call_by_itself(run: Run, disaggregation: str) -> None:
    old = Behaviour(streams_tokens=False, die_at=5)
    async with run(decode=decodes(old, busy(streams_tokens=False)), disaggregation={"mode": disaggregation}) as rig:
        assert (await rig.generate(max_tokens=20)).is_exactly(20)
        assert rig.decode[0].recorded("died")
        assert not [fake for fake in rig.decode if fake.recorded("batch")]
        assert len(rig.decode[1].recorded("asked for a token stream")) == 1


async def test_an_instance_that_does_not_know_the_stream_answers_in_the_call(run: Run) -> None:
    async with run(prefill=0, decode=decodes(slow(0.005))) as rig:
        await until_open(rig)
        stream_of(rig).stream_id = "unknown"
        assert (await rig.generate()).is_exactly(12)
        assert rig.decode[0].recorded("decode")[0].detail.token_stream.stream_id == "unknown"
        assert not num_in_batches(rig)


async def test_prompt_logprobs_do_not_share_a_message(run: Run) -> None:
    async with run(prefill=0) as rig:
        await until_open(rig)
        wanted = request_of()
        wanted.sampling.prompt_logprobs = 0
        answer = await rig.generate(wanted)
        assert len(answer.chunks()[0].prompt_logprobs) == len(PROMPT)
        assert not num_in_batches(rig)


async def test_a_stream_that_breaks_alone_ends_what_runs_on_it_and_is_opened_again(run: Run) -> None:
    async with run(prefill=0, decode=decodes(slow(0.02), slow(0.02, num_running=99))) as rig:
        await until_open(rig)
        first = stream_of(rig)
        asking = [asyncio.create_task(rig.generate(max_tokens=30)) for _ in range(4)]
        await rig.decode[0].until("token", 12)
        rig.decode[0].break_token_streams()
        assert all(answer.is_exactly(30) for answer in await asyncio.gather(*asking))
        assert len(rig.decode[0].recorded("decode cancelled")) == 4
        assert rig.decode[0].num_watches == rig.decode[1].num_watches == 1
        await until_open(rig)
        assert stream_of(rig) is not first
        num_before = num_in_batches(rig)
        assert (await rig.generate()).is_exactly(12)
        assert num_in_batches(rig) > num_before


async def test_a_call_on_a_stream_that_has_ended_does_not_wait_for_an_end_of_its_own(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(token_s=0.02), slow(num_running=99))) as rig:
        await until_open(rig)
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        await rig.decode[0].until("token", 5)
        rig.decode[0].behaviour.token_s = 100
        nothing = grpc.aio.Metadata()
        stream_of(rig).break_off(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "a test's fault"))
        assert (await asking).is_exactly(20)
        assert len(rig.decode[0].recorded("decode cancelled")) == 1


class Recorder:
    """A call on a stream that records what it receives."""

    def __init__(self) -> None:
        self.responses: list[decode_pb2.DecodeResponse] = []
        self.num_held = 0
        self.num_held_at_wakes: list[int] = []
        self.is_busy = False
        self.ends: list[grpc.StatusCode] = []

    def receive(self, response: decode_pb2.DecodeResponse, *, hold: bool = False) -> bool:
        self.responses.append(response)
        self.num_held += hold
        return not self.is_busy

    def wake(self) -> bool:
        self.num_held_at_wakes.append(self.num_held)
        self.num_held = 0
        return not self.is_busy

    def cut_off(self, error: grpc.aio.AioRpcError) -> None:
        self.ends.append(error.code())


async def never(response: decode_pb2.DecodeResponse) -> None:
    raise AssertionError("was answered outside of the stream")


async def test_a_stream_lives_while_the_instance_is_watched_or_a_call_is_on_it() -> None:
    async with FakeInstance("decode") as fake, grpc.aio.insecure_channel(fake.address) as channel:
        streams, call = TokenStreams(channel, PoolSettings(min_backoff_s=0.02, max_backoff_s=0.1)), Recorder()
        # STEP a stream that breaks tells its calls, and another one follows
        await until(lambda: streams.current)
        broken = streams.current
        assert broken is not None
        broken.join(call)
        fake.break_token_streams()
        await until(lambda: call.ends == [grpc.StatusCode.UNAVAILABLE])
        await until(lambda: streams.current)
        stream = streams.current
        assert stream is not broken
        # STEP one whose instance is not followed any more is there for the call on it alone
        assert stream is not None
        joined = stream.join(call)
        streams.retire()
        assert streams.current is None
        async with fake.token_streams.response_writer(decode_pb2.DecodeStart(token_stream=joined), never) as answer:
            await answer(decode_pb2.DecodeResponse())
        await until(lambda: len(call.responses) == 1)
        stream.leave(joined)
        await until(lambda: fake.token_streams.num_open == 0)
        assert len(call.ends) == 1


def step_of(joined: list[decode_pb2.TokenStream], token_index: int = 5) -> decode_pb2.StreamTokensResponse:
    """What a step of the engine brings: a token for each call."""
    response = decode_pb2.DecodeResponse(tokens=common_pb2.TokenChunk(token_index=token_index))
    numbers = [one.call_number for one in joined]
    return decode_pb2.StreamTokensResponse(
        responses=[decode_pb2.NumberedResponse(call_number=number, response=response) for number in numbers]
    )


def busy_calls(count: int) -> tuple[TokenStream, list[Recorder], list[decode_pb2.TokenStream]]:
    """A stream, so many calls on it that are all busy, and how they joined."""
    stream, calls = TokenStream("stream", call=None), [Recorder() for _ in range(count)]
    for call in calls:
        call.is_busy = True
    return stream, calls, [stream.join(call) for call in calls]


async def test_answers_are_gathered_while_most_calls_are_busy() -> None:
    stream, calls = TokenStream("stream", call=None), [Recorder() for _ in range(20)]
    step = step_of([stream.join(call) for call in calls])
    # STEP calls that keep up get each answer at once
    for _ in range(100):
        stream.deliver(step)
    assert not any(call.num_held for call in calls)
    # STEP so do calls of which less than half are busy
    for call in calls[:9]:
        call.is_busy = True
    for _ in range(100):
        stream.deliver(step)
    assert not any(call.num_held for call in calls)
    # STEP most are: what comes is held, and each call gets all of it together
    for call in calls[:11]:
        call.is_busy = True
    for _ in range(5):
        stream.deliver(step)
    assert [call.num_held for call in calls] == [4] * 20
    await until(lambda: all(call.num_held_at_wakes == [4] for call in calls))
    # STEP they keep up again: soon nothing is held
    for call in calls:
        call.is_busy = False
    stream.deliver(step)
    while calls[0].num_held:
        await until(lambda: not calls[0].num_held)
        stream.deliver(step)
    assert 3 <= len(calls[0].num_held_at_wakes) <= 10
    assert {len(call.responses) for call in calls} == {len(calls[0].responses)}


async def test_few_calls_do_not_wait_though_all_are_busy() -> None:
    stream, calls, joined = busy_calls(7)
    for _ in range(100):
        stream.deliver(step_of(joined))
    assert not any(call.num_held for call in calls)


async def test_first_tokens_are_not_held() -> None:
    stream, calls, joined = busy_calls(16)
    for _ in range(3):
        stream.deliver(step_of(joined))
    assert [call.num_held for call in calls] == [2] * 16
    stream.deliver(step_of(joined, token_index=0))
    assert [call.num_held for call in calls] == [2] * 16


async def test_gathering_ends_with_the_calls_and_what_is_held_still_comes() -> None:
    stream, calls, joined = busy_calls(16)
    for _ in range(2):
        stream.deliver(step_of(joined))
    assert [call.num_held for call in calls] == [1] * 16
    for one in joined[7:]:
        stream.leave(one)
    stream.deliver(step_of(joined))
    assert [call.num_held for call in calls] == [1] * 16
    await until(lambda: all(call.num_held_at_wakes == [1] for call in calls))
    # STEP as many as before begin as if nothing had been
    others = [Recorder() for _ in range(16)]
    joined += [stream.join(call) for call in others]
    stream.deliver(step_of(joined))
    assert not any(call.num_held for call in others)


def test_gathering_takes_longer_while_most_calls_are_busy_and_else_ends() -> None:
    time = GatherTime()
    for _ in range(8):
        time.observe(num_busy=1, num_calls=1)
    assert time.length_s == 0, "few answers say little"
    time.observe(num_busy=16, num_calls=16)
    assert time.length_s == 0.002
    lengths = []
    for _ in range(6):
        time.observe(num_busy=33, num_calls=64)
        lengths.append(time.length_s)
    assert lengths == [0.004, 0.008, 0.016, 0.032, 0.032, 0.032]
    # STEP some slow clients among many others do not keep it up
    for _ in range(15):
        assert time.length_s >= 0.001
        time.observe(num_busy=30, num_calls=64)
    time.observe(num_busy=30, num_calls=64)
    assert time.length_s == 0
    # STEP nor do two calls of five, seen one at a time
    time.observe(num_busy=16, num_calls=16)
    lengths = []
    for number in range(200):
        time.observe(num_busy=int(number % 5 < 2), num_calls=1)
        lengths.append(time.length_s)
    assert lengths[-1] == 0


@pytest.mark.parametrize("fault", [None, "die_at", "fail_at", "index_error_at"])
async def test_tokens_that_are_gathered_come_once_and_in_order(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """With a router that believes to be behind all the time, for longer than it ever is."""
    monkeypatch.setattr(GatherTime, "length_s", property(lambda _: 0.1, lambda *_: None), raising=False)
    monkeypatch.setattr(router.pools.token_stream, "_MIN_CALLS", 1)
    failing = slow(0.005)
    if fault is not None:
        setattr(failing, fault, 40)
    async with run(prefill=0, decode=decodes(failing, busy(token_s=0.005))) as rig:
        await until_open(rig)
        answers = await asyncio.gather(*(rig.generate(with_logprobs(60)) for _ in range(4)))
        for answer in answers:
            assert_exact(answer, 60)
            assert len(answer.chunks()) < 30
        resumed = [one.detail.request.emitted_token_ids for one in rig.decode[1].recorded("decode")]
        assert any(resumed) == (fault is not None)


async def test_ends_that_overtake_the_last_tokens_wait_for_as_long_as_any_come(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = TokenStream.deliver
    due_s = itertools.count(0.1, 0.1)

    def late(self: TokenStream, message: decode_pb2.StreamTokensResponse) -> None:
        for one in message.responses:
            alone = decode_pb2.StreamTokensResponse(responses=[one])
            asyncio.get_running_loop().call_later(next(due_s), deliver, self, alone)

    monkeypatch.setattr(TokenStream, "deliver", late)
    monkeypatch.setattr(router.dispatch.instance_call, "_LAST_TOKENS_S", 0.5)
    async with run(prefill=0, decode=decodes(Behaviour(), busy())) as rig:
        await until_open(rig)
        assert (await rig.generate()).is_exactly(12)
        assert not rig.decode[1].recorded("decode")


async def test_tokens_that_a_failure_overtakes_are_computed_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver, delivered = TokenStream.deliver, []

    def only_the_first(self: TokenStream, message: decode_pb2.StreamTokensResponse) -> None:
        is_late = delivered and not rig.decode[1].recorded("decode")
        if not is_late:
            deliver(self, message)
        if message.responses:
            delivered.append(message)

    monkeypatch.setattr(TokenStream, "deliver", only_the_first)
    async with run(prefill=0, decode=decodes(Behaviour(token_s=0.05, fail_at=8), busy())) as rig:
        await until_open(rig)
        assert (await rig.generate(max_tokens=20)).is_exactly(20)
        resumed = rig.decode[1].recorded("decode")[0].detail.request
        assert 0 < len(resumed.emitted_token_ids) < 8


async def test_a_good_end_without_a_finish_is_not_waited_for_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver, dropped = TokenStream.deliver, []

    def without_first_finish(self: TokenStream, message: decode_pb2.StreamTokensResponse) -> None:
        if not dropped and any(one.response.tokens.HasField("finish") for one in message.responses):
            dropped.append(message)
        else:
            deliver(self, message)

    monkeypatch.setattr(TokenStream, "deliver", without_first_finish)
    monkeypatch.setattr(router.dispatch.instance_call, "_LAST_TOKENS_S", 0.1)
    async with run(prefill=0, decode=decodes(slow(0.005), busy())) as rig:
        await until_open(rig)
        assert (await rig.generate()).is_exactly(12)
        assert dropped
        assert len(rig.decode[1].recorded("decode")) == 1


async def test_a_client_that_does_not_read_delays_no_other_and_is_given_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.dispatch.instance_call, "ReceiveBuffer", partial(ReceiveBuffer, max_bytes=20_000))
    async with (
        run(prefill=0, decode=decodes(slow(0.001)), server={"write_timeout_s": 60}) as rig,
        deaf_client(rig) as call,
    ):
        await rig.decode[0].until("token", 100)
        async with asyncio.timeout(HANG_S):
            while not rig.decode[0].recorded("decode cancelled"):
                assert (await rig.generate(max_tokens=20)).is_exactly(20)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "client too slow" in str(raised.value.details())
        assert rig.decode[0].token_streams.num_open == 1


async def read_on(call: Any) -> Answer:
    """What a client gets that has not read yet."""
    answer = Answer()
    async for response in call:
        answer.responses.append(response)
    return answer


def with_logprobs(num_tokens: int, n: int = 1) -> generation_pb2.GenerateRequest:
    request = request_of(max_tokens=num_tokens, n=n)
    request.sampling.logprobs = 0
    return request


def assert_exact(answer: Answer, num_tokens: int, choice: int = 0) -> None:
    """Ids, text and log-probabilities are those of a fault-free run, once each."""
    assert answer.is_exactly(num_tokens, choice=choice)
    found = [position.candidates[0] for chunk in answer.chunks(choice) for position in chunk.logprobs]
    expected = expected_ids(PROMPT, SEED, num_tokens, choice)
    assert [one.token_id for one in found] == expected
    assert [one.logprob for one in found] == [-0.5 * index for index in range(num_tokens)]
    assert answer.finish(choice).usage.completion_tokens == num_tokens


async def test_a_client_that_is_behind_gets_several_tokens_in_a_message(run: Run) -> None:
    async with (
        run(prefill=0, decode=decodes(Behaviour()), server={"write_timeout_s": 60}) as rig,
        deaf_client(rig, with_logprobs(_MANY, n=2)) as call,
    ):
        await until_open(rig)
        await rig.decode[0].until("decode ended", 2, timeout_s=HANG_S)
        answer = await read_on(call)
        for choice in range(2):
            assert_exact(answer, _MANY, choice)
            assert len(answer.chunks(choice)) < _MANY / 2
        assert len(answer.responses[0].tokens.token_ids) == 1, "the first token waits for no other"


async def test_a_client_that_reads_gets_each_token_in_a_message(run: Run) -> None:
    permits = asyncio.Semaphore(1)
    async with run(prefill=0, decode=decodes(Behaviour(permits=permits))) as rig:
        await until_open(rig)
        answer = Answer()
        async for response in rig.call(with_logprobs(30)):
            answer.responses.append(response)
            permits.release()
        assert_exact(answer, 30)
        assert [len(chunk.token_ids) for chunk in answer.chunks()] == [1] * 30


@pytest.mark.parametrize("fault", ["die_at", "index_error_at"])
async def test_a_choice_whose_client_is_behind_goes_on_exactly_elsewhere(run: Run, fault: str) -> None:
    failing = Behaviour()
    setattr(failing, fault, _MANY - 100)
    async with (
        run(prefill=0, decode=decodes(failing, busy()), server={"write_timeout_s": 60}) as rig,
        deaf_client(rig, with_logprobs(_MANY)) as call,
    ):
        await until_open(rig)
        await rig.decode[0].until("token", _MANY - 100, timeout_s=HANG_S)
        if fault == "die_at":
            await rig.decode[0].until("died")
        answer = await read_on(call)
        assert_exact(answer, _MANY)
        assert len(answer.chunks()) < _MANY / 2
        assert 0 < len(rig.decode[1].recorded("decode")[0].detail.request.emitted_token_ids) <= _MANY - 100


async def test_two_routers_have_a_stream_each_and_one_that_stops_takes_only_its_own(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    async with run(prefill=0, decode=decodes(slow(0.02))) as rig:
        other = RouterApp(settings_of(model_folder, [], rig.decode), model)
        await other.start()
        try:
            await until_open(rig, 2)
            asking = asyncio.create_task(rig.generate(max_tokens=40))
            theirs = Rig(other, [], rig.decode)
            await theirs.until_ready()
            lost = theirs.call(max_tokens=1000)
            await anext(aiter(lost))
            await rig.decode[0].until("token", 12)
        finally:
            await other.stop()
            await theirs.channel.close()
        assert (await asking).is_exactly(40)
        await until_open(rig, 1)
        await rig.until_idle()
