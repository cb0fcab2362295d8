"""A client whose router has died sends what it has: another router generates the rest, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import generation_pb2
from router.admission.capacity import Charge
from router.admission.controller import AdmissionController
from router.admission.settings import AdmissionSettings
from router.request.generation_request import GenerationRequest, ResumedChoice
from router.request.request_log import RequestLog
from router.request.validation import ServedModel
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_fakes_tokenizer, write_model_folder
from tests.fakes.tokens import expected_ids, text_of
from tests.router.conftest import Run
from tests.router.rig import PROMPT, SEED, SHORT, Answer, request_of, running, slow

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """As everywhere, but that the router's tokenizer writes the text that the fakes write."""
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    write_fakes_tokenizer(folder)
    return partial(running, ServedModel.from_folder(folder, "fake"), folder)


def resumed(*ids: Sequence[int] | None, finished: Sequence[int] = (), fingerprint: str = "") -> generation_pb2.Resume:
    """`ids` of each choice; None: it has not begun."""
    choices = [
        generation_pb2.ResumedChoice(
            choice=index, token_ids=of, finished=index in finished, fingerprint=fingerprint if of else ""
        )
        for index, of in enumerate(ids)
        if of is not None
    ]
    return generation_pb2.Resume(choices=choices)


def rest_of(answer: Answer, num_before: int, num_tokens: int = NUM_TOKENS, choice: int = 0) -> bool:
    """Whether the answer's choice is exactly what follows its first `num_before` tokens."""
    ids = expected_ids(PROMPT, SEED, num_tokens, choice)
    num_chars = len(text_of(ids[:num_before]))
    for chunk in answer.chunks(choice):
        assert (chunk.token_index, chunk.text_offset) == (num_before, num_chars)
        assert list(chunk.token_ids) == ids[num_before : num_before + len(chunk.token_ids)]
        num_before += len(chunk.token_ids)
        num_chars += len(chunk.text)
    assert (num_before, num_chars) == (num_tokens, len(text_of(ids)))
    return True


@pytest.mark.parametrize("num_before", [1, 5, 11])
async def test_the_answer_goes_on_behind_what_the_client_has(run: Run, num_before: int) -> None:
    async with run() as rig:
        before = expected_ids(PROMPT, SEED, num_before)
        answer = await rig.generate(request_of(resume=resumed(before)))
        assert rest_of(answer, num_before)
        first = answer.responses[0]
        assert (first.seed, first.prompt_tokens, first.model) == (SEED, len(PROMPT), "fake")
        assert answer.finish().usage.completion_tokens == NUM_TOKENS
        call = "prefill" if num_before + 1 < NUM_TOKENS else "decode"  # the last token comes from it, too
        sent = rig.prefill[0].recorded(call)[0].detail.request
        assert list(sent.emitted_token_ids) == before
        assert rig.app.service.metrics.num_output_tokens == NUM_TOKENS - num_before, "its own alone"
        await rig.until_idle()


async def test_choices_go_on_each_where_it_was_and_one_that_has_finished_not_at_all(run: Run) -> None:
    async with run(prefill=2, decode=2) as rig:
        ids = [expected_ids(PROMPT, SEED, NUM_TOKENS, choice) for choice in range(3)]
        answer = await rig.generate(request_of(n=4, resume=resumed(ids[0], ids[1][:4], ids[2][:1], finished=[0])))
        assert not answer.chunks(0)
        assert rest_of(answer, 4, choice=1)
        assert rest_of(answer, 1, choice=2)
        assert answer.is_exactly(NUM_TOKENS, choice=3)
        await rig.until_idle()


async def test_the_live_page_shows_what_this_router_generates(run: Run) -> None:
    async with run() as rig:
        log = rig.app.service.metrics.log = RequestLog()
        ids = [expected_ids(PROMPT, SEED, NUM_TOKENS, choice) for choice in range(2)]
        await rig.generate(request_of(n=2, resume=resumed(ids[0], ids[1][:8], finished=[0])))
        [shown] = log.ended
        assert (shown.num_choices, shown.num_tokens) == (1, NUM_TOKENS - 8)


