"""A fault-free request's path through the pools."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import common_pb2, decode_pb2, generation_pb2, instance_pb2
from router.picking.placement import STEP_STRETCH
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.servicer import Servicer
from tests.fakes.tokens import expected_ids
from tests.router.conftest import Run
from tests.router.rig import PROMPT, SEED, SHORT, request_of, slow


async def test_a_split_request_arrives_whole_and_in_order(run: Run) -> None:
    async with run() as rig:
        answer = await rig.generate(max_tokens=40)
        assert answer.is_exactly(40)
        assert answer.finish().reason == common_pb2.FINISH_REASON_LENGTH
        await rig.until_idle()


async def test_the_first_message_carries_seed_prompt_tokens_and_model(run: Run) -> None:
    async with run() as rig:
        first, *rest = (await rig.generate(request_id="mine")).responses
        assert (first.seed, first.prompt_tokens, first.model, first.request_id) == (SEED, len(PROMPT), "fake", "mine")
        assert not any(response.HasField("seed") or response.model for response in rest)


async def test_a_request_without_a_seed_gets_one_that_reproduces_it(run: Run) -> None:
    async with run() as rig:
        request = request_of()
        request.sampling.ClearField("seed")
        answer = await rig.generate(request)
        seed = answer.responses[0].seed
        assert answer.is_exactly(12, seed=seed)
        assert (await rig.generate(request)).responses[0].seed != seed


async def test_usage_covers_both_instances(run: Run) -> None:
    async with run() as rig:
        usage = (await rig.generate(max_tokens=5)).finish().usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(PROMPT), 5, 16)


async def test_decode_has_reserved_before_prefill_computes(run: Run) -> None:
    async with run() as rig:
        await rig.generate()
        assert rig.decode[0].recorded("reserved")[0].at_s < rig.prefill[0].recorded("prefill")[0].at_s


async def test_a_split_request_is_the_last_hand_over_that_is_known(run: Run) -> None:
    async with run() as rig:
        [decode] = rig.app.pools.decode.instances
        before_s = time.monotonic()
        await rig.generate()
        assert before_s <= decode.throughput._hand_over_s <= time.monotonic()


async def test_a_split_prompt_is_computed_at_one_instance_alone(run: Run) -> None:
    """Also for those who decide after it, before the next load report."""
    async with run(prefill=[FakeInstance("prefill", behaviour=Behaviour(prefill_s=60.0))]) as rig:
        asked = asyncio.create_task(rig.generate())
        await rig.prefill[0].until("prefill")
        [prefill], [decode] = rig.app.pools.prefill.instances, rig.app.pools.decode.instances
        counted = [(one.calls._sent.values(), one) for one in (prefill, decode)]
        sent = [[(each.num_tokens, each.num_to_prefill) for each in values] for values, _ in counted]
        assert sent == [[(len(PROMPT), len(PROMPT))], [(len(PROMPT), 0)]]
        asked.cancel()


async def test_the_first_token_does_not_wait_for_the_transfer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    may_load, load = asyncio.Event(), Servicer._load

    async def held_back(servicer: Servicer, source: decode_pb2.TransferSource) -> bool:
        await may_load.wait()
        return await load(servicer, source)

    monkeypatch.setattr(Servicer, "_load", held_back)
    decode = FakeInstance("decode")
    async with run(decode=[decode]) as rig:
        call = rig.call()
        first = await anext(aiter(call))
        assert not decode.recorded("loaded")
        assert list(first.tokens.token_ids) == expected_ids(PROMPT, SEED, 1)
        assert not first.tokens.HasField("finish")  # hand-over is no client's business
        may_load.set()
        async for _ in call:
            pass
        assert decode.recorded("loaded")


async def test_both_calls_name_one_transfer_and_it_is_released(run: Run) -> None:
    async with run() as rig:
        await rig.generate()
        prefill, decode = rig.prefill[0], rig.decode[0]
        start = decode.recorded("decode")[0].detail
        assert start.transfer.transfer_id == prefill.recorded("prefill")[0].transfer_id
        assert (start.transfer.address, start.transfer.instance_epoch) == (prefill.address, prefill.epoch)
        assert decode.recorded("seed")[0].detail == expected_ids(PROMPT, SEED, 1)
        await rig.until_idle()
        assert not prefill.recorded("released by router")


async def test_blocks_that_are_recomputed_for_one_cause_are_one_warning(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour, late = Behaviour(), "NOT_FOUND: no transfer '{}' within 30 s"
    async with run(decode=[FakeInstance("decode", behaviour=behaviour)], disaggregation={"mode": "always"}) as rig:
        for reason in (late, "only 3 of 17 pages came in time", late, "only 12 of 40 pages came in time"):
            behaviour.recomputes = reason
            await rig.generate()
        transfer_id = rig.decode[0].recorded("decode")[0].transfer_id
    logged = [record.getMessage() for record in caplog.records if "recomputed" in record.getMessage()]
    assert logged == [
        f"1 blocks recomputed: {reason}" for reason in (late.format(transfer_id), "only 3 of 17 pages came in time")
    ]


async def test_a_prefill_call_that_does_not_end_delays_nothing(run: Run) -> None:
    async with run(prefill=[FakeInstance("prefill", behaviour=Behaviour(linger_s=60.0))]) as rig:
        assert (await rig.generate()).is_exactly(12)
        await rig.until_idle()
        [ended] = rig.prefill[0].recorded("prefill cancelled")
        assert rig.decode[0].recorded("loaded")[0].at_s < ended.at_s, "the KV was given up before it was read"
        assert not rig.prefill[0].recorded("released by router")


async def test_a_request_that_ends_with_its_first_token_never_decodes(run: Run) -> None:
    async with run(prefill=[FakeInstance("prefill", behaviour=Behaviour(stop_at=0))]) as rig:
        answer = await rig.generate()
        assert answer.ids() == expected_ids(PROMPT, SEED, 1)
        assert answer.finish().reason == common_pb2.FINISH_REASON_STOP
        await rig.until_idle()
        assert rig.decode[0].recorded("decode cancelled")
        assert not rig.decode[0].recorded("token")


async def test_a_request_of_one_token_needs_no_decode_instance(run: Run) -> None:
    async with run() as rig:
        answer = await rig.generate(max_tokens=1)
        assert answer.is_exactly(1)
        assert answer.finish().reason == common_pb2.FINISH_REASON_LENGTH
        assert (answer.trailers["tandem-decode"], answer.trailers["tandem-disaggregated"]) == ("prefill-0", "no")
        await rig.until_idle()
        assert not rig.decode[0].recorded("decode")


async def test_a_short_prompt_stays_with_the_decode_instance(run: Run) -> None:
    async with run() as rig:
        answer = await rig.generate(request_of(SHORT))
        assert answer.is_exactly(12, prompt=SHORT)
        assert not rig.prefill[0].recorded("prefill")
        assert answer.trailers["tandem-disaggregated"] == "no"


async def test_a_whole_answer_names_the_instances_that_made_it(run: Run) -> None:
    async with run() as rig:
        trailers = (await rig.generate()).trailers
        assert trailers["tandem-disaggregated"] == "yes"
        assert (trailers["tandem-prefill"], trailers["tandem-decode"]) == ("prefill-0", "decode-0")
        assert "100 tokens" in trailers["tandem-reason"]


async def test_without_prefill_instances_decode_serves_alone(run: Run) -> None:
    async with run(prefill=0) as rig:
        assert (await rig.generate()).is_exactly(12)


@pytest.mark.parametrize(("mode", "num_prefills"), [("never", 0), ("always", 1)])
async def test_the_mode_overrides_the_length(run: Run, mode: str, num_prefills: int) -> None:
    async with run(disaggregation={"mode": mode}) as rig:
        assert (await rig.generate(request_of(SHORT))).is_exactly(12, prompt=SHORT)
        assert len(rig.prefill[0].recorded("prefill")) == num_prefills


async def test_always_is_unavailable_without_a_prefill_instance(run: Run) -> None:
    async with run(prefill=0, disaggregation={"mode": "always"}) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no prefill instance" in str(raised.value.details())


async def test_three_choices_share_one_stream_and_wait_for_the_first(run: Run) -> None:
    async with run(prefill=2, decode=2) as rig:
        for fake in rig.prefill:
            fake.behaviour.prefill_s = 0.1
        answer = await rig.generate(n=3, max_tokens=8)
        for choice in range(3):
            assert answer.is_exactly(8, choice=choice)
            assert answer.finish(choice).usage.completion_tokens == 8
        # The others went where the first one's prompt is cached, once it was.
        used = [fake for fake in rig.prefill if fake.recorded("prefill")]
        assert len(used) == 1
        first_token = used[0].recorded("token")[0].at_s
        assert [record.at_s > first_token for record in used[0].recorded("prefill")] == [False, True, True]
        await rig.until_idle()


async def test_a_text_and_a_chat_are_tokenised_once(run: Run) -> None:
    async with run() as rig:
        await rig.generate(
            generation_pb2.GenerateRequest(text="héllo", sampling=common_pb2.SamplingParams(max_tokens=2))
        )
        prompt = list(rig.decode[0].recorded("decode")[0].detail.request.prompt_token_ids)
        assert len(prompt) == len("héllo".encode())
        chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi <eos>")])
        await rig.generate(generation_pb2.GenerateRequest(chat=chat, sampling=common_pb2.SamplingParams(max_tokens=2)))
        prompt = list(rig.decode[0].recorded("decode")[1].detail.request.prompt_token_ids)
        assert prompt.count(2) == 1  # the template's own; the user's is text
        assert prompt.count(3) == 2


async def test_an_instance_gets_every_default_resolved(run: Run) -> None:
    async with run() as rig:
        request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=SHORT), cache_salt="s", priority=3)
        call = rig.call(request)
        await anext(aiter(call))
        call.cancel()
        wanted = rig.decode[0].recorded("decode")[0].detail.request
        assert wanted.sampling.max_tokens == 4096 - len(SHORT)
        assert (wanted.sampling.temperature, wanted.sampling.top_p) == (1.0, 1.0)
        assert wanted.sampling.HasField("seed")
        assert (wanted.cache_salt, wanted.priority, wanted.stream_epoch) == ("s", 3, 1)
        await rig.until_idle()


async def test_fifty_requests_with_one_label_get_fifty_right_answers(run: Run) -> None:
    # Clients, router and instances share one loop here, which fifty requests keep busy: no instance must count as dead.
    async with run(prefill=2, decode=2, pools={"beat_timeout_s": 5.0}) as rig:
        prompts = [[20 + i, *PROMPT] for i in range(50)]
        answers = await asyncio.gather(*(rig.generate(request_of(p, request_id="same")) for p in prompts))
        assert all(answer.is_exactly(12, prompt=p) for answer, p in zip(answers, prompts, strict=True))
        await rig.until_idle()


async def test_model_info_reports_the_limits_of_the_instances(run: Run) -> None:
    async with run() as rig:
        info = await rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
        assert (info.model, info.max_model_len, info.vocab_size) == ("fake", 4096, 300)
        assert (list(info.eos_token_ids), info.supports_chat, info.identity.fingerprint) == ([2], True, "f0")
        assert info.sampling_defaults.temperature == 1.0
        assert not info.sampling_defaults.HasField("max_tokens")


async def test_the_deadline_is_honoured_and_passed_on(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.05))]) as rig:
        started_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(max_tokens=100, timeout=0.4)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started_s > 0.3
        await rig.until_idle()
        assert rig.decode[0].recorded("decode cancelled")
        assert len(rig.decode[0].recorded("token")) < 99


async def test_the_servers_longest_deadline_holds_without_one(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.05))], server={"max_deadline_s": 0.4}) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(max_tokens=100, timeout=None)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.until_idle()


async def test_with_objectives_a_prefill_instance_serves_a_request_alone(run: Run) -> None:
    cost = instance_pb2.StepCost(base_s=0.0035, per_stream_s=0.0006, per_token_s=1 / 4500)
    prefill = FakeInstance("prefill", behaviour=Behaviour(step_cost=cost))
    decode = FakeInstance("decode", behaviour=Behaviour(step_cost=cost, num_running=30))
    async with run(prefill=[prefill], decode=[decode], slo={"ttft_ms": 1000, "itl_ms": 20}) as rig:
        answer = await rig.generate(max_tokens=40)
        assert answer.is_exactly(40)
        assert answer.trailers["tandem-disaggregated"] == "no"
        assert "alone at" in answer.trailers["tandem-reason"]
        (record,) = prefill.recorded("decode")
        assert not record.detail.HasField("transfer")
        assert prefill.recorded("batch"), "tokens come in the router's shared stream, as from a decode instance"
        assert 0 < record.detail.request.ttft_s <= 1
        assert record.detail.request.itl_s == 0.02
        assert record.detail.request.step_stretch == 0
        assert not decode.recorded("decode")
        await rig.until_idle()


@pytest.mark.parametrize("num_prompt_tokens", [20, 400])
async def test_without_objectives_a_request_says_how_far_prompts_may_lengthen_steps(
    run: Run, num_prompt_tokens: int
) -> None:
    """So that long prompts interrupt no stream for long, wherever they are computed."""
    cost = instance_pb2.StepCost(base_s=0.0035, per_stream_s=0.0006, per_token_s=1 / 4500)
    prefill = FakeInstance("prefill", behaviour=Behaviour(step_cost=cost))
    decode = FakeInstance("decode", behaviour=Behaviour(step_cost=cost, num_running=9))
    async with run(prefill=[prefill], decode=[decode], disaggregation={"speed_smoothing": 0.2}) as rig:
        request = request_of([7] * num_prompt_tokens, max_tokens=12)
        answer = await rig.generate(request)
        assert answer.is_exactly(12, prompt=[7] * num_prompt_tokens)
        records = (*prefill.recorded("prefill"), *prefill.recorded("decode"), *decode.recorded("decode"))
        sent = [one.detail.request for one in records]
        assert sent
        for one in sent:
            assert one.step_stretch == STEP_STRETCH
            assert (one.ttft_s, one.itl_s) == (0, 0)
        await rig.until_idle()
