"""Every process is replaced under load, and nobody outside notices: no request fails, no token differs."""

from __future__ import annotations

import itertools
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import Client, TandemError
from tandem.completion import Completion
from tandem.health import READY, ROUTER_SERVICE, health
from tandem.stack_settings import StackSettings
from tests.e2e.asking import Asked
from tests.faults.checker import assert_same_answer, wait_idle
from tests.faults.reference import Answer, Reference
from tests.faults.rig import Rig
from tests.faults.two_routers import HANG_S, TwoRouters
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
"""Four engines and two routers on a machine that may be busy with other things."""
ACCEPT_S, GRACE_S, MOVE_S = 0.1, 40.0, 39.8
"""Streams that still run 0.2 s after an instance has begun to refuse are to go on elsewhere."""
LONG, SHORT = 300, 10
"""Tokens of an answer: over a second, so that drains find it running, and next to nothing."""
LEASE_S = 2.0
KV_AWAITED_S = 1.0
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 77},
    {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3},
]


@pytest.fixture(
    scope="module", params=["nixl", pytest.param("shared_storage", marks=pytest.mark.slow)], ids=lambda name: name
)
def stack(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[TwoRouters]:
    """Two routers, two prefill and two decode instances, every request handed over."""
    drain = ("--server-drain-accept-s", str(ACCEPT_S), "--server-drain-grace-s", str(GRACE_S))
    settings = StackSettings(
        model=checkpoint,
        model_name="lively",
        num_prefill=2,
        num_decode=2,
        connector=request.param,
        disaggregation="always",
        dtype="float32",
        num_blocks=512,
        lease_s=LEASE_S,
        start_timeout_s=60.0,
        instance_args=("--max-num-batched-tokens", "64", "--server-drain-move-s", str(MOVE_S), *drain),
        router_args=drain,
    )
    rig = Rig(settings, failpoints={"decode-0": ("kv.load",), "decode-1": ("kv.load",)})
    rig.start()
    try:
        with TwoRouters(rig) as stack:
            yield stack
    finally:
        rig.stop()


Question = tuple[list[int], dict[str, Any], Answer]


class Load:
    """Clients that ask one request after the other until told to stop. Every answer is kept with what it should be.

    While `is_heavy` is clear they ask for little and pause in between: processes that start want the cores.
    """

    def __init__(self, stack: TwoRouters, questions: list[Question]) -> None:
        self.answered: list[tuple[Completion, Answer]] = []
        self.failed: list[BaseException] = []
        self.is_heavy = threading.Event()
        self.is_heavy.set()
        self._stack = stack
        self._long = [question for question in questions if question[1]["max_tokens"] == LONG]
        self._short = [question for question in questions if question[1]["max_tokens"] == SHORT]
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, num_clients: int) -> None:
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()
        self.wait_for_more(num_clients)

    def wait_for_more(self, count: int) -> None:
        """Returns when `count` more requests have been answered."""
        wanted, deadline_s = len(self.answered) + count, time.monotonic() + HANG_S
        while len(self.answered) < wanted and not self.failed:
            assert time.monotonic() < deadline_s, "the load does not move"
            time.sleep(0.02)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        client = Client([router.spec.address for router in self._stack.routers], timeout_s=HANG_S)
        try:
            while not self._stop.is_set():
                questions = self._long if self.is_heavy.wait(1.0) else self._short
                number = next(self._numbers)
                prompt, sampling, answer = questions[number % len(questions)]
                try:
                    # A salt of its own: what others have computed of the same prompt is of no help.
                    completion = client.generate(prompt, cache_salt=f"{number}", **sampling)
                except Exception as error:
                    self.failed.append(error)
                else:
                    self.answered.append((completion, answer))
        finally:
            client.close()


def questions_of(reference: Reference, count: int) -> list[Question]:
    """Prompts of one to ten blocks, half of them with long answers, and what must come out."""
    source = random.Random(11)
    questions = []
    for number in range(count):
        prompt = [source.randrange(0, 360) for _ in range(source.randrange(20, 160))]
        sampling = {**SAMPLINGS[number % len(SAMPLINGS)], "max_tokens": (LONG, SHORT)[number % 2], "ignore_eos": True}
        questions.append((prompt, sampling, reference.answer(prompt, **sampling)))
    return questions


def restart_in_turns(stack: TwoRouters, load: Load, question: Question, turns: list[list[str]]) -> None:
    prompt, sampling, answer = question
    for names in turns:
        routers = [stack.members[name].spec.address for name in names if name.startswith("router")]
        asked = [Asked(address, prompt, cache_salt=address, **sampling) for address in routers]
        for one in asked:
            one.wait_first_token(HANG_S)
        took_s = stack.drain(names)
        assert max(took_s.values()) < ACCEPT_S + GRACE_S, took_s
        load.answered += [(one.completion(), answer) for one in asked]
        load.is_heavy.clear()
        stack.start_again(names)
        load.is_heavy.set()
        load.wait_for_more(4)


def assert_nothing_was_lost(load: Load) -> None:
    assert not load.failed, load.failed
    for completion, answer in load.answered:
        assert_same_answer(completion, answer)