async def test_the_gaps_between_tokens_are_those_of_the_choices_that_go_on(run: Run) -> None:
    warm = {"prefill": {"warm_up_s": 0.0}, "decode": {"warm_up_s": 0.0}}
    async with run(autoscaler=warm) as rig:
        ids = [expected_ids(PROMPT, SEED, NUM_TOKENS, choice) for choice in range(4)]
        await rig.generate(request_of(n=4, resume=resumed(*ids[:3], ids[3][:4], finished=[0, 1, 2])))
        [gaps] = rig.app.service.metrics.recent.samples("decode")
        assert gaps.weight == NUM_TOKENS - 4 - 1


async def test_a_finished_choice_may_come_without_its_ids(run: Run) -> None:
    async with run() as rig:
        answer = await rig.generate(request_of(n=2, resume=resumed([], None, finished=[0])))
        assert not answer.chunks(0)
        assert answer.is_exactly(NUM_TOKENS, choice=1)


async def test_an_instance_that_dies_under_it_costs_no_token(run: Run) -> None:
    decode = [FakeInstance("decode", f"decode-{index}", behaviour=slow(0.03)) for index in range(2)]
    async with run(decode=decode) as rig:
        generating = asyncio.create_task(
            rig.generate(request_of(max_tokens=30, resume=resumed(expected_ids(PROMPT, SEED, 7))))
        )
        victim = None
        while victim is None:
            await asyncio.sleep(0.005)
            victim = next((fake for fake in decode if len(fake.recorded("token")) >= 3), None)
        await victim.kill()
        assert rest_of(await generating, 7, num_tokens=30)


async def test_the_first_message_of_each_choice_says_what_computes_it(run: Run) -> None:
    async with run() as rig:
        answer = await rig.generate(n=2)
        named = [(response.tokens.token_index == 0, response.fingerprint) for response in answer.responses]
        assert set(named) == {(True, "f0"), (False, "")}


async def test_only_instances_that_compute_the_same_go_on(run: Run) -> None:
    fakes = [FakeInstance("decode", "decode-0"), FakeInstance("decode", "decode-1", identity={"fingerprint": "f1"})]
    async with run(prefill=0, decode=fakes) as rig:
        for _ in range(3):
            ids = expected_ids(PROMPT, SEED, 3)
            assert rest_of(await rig.generate(request_of(resume=resumed(ids, fingerprint="f1"))), 3)
        assert len(fakes[1].recorded("decode")) == 3
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(request_of(resume=resumed(ids, fingerprint="f2")))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE, "an instance that does may come"
        assert "no instance computes what the answer began with" in str(raised.value.details())
        await rig.until_idle()


async def test_a_choice_that_has_not_begun_has_the_weights_of_one_that_has_come(run: Run) -> None:
    others = [FakeInstance("decode", f"decode-{number}") for number in range(3)]
    fakes = [*others, FakeInstance("decode", "decode-3", identity={"fingerprint": "f1"})]
    before = expected_ids(PROMPT, SEED, 3)
    async with run(prefill=0, decode=fakes) as rig:
        for finished in ([0], []):
            resume = resumed(before, None, finished=finished, fingerprint="f1")
            answer = await rig.generate(request_of(n=2, resume=resume))
            assert answer.is_exactly(NUM_TOKENS, choice=1)
        assert not [fake for fake in others if fake.recorded("decode")]
        await rig.until_idle()


async def test_a_finished_choice_needs_no_instance_that_computes_the_same(run: Run) -> None:
    async with run(prefill=0) as rig:
        before = expected_ids(PROMPT, SEED, 3)
        answer = await rig.generate(request_of(n=2, resume=resumed(before, None, finished=[0], fingerprint="gone")))
        assert not answer.chunks(0)
        assert answer.is_exactly(NUM_TOKENS, choice=1)
        await rig.until_idle()


BEFORE = [expected_ids(PROMPT, SEED, 3, choice) for choice in range(2)]


