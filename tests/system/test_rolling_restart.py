"""Every process is replaced under load, without effect for clients: no request fails, no token differs."""

from __future__ import annotations

import itertools
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tandem import Client, TandemError
from tandem.client.channel import ROUTER_SERVICE
from tandem.client.completion import Completion
from tandem.client.health import READY, health
from tests.lively import random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_same_answer, wait_idle
from tests.system.reference import Answer, Reference
from tests.system.stacks import DRAIN_ACCEPT_S, DRAIN_GRACE_S, GREEDY, Stack, on
from tests.system.two_routers import HANG_S, TwoRouters
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(600),  # four engines and two routers on a machine that may be busy
    on("shared_storage", kind="killable", names=("nixl", "shared_storage")),
]
LONG, SHORT = 60, 10
"""Tokens of an answer: two seconds, so that drains find it running, and next to nothing."""
KV_AWAITED_S = 1.0
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 77},
    {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3},
]


@pytest.fixture
def routers(killable: Stack) -> Iterator[TwoRouters]:
    """The stack of two prefill and two decode instances, with two routers."""
    with TwoRouters(killable.rig) as routers:
        yield routers


Question = tuple[list[int], dict[str, Any], Answer]


class Load:
    """Clients that send one request after the other until `stop`. Every answer is kept with the expected one.

    While `is_heavy` is clear they send short requests with pauses in between: processes that start need the cores.
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
        self._threads = [threading.Thread(target=self._send_requests) for _ in range(num_clients)]
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

    def _send_requests(self) -> None:
        client = Client([router.spec.address for router in self._stack.routers], timeout_s=HANG_S)
        try:
            while not self._stop.is_set():
                questions = self._long if self.is_heavy.wait(1.0) else self._short
                number = next(self._numbers)
                prompt, sampling, answer = questions[number % len(questions)]
                try:
                    # A salt of its own: no cache has the KV of an earlier request with the same prompt.
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
        routers = [stack.processes[name].spec.address for name in names if name.startswith("router")]
        requests = [BackgroundRequest(address, prompt, cache_salt=address, **sampling) for address in routers]
        for request in requests:
            request.wait_first_token(HANG_S)
        took_s = stack.drain(names)
        assert max(took_s.values()) < DRAIN_ACCEPT_S + DRAIN_GRACE_S, took_s
        load.answered += [(request.completion(), answer) for request in requests]
        load.is_heavy.clear()
        stack.start_again(names)
        load.is_heavy.set()
        load.wait_for_more(4)


def assert_nothing_was_lost(load: Load) -> None:
    assert not load.failed, load.failed
    for completion, answer in load.answered:
        assert_same_answer(completion, answer)


def assert_drained_under_load(stack: TwoRouters, num_drains: dict[str, int]) -> None:
    """Every member drained once after it had drained `num_drains` times; the routers, and of the decode instances at
    least one, had streams when they began to refuse."""
    num_calls: dict[str, int] = {}
    for name, before in num_drains.items():
        [refusing] = refusals(stack, name)[before:]
        matched = re.match(r"refusing, (\d+) calls", refusing)
        assert matched is not None, refusing
        num_calls[name] = int(matched[1])
    assert num_calls["router"] > 0, num_calls
    assert num_calls["router-1"] > 0, num_calls
    assert num_calls["decode-0"] + num_calls["decode-1"] > 0, num_calls
    assert "goes on elsewhere" in stack.log_of_routers(), "no stream was moved"


def refusals(stack: TwoRouters, name: str) -> list[str]:
    """The moments at which a member began to refuse requests."""
    return [phase for phase in stack.phases(name) if phase.startswith("refusing")]


ONE_OF_EACH_AT_A_TIME = [["router", "prefill-0", "decode-0"], ["router-1", "prefill-1", "decode-1"]]
ONE_BY_ONE = [["prefill-0"], ["decode-0"], ["router"], ["decode-1"], ["router-1"], ["prefill-1"]]


@pytest.mark.slow
def test_a_rolling_restart_of_everything_loses_nothing(routers: TwoRouters, reference: Reference) -> None:
    questions = questions_of(reference, 6)
    num_drains = {name: len(refusals(routers, name)) for name in routers.processes}
    load = Load(routers, questions)
    load.start(num_clients=5)
    try:
        restart_in_turns(routers, load, questions[0], ONE_OF_EACH_AT_A_TIME)
    finally:
        load.stop()
    assert_nothing_was_lost(load)
    assert_drained_under_load(routers, num_drains)
    wait_idle(routers.rig)


def test_a_prefill_instance_stays_until_its_kv_is_fetched(
    killable: Stack, routers: TwoRouters, prompts: random.Random
) -> None:
    prompt = random_prompt(prompts, 150)
    rig = routers.rig
    with killable.stopped_at("loading") as stop:
        request = BackgroundRequest(routers.routers[0].spec.address, prompt, **GREEDY)
        stop.wait()
        request.wait_first_token(HANG_S)
        # STEP the instance that holds the KV gets SIGTERM, and waits for the reader
        prefill = [name for name in rig.stack.instances if name.startswith("prefill")]
        wait_until(lambda: any(rig.load(name).num_transfers for name in prefill), "no instance holds the KV", HANG_S)
        [holder] = [name for name in prefill if rig.load(name).num_transfers]
        num_before = len(refusals(routers, holder))
        routers.processes[holder].send_signal(signal.SIGTERM)
        wait_until(lambda: len(refusals(routers, holder)) > num_before, f"{holder} does not drain")
        time.sleep(KV_AWAITED_S)
        assert routers.processes[holder].running
    # STEP the reader continues, finds everything, and releases it
    completion = request.completion()
    killable.assert_exact(completion, prompt, GREEDY)
    killable.assert_moved(completion)
    wait_until(lambda: not routers.processes[holder].running, f"{holder} does not end", DRAIN_GRACE_S)
    assert routers.processes[holder].exit_status == 0
    wait_idle(rig)


@pytest.mark.slow
def test_one_process_after_the_other_under_a_heavy_load(routers: TwoRouters, reference: Reference) -> None:
    questions = questions_of(reference, 24)
    load = Load(routers, questions)
    load.start(num_clients=16)
    try:
        restart_in_turns(routers, load, questions[0], ONE_BY_ONE)
    finally:
        load.stop()
    assert len(load.answered) > 100
    assert_nothing_was_lost(load)
    wait_idle(routers.rig)


@pytest.mark.slow
def test_with_every_instance_draining_at_once_running_streams_finish(routers: TwoRouters, reference: Reference) -> None:
    address, instances = routers.routers[0].spec.address, list(routers.rig.stack.instances)
    questions = [question for question in questions_of(reference, 8) if question[1]["max_tokens"] == LONG]
    requests = [BackgroundRequest(address, prompt, cache_salt="all", **sampling) for prompt, sampling, _ in questions]
    for request in requests:
        request.wait_first_token(HANG_S)
    for name in instances:
        routers.processes[name].send_signal(signal.SIGTERM)
    # STEP the router reports it, and rejects new requests at once with a hint
    wait_until(lambda: health(address, ROUTER_SERVICE) != READY, "the router stays ready", HANG_S)
    with Client(address) as client, pytest.raises(TandemError) as caught:
        client.generate([1, 2, 3], max_tokens=3)
    assert caught.value.status == "UNAVAILABLE"
    assert caught.value.retry_after_s is not None
    # STEP running streams have no instance to move to, so they end where they are
    for request, (_, _, answer) in zip(requests, questions, strict=True):
        assert_same_answer(request.completion(), answer)
    for name in instances:
        member = routers.processes[name]
        wait_until(lambda: not member.running, f"{name} does not end", HANG_S)  # noqa: B023
        assert member.exit_status == 0, "\n  ".join([f"{name} {member.exit_text()}", *member.last_lines(30)])
    # STEP their successors serve
    routers.start_again(instances)
    prompt, sampling, answer = questions[0]
    assert_same_answer(BackgroundRequest(address, prompt, **sampling).completion(), answer)
    wait_idle(routers.rig)