def assert_drained_under_load(stack: TwoRouters) -> None:
    """Everybody drained once; the routers, and of the decode instances at least one, had streams when they refused."""
    num_calls: dict[str, int] = {}
    for name in stack.members:
        [refusing] = [phase for phase in stack.phases(name) if phase.startswith("refusing")]
        matched = re.match(r"refusing, (\d+) calls", refusing)
        assert matched is not None, refusing
        num_calls[name] = int(matched[1])
    assert num_calls["router"] > 0, num_calls
    assert num_calls["router-1"] > 0, num_calls
    assert num_calls["decode-0"] + num_calls["decode-1"] > 0, num_calls
    assert "goes on elsewhere" in stack.log_of_routers(), "no stream was moved"


ONE_OF_EACH_AT_A_TIME = [["router", "prefill-0", "decode-0"], ["router-1", "prefill-1", "decode-1"]]
ONE_BY_ONE = [["prefill-0"], ["decode-0"], ["router"], ["decode-1"], ["router-1"], ["prefill-1"]]


def test_a_rolling_restart_of_everything_loses_nothing(stack: TwoRouters, reference: Reference) -> None:
    questions = questions_of(reference, 6)
    load = Load(stack, questions)
    load.start(num_clients=5)
    try:
        restart_in_turns(stack, load, questions[0], ONE_OF_EACH_AT_A_TIME)
    finally:
        load.stop()
    assert_nothing_was_lost(load)
    assert_drained_under_load(stack)
    wait_idle(stack.rig, LEASE_S + 2)


def test_a_prefill_instance_stays_until_its_kv_is_fetched(stack: TwoRouters, reference: Reference) -> None:
    prompt = [random.Random(3).randrange(0, 360) for _ in range(150)]
    sampling = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    rig = stack.rig
    with rig.armed("decode-0", "kv.load") as first, rig.armed("decode-1", "kv.load") as second:
        asked = Asked(stack.routers[0].spec.address, prompt, **sampling)
        while not (first.reached or second.reached):
            time.sleep(0.01)
        asked.wait_first_token(HANG_S)
        # STEP the instance that holds the KV is told to end, and waits for the reader
        prefill = [name for name in rig.stack.instances if name.startswith("prefill")]
        wait_until(lambda: any(rig.load(name).num_transfers for name in prefill), "nobody holds the KV", HANG_S)
        [holder] = [name for name in prefill if rig.load(name).num_transfers]
        stack.members[holder].send(signal.SIGTERM)
        num_phases, deadline_s = len(stack.phases(holder)), time.monotonic() + 60
        while not any(phase.startswith("refusing") for phase in stack.phases(holder)[num_phases - 1 :]):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        time.sleep(KV_AWAITED_S)
        assert stack.members[holder].running
    # STEP the reader goes on, finds everything, and lets it go
    completion = asked.completion()
    assert_same_answer(completion, reference.answer(prompt, **sampling))
    assert (completion.usage.external_tokens, completion.usage.recomputed_tokens) == (len(prompt), 0)
    deadline_s = time.monotonic() + GRACE_S
    while stack.members[holder].running:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert stack.members[holder].exit_status == 0
    wait_idle(rig, LEASE_S + 2)
    rig.stack.restart(holder)


@pytest.mark.slow
def test_one_process_after_the_other_under_a_heavy_load(stack: TwoRouters, reference: Reference) -> None:
    stack.rig.stack.wait_ready()
    questions = questions_of(reference, 24)
    load = Load(stack, questions)
    load.start(num_clients=16)
    try:
        restart_in_turns(stack, load, questions[0], ONE_BY_ONE)
    finally:
        load.stop()
    assert len(load.answered) > 100
    assert_nothing_was_lost(load)
    wait_idle(stack.rig, LEASE_S + 2)


@pytest.mark.slow
def test_with_every_instance_told_to_end_at_once_what_runs_finishes(stack: TwoRouters, reference: Reference) -> None:
    stack.rig.stack.wait_ready()
    address, instances = stack.routers[0].spec.address, list(stack.rig.stack.instances)
    questions = [question for question in questions_of(reference, 8) if question[1]["max_tokens"] == LONG]
    asked = [Asked(address, prompt, cache_salt="all", **sampling) for prompt, sampling, _ in questions]
    for one in asked:
        one.wait_first_token(HANG_S)
    told_s = time.monotonic()
    for name in instances:
        stack.members[name].send(signal.SIGTERM)
    # STEP the router says so, and answers new requests at once with a hint
    while health(address, ROUTER_SERVICE) == READY:
        assert time.monotonic() - told_s < HANG_S
        time.sleep(0.01)
    with Client(address) as client, pytest.raises(TandemError) as refused:
        client.generate([1, 2, 3], max_tokens=3)
    assert refused.value.status == "UNAVAILABLE"
    assert refused.value.retry_after_s is not None
    # STEP what runs would move if there were somebody; there is nobody, so it ends where it is
    for one, (_, _, answer) in zip(asked, questions, strict=True):
        assert_same_answer(one.completion(), answer)
    for name in instances:
        member = stack.members[name]
        while member.running:
            assert time.monotonic() - told_s < HANG_S
            time.sleep(0.02)
        assert member.exit_status == 0, "\n  ".join([f"{name} {member.end()}", *member.last_lines(30)])
    # STEP their successors serve
    stack.start_again(instances)
    prompt, sampling, answer = questions[0]
    assert_same_answer(Asked(address, prompt, **sampling).completion(), answer)
    wait_idle(stack.rig, LEASE_S + 2)