@pytest.mark.parametrize(
    "resume",
    [resumed(BEFORE[0]), resumed(None, BEFORE[1]), resumed(BEFORE[0], finished=[0]), resumed([], finished=[0])],
    ids=["its tokens", "another choice's", "a finished choice's", "a finished choice"],
)
async def test_it_waits_for_an_instance_as_a_stream_that_has_begun_does(
    run: Run, resume: generation_pb2.Resume
) -> None:
    async with run(prefill=0, failover={"resume_wait_s": 20.0}) as rig:
        [decode] = rig.decode
        await decode.kill()
        while rig.app.pools.decode.num_ready():
            await asyncio.sleep(0.01)
        request = request_of(n=2, resume=resume)
        generating = asyncio.create_task(rig.generate(request))
        await asyncio.sleep(0.2)
        assert not generating.done()
        await decode.restart()
        answer = await generating
        known = {choice.choice: choice for choice in resume.choices}
        for index in range(2):
            if index not in known:
                assert answer.is_exactly(NUM_TOKENS, choice=index)
            elif not known[index].finished:
                assert rest_of(answer, 3, choice=index)


def two_contexts(short: int) -> list[FakeInstance]:
    """Decode instances with a context of `short` tokens and with one of 4096."""
    return [FakeInstance("decode", "short", max_model_len=short), FakeInstance("decode", "long")]


@pytest.mark.parametrize(("context", "num_before"), [(128, 5), (128, 40), (64, 5)])
async def test_what_was_accepted_goes_on_where_another_context_is_too_short(
    run: Run, context: int, num_before: int
) -> None:
    """For its max_tokens, for the ids that have come, or for the prompt: the short one has joined meanwhile."""
    async with run(prefill=0, decode=two_contexts(context)) as rig:
        before = expected_ids(PROMPT, SEED, num_before)
        answer = await rig.generate(request_of(max_tokens=50, resume=resumed(before)))
        assert rest_of(answer, num_before, num_tokens=50)
        assert not rig.decode[0].recorded("decode")


async def test_it_waits_for_an_instance_with_a_context_of_its_length(run: Run) -> None:
    short, long = two_contexts(128)
    long.behaviour.draining = True
    async with run(prefill=0, decode=[short, long], wait=False, failover={"resume_wait_s": 20.0}) as rig:
        await rig.until_ready(num_decode=1)
        while len(rig.app.pools.decode.views()) < 2:
            await asyncio.sleep(0.01)
        resume = resumed(expected_ids(PROMPT, SEED, 5))
        generating = asyncio.create_task(rig.generate(request_of(max_tokens=50, resume=resume)))
        while not rig.app.admission.in_use.num_requests:
            assert not generating.done()
            await asyncio.sleep(0.01)
        long.behaviour.draining = False
        assert rest_of(await generating, 5, num_tokens=50)


@pytest.mark.parametrize(("num_before", "num_tokens"), [(5, 28), (27, 28), (28, 60), (40, 60)])
async def test_without_max_tokens_an_answer_ends_at_the_shortest_context_that_it_can_have_begun_with(
    run: Run, num_before: int, num_tokens: int
) -> None:
    short, long = two_contexts(len(PROMPT) + 28)
    leaving = FakeInstance("decode", "leaving", max_model_len=8192)
    leaving.behaviour.draining, long.behaviour.stop_at = True, 59
    async with run(prefill=0, decode=[short, long, leaving], wait=False) as rig:
        await rig.until_ready(num_decode=2)
        while len(rig.app.pools.decode.views()) < 3:
            await asyncio.sleep(0.01)
        request = request_of(resume=resumed(expected_ids(PROMPT, SEED, num_before)))
        request.sampling.ClearField("max_tokens")
        assert rest_of(await rig.generate(request), num_before, num_tokens)


