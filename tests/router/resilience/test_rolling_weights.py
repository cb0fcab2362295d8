"""New weights are rolled out under load, instance by instance, behind two routers: no request fails, none is mixed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2_grpc
from router.app import RouterApp
from router.pools.instance_info import InstanceKey, Role
from router.request.validation import ServedModel
from router.resilience.safeguards import Guard
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids
from tests.router.conftest import Run
from tests.router.failing import decodes, prefills
from tests.router.rig import PROMPT, SEED, TIMEOUT_S, request_of, settings_of, slow
from tests.waiting import until

NUM_TOKENS = 12
NUM_CLIENTS = 8
CANARY = "7e57ab1e"
"""Digest of its weights."""
OF_BOTH = [expected_ids(PROMPT, SEED + weights, NUM_TOKENS) for weights in (0, 1)]


async def client(app: RouterApp, answers: list[list[int]], over: asyncio.Event) -> None:
    async with grpc.aio.insecure_channel(app.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while not over.is_set():
            call = stub.Generate(request_of(max_tokens=NUM_TOKENS), timeout=TIMEOUT_S)
            answers.append([token_id async for response in call for token_id in response.tokens.token_ids])


async def roll(fake: FakeInstance, apps: list[RouterApp]) -> None:
    """Drains one instance to its end and puts one with the new weights in its place."""
    fake.behaviour.draining = fake.behaviour.moving_out = True
    pools = [app.pools.by_role[fake.role] for app in apps]
    states = [next(one for one in pool.instances if one.address == fake.address) for pool in pools]
    await until(lambda: all(state.state == "draining" and state.calls.is_empty for state in states))
    await until(lambda: not fake.num_open_calls)
    await fake.kill()  # before it could report that it drains no more
    fake.behaviour.draining = fake.behaviour.moving_out = False
    fake.behaviour.weights = 1
    await fake.replace(weights_digest="new")
    await until(lambda: all(state.state == "ready" for state in states))


@pytest.mark.parametrize("mode", ["always", "auto"])
async def test_a_rolling_change_of_weights_fails_and_mixes_no_request(
    run: Run, model: ServedModel, model_folder: Path, mode: str
) -> None:
    prefill, decode = prefills(slow(0.002), slow(0.002)), decodes(slow(0.002), slow(0.002))
    async with run(prefill=prefill, decode=decode, disaggregation={"mode": mode}) as rig:
        settings = settings_of(model_folder, prefill, decode, disaggregation={"mode": mode})
        apps = [rig.app, RouterApp(settings, model, rng=random.Random(1))]
        await apps[1].start()
        try:
            await until(apps[1].pools.all_ready)
            answers: list[list[int]] = []
            over = asyncio.Event()
            async with asyncio.TaskGroup() as clients:
                for i in range(NUM_CLIENTS):
                    clients.create_task(client(apps[i % 2], answers, over))
                for fake in (prefill[0], decode[0], prefill[1], decode[1]):
                    before = len(answers)
                    await roll(fake, apps)
                    await until(lambda before=before: len(answers) > before + NUM_CLIENTS)  # type: ignore[misc]
                over.set()
        finally:
            await apps[1].stop()
    assert [one for one in answers if one not in OF_BOTH] == []
    assert {tuple(one) for one in answers} == {tuple(one) for one in OF_BOTH}


@pytest.mark.parametrize("mode", ["always", "auto"])
async def test_a_first_token_that_is_due_does_not_keep_a_request_with_weights_that_leave(run: Run, mode: str) -> None:
    """The last decode instance with the old weights leaves while the prompt waits at an old prefill instance."""
    permits = asyncio.Semaphore(0)
    prefill = [*prefills(slow(0.0, permits=permits)), renewed("prefill", "prefill-new")]
    decode = [*decodes(slow(0.0)), renewed("decode", "decode-new")]
    for fake in (prefill[1], decode[1]):
        fake.behaviour.num_running = 50
    async with run(prefill=prefill, decode=decode, disaggregation={"mode": mode}) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=NUM_TOKENS))
        await prefill[0].until("prefill")
        decode[0].behaviour.draining = decode[0].behaviour.moving_out = True
        await decode[0].until("decode cancelled")
        permits.release()
        assert (await asking).ids() == OF_BOTH[1]
        assert not decode[0].recorded("token")


async def test_an_answer_that_outlasts_the_grace_of_the_last_old_instance_is_cut_off_and_not_mixed(run: Run) -> None:
    """The grace is the time that an answer has, as docs/kubernetes/update.md says."""
    old, new = *decodes(slow(0.01)), renewed("decode", "decode-new")
    new.behaviour.num_running = 50
    async with run(prefill=0, decode=[old, new], disaggregation={"mode": "never"}) as rig:
        call = rig.call(max_tokens=3900)
        answer = aiter(call)
        await anext(answer)
        old.behaviour.draining = old.behaviour.moving_out = True
        [state] = [one for one in rig.app.pools.decode.instances if one.address == old.address]
        await until(lambda: state.state == "draining")
        await anext(answer)  # no other instance has its weights, so it runs on
        await old.kill()
        with pytest.raises(grpc.aio.AioRpcError) as cut_off:
            async for _ in answer:
                pass
        assert cut_off.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not new.recorded("token")


async def test_a_stream_that_waits_for_probation_does_not_go_to_what_replaces_its_instance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, may_go_on, wait_probation = asyncio.Event(), asyncio.Event(), Guard.wait_probation

    async def wait_longer(guard: Guard, key: InstanceKey) -> None:
        await wait_probation(guard, key)
        if guard.choice.num_emitted:
            waiting.set()
            await may_go_on.wait()

    monkeypatch.setattr(Guard, "wait_probation", wait_longer)
    decode = decodes(slow(0.0, die_at=5), slow(0.0, num_running=9), slow(0.0, num_running=50))
    async with run(prefill=0, decode=decode) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=NUM_TOKENS))
        await waiting.wait()
        [picked] = [one for one in rig.app.pools.decode.instances if not one.calls.is_empty]
        assert picked.address == decode[1].address
        decode[1].behaviour.weights = 1
        await decode[1].replace(weights_digest="new")
        await until(lambda: picked.key == InstanceKey(decode[1].address, decode[1].epoch) and picked.state == "ready")
        may_go_on.set()
        assert (await asking).ids() == OF_BOTH[0]
        assert not decode[1].recorded("decode")


def renewed(role: Role, name: str, weights: str = "new") -> FakeInstance:
    """With the new weights from its start."""
    return FakeInstance(role, name, behaviour=slow(0.0, weights=1), identity={"weights_digest": weights})


async def test_one_new_pair_takes_its_part_of_the_requests_and_mixes_none(run: Run) -> None:
    """As where a rollout is paused after its first new pods (docs/kubernetes/update.md)."""
    decode = [*decodes(slow(0.0), slow(0.0), slow(0.0)), renewed("decode", "decode-new")]
    prefill = [*prefills(slow(0.0)), renewed("prefill", "prefill-new")]
    async with run(prefill=prefill, decode=decode, disaggregation={"mode": "always"}) as rig:
        answers = [(await rig.generate(max_tokens=NUM_TOKENS)).ids() for _ in range(80)]
    assert [one for one in answers if one not in OF_BOTH] == []
    assert 5 <= sum(one == OF_BOTH[1] for one in answers) <= 40


async def test_a_canary_gets_its_share_of_the_sessions_under_load_and_mixes_none(run: Run) -> None:
    """Half of the instances are new; a fifth of the sessions is theirs, with every choice and every later request."""
    decode = [
        *decodes(slow(0.002), slow(0.002)),
        renewed("decode", "new-0", CANARY),
        renewed("decode", "new-1", CANARY),
    ]
    prefill = [*prefills(slow(0.0)), renewed("prefill", "prefill-new", CANARY)]
    picking = {"weights_shares": f"{CANARY[:6]}=0.2"}

    async def weights_of(session: str) -> set[int]:
        found = []
        for _ in range(2):
            answer = await rig.generate(max_tokens=NUM_TOKENS, n=2, session=session)
            of_choices = [[expected_ids(PROMPT, SEED + new, NUM_TOKENS, one) for one in (0, 1)] for new in (0, 1)]
            found.append(of_choices.index([answer.ids(0), answer.ids(1)]))  # ValueError: a mixed answer
        return set(found)

    async with run(prefill=prefill, decode=decode, disaggregation={"mode": "always"}, picking=picking) as rig:
        served = await asyncio.gather(*(weights_of(f"session-{number}") for number in range(40)))
        attempts = rig.app.service.metrics.attempts
    assert set(map(len, served)) == {1}
    num_new = sum(one == {1} for one in served)
    assert 2 <= num_new <= 14
    assert attempts[CANARY] == 4 * num_new == sum(attempts.values()) - 4 * (40 - num_new)


@pytest.mark.parametrize("picking", [{}, {"weights_shares": f"{CANARY}=1"}])
async def test_choices_have_the_weights_of_the_first_though_others_come_meanwhile(
    run: Run, picking: dict[str, str]
) -> None:
    permits = asyncio.Semaphore(0)
    decode = [*decodes(slow(0.0, permits=permits), slow(0.0)), renewed("decode", "new", CANARY)]
    async with run(prefill=0, decode=decode, disaggregation={"mode": "never"}, picking=picking) as rig:
        states = {one.address: one for one in rig.app.pools.decode.instances}
        first, *later = [states[fake.address] for fake in decode]
        for fake in decode[1:]:
            fake.behaviour.draining = True
        await until(lambda: [one.state for one in later] == ["draining", "draining"])
        asking = asyncio.create_task(rig.generate(max_tokens=NUM_TOKENS, n=3))
        await decode[0].until("decode")
        for fake in decode:
            fake.behaviour.draining = not fake.behaviour.draining
        await until(lambda: [one.state for one in (first, *later)] == ["draining", "ready", "ready"])
        for _ in range(3 * NUM_TOKENS):
            permits.release()
        answer = await asking
    assert [answer.ids(one) for one in range(3)] == [expected_ids(PROMPT, SEED, NUM_TOKENS, one) for one in range(3)]
    assert not decode[2].recorded("decode")


async def test_a_canary_that_fails_costs_no_request(run: Run) -> None:
    broken = FakeInstance(
        "decode", "new", behaviour=slow(0.0, fail_at=0, weights=1), identity={"weights_digest": CANARY}
    )
    picking = {"weights_shares": f"{CANARY}=1"}
    async with run(prefill=0, decode=[*decodes(slow(0.0)), broken], picking=picking) as rig:
        answers = [(await rig.generate(max_tokens=NUM_TOKENS)).ids() for _ in range(5)]
    assert answers == [OF_BOTH[0]] * 5
    assert broken.records