IDS = expected_ids(SHORT, SEED, NUM_TOKENS)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an id out of range": ({"resume": resumed([300])}, "resume.choices[0].token_ids[0]=300 out of range 0..299"),
    "more than max_tokens": ({"resume": resumed(IDS)}, "has 12 ids, of at most 12 that the choice can have"),
    "more than max_tokens, whatever they are": ({"resume": resumed([300] * 20)}, "has 20 ids, of at most 12"),
    "a choice that is not requested": ({"resume": resumed(None, [20])}, "resume.choices[0].choice is 1"),
    "nothing left": ({"resume": resumed(IDS, finished=[0])}, "every choice has finished"),
    "twice": (
        {"n": 2, "resume": generation_pb2.Resume(choices=[generation_pb2.ResumedChoice(token_ids=[20])] * 2)},
        "resume.choices[1].choice is 0",
    ),
    "a long fingerprint": ({"resume": resumed([20], fingerprint="f" * 129)}, "fingerprint has 129 characters"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_no_router_can_have_sent_is_rejected(run: Run, name: str) -> None:
    fields, says = WRONG[name]
    async with run(prefill=0) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(request_of(SHORT, **fields))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says in str(raised.value.details()).replace(":", "")
        assert not rig.decode[0].recorded("decode")


async def test_an_answer_of_an_adapter_goes_on_with_it(run: Run) -> None:
    """At the same router, and at another one."""
    dying, other = FakeInstance("decode", "dying"), FakeInstance("decode", "other")
    for fake in (dying, other):
        fake.behaviour.lora_adapters = ["poet"]
    dying.behaviour.die_at, other.behaviour.num_running = 3, 9
    async with run(prefill=0, decode=[FakeInstance("decode", "plain"), dying, other]) as rig:
        answer = await rig.generate(request_of(lora="poet"))
        assert answer.is_exactly(NUM_TOKENS)
        assert rest_of(await rig.generate(request_of(lora="poet", resume=resumed(expected_ids(PROMPT, SEED, 5)))), 5)
        asked = [record.detail.request for record in other.recorded("decode")]
        assert [(one.lora, len(one.emitted_token_ids)) for one in asked] == [("poet", 3), ("poet", 5)]
        assert not rig.decode[0].recorded("decode")


@pytest.mark.parametrize("named", [{"lora": "poet"}, {"model": "poet"}])
async def test_a_router_that_does_not_know_the_adapter_of_an_answer_yet_asks_to_come_again(
    run: Run, named: dict[str, Any]
) -> None:
    async with run(prefill=0) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(request_of(SHORT, resume=resumed([20]), **named))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "'poet' is not served" in str(raised.value.details())


async def test_a_resumed_answer_needs_its_seed(run: Run) -> None:
    async with run(prefill=0) as rig:
        request = request_of(SHORT, resume=resumed([20]))
        request.sampling.ClearField("seed")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(request)
        assert "sampling.seed" in str(raised.value.details())


async def test_ids_with_a_stop_string_have_ended(run: Run) -> None:
    async with run(prefill=0) as rig:
        request = request_of(SHORT, resume=resumed([20, 22]))
        request.sampling.stop.append("é22")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(request)
        assert "contain a stop string" in str(raised.value.details())


async def test_admission_counts_the_prompt_with_what_is_computed_again() -> None:
    params = SamplingParams(max_tokens=50, n=3)
    before = {0: ResumedChoice((1,) * 40, is_finished=True), 1: ResumedChoice((1,) * 20, "text")}
    request = GenerationRequest("label", "id", "model", (1,) * 100, params, resumed=before)
    assert Charge.of(request, 30, 16) == Charge(2, 2 * 130, 2 * 9, 120)
    assert Charge.of(request, 10, 16).num_output_tokens == 0, "it has got further than expected"


@pytest.mark.parametrize(("lengths", "left"), [([40], 10), ([40, 15], 35), ([40, None], 50), ([40, None, 0], 50)])
async def test_admission_expects_no_negative_time(lengths: list[int | None], left: int) -> None:
    """`lengths` of choices; None: it has not begun."""
    before = {index: ResumedChoice((1,) * number) for index, number in enumerate(lengths) if number is not None}
    params = SamplingParams(max_tokens=50, n=len(lengths))
    request = GenerationRequest("label", "id", "model", (1,) * 100, params, resumed=before)
    async with AdmissionController(AdmissionSettings()).admit(request) as ticket:
        most = sum(50 - (number or 0) for number in lengths)
        ticket.num_emitted = lambda: most
        assert ticket.max_tokens == left
        assert (ticket.remaining_s(ticket.started_s + 1) or 0.0) >= 0
        ticket.num_emitted = lambda: 0
