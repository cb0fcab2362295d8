"""Routers are killed under load: the client continues every answer at another router, or at the same one after its
restart, and it is the fault-free run's."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Generator, Sequence

import grpc
import pytest

from engine import LLM
from protos.tandem.v1 import generation_pb2, generation_pb2_grpc
from serving.lifecycle import EXIT_CUT_OFF, EXIT_STOPPED
from tandem import Client, Completion, Piece
from tandem.client import resumption
from tandem.client.request import generate_request
from tandem.local_stack.process import ManagedProcess, stop_all
from tests.grpc_calls import blocking_stub
from tests.system.checker import wait_idle
from tests.system.questions import Question, make_questions
from tests.system.stacks import Stack, on_stack
from tests.system.two_routers import HANG_S, TwoRouters
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(600), on_stack("killable shared_storage")]
NUM_TOKENS = 60
FREED_WITHIN_S = 15.0
"""A lease, on a busy machine."""


@pytest.fixture
def questions(llm: LLM) -> list[Question]:
    return make_questions(llm, 27, random.Random("routers"), num_tokens=NUM_TOKENS)


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router may take long to start."""
    monkeypatch.setattr(resumption, "RESUME_WAIT_S", HANG_S)


class Load:
    """Clients that ask one question after the other. A context manager, which waits for the running answers."""

    def __init__(self, addresses: Sequence[str], questions: Sequence[Question], num_clients: int) -> None:
        self.answered: list[tuple[Question, Completion]] = []
        self.failed: list[BaseException] = []
        self.running: set[int] = set()
        """Numbers of the questions whose answers have begun."""
        self._addresses, self._questions = addresses, questions
        self._numbers = itertools.count()
        self._finishing = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finishing.set()
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "answers do not end"

    def wait_running(self, count: int) -> None:
        """Returns when `count` answers have begun and have not ended."""
        wait_until(lambda: len(self.running) >= count or bool(self.failed), f"{count} answers do not run", HANG_S)

    def assert_exact(self) -> None:
        assert not self.failed, self.failed
        for question, completion in self.answered:
            question.assert_answered(completion)

    def _ask(self) -> None:
        # Routers die every second or two: some answers meet more deaths than a client resumes by itself.
        with Client(self._addresses, timeout_s=HANG_S, max_resumptions=100) as client:
            while not self._finishing.is_set() and not self.failed:
                number = next(self._numbers)
                question = self._questions[number % len(self._questions)]
                salt = f"round {number // len(self._questions)}"  # no cache knows the answer from before
                stream = client.stream(list(question.prompt), cache_salt=salt, **question.sampling)
                try:
                    self.answered.append((question, self._read(stream, number)))
                except Exception as error:
                    self.failed.append(error)
                finally:
                    self.running.discard(number)

    def _read(self, stream: Generator[Piece, None, Completion], number: int) -> Completion:
        while True:
            try:
                next(stream)
            except StopIteration as end:
                completion: Completion = end.value
                return completion
            self.running.add(number)


def end(router: ManagedProcess, grace_s: float) -> None:
    """Without a grace by SIGKILL; with one by SIGTERM twice, upon which it cuts its streams off."""
    if grace_s:
        stop_all([router], grace_s)
        assert router.exit_status in (EXIT_STOPPED, EXIT_CUT_OFF)  # by chance it had no stream
    router.kill()


def num_resumed(log: str) -> int:
    """Requests with a beginning of another router, by routers' logs."""
    return sum(int(number) > 0 for number in re.findall(r"num_resumed_tokens\W+(\d+)", log))


@pytest.mark.parametrize("num_wanted", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_of_two_routers_either_is_killed_and_every_answer_is_exact(
    killable: Stack, questions: list[Question], num_wanted: int
) -> None:
    ends = itertools.cycle([("router", 0.0), ("router-1", HANG_S), ("router", 0.0), ("router-1", 0.0)])
    with TwoRouters(killable.rig) as routers:
        addresses = [router.spec.address for router in routers.routers]
        before = num_resumed(routers.log_of_routers())
        with Load(addresses, questions, num_clients=12) as load:
            while (resumed := num_resumed(routers.log_of_routers()) - before) < num_wanted and not load.failed:
                load.wait_running(8)
                name, grace_s = next(ends)
                end(routers.processes[name], grace_s)
                routers.start_again([name])
        load.assert_exact()
        print(f"{len(load.answered)} answers, {resumed} resumed")
        wait_idle(killable.rig, FREED_WITHIN_S)


def test_a_router_that_is_alone_goes_on_after_its_restart(killable: Stack, questions: list[Question]) -> None:
    rig = killable.rig
    router = rig.stack.processes["router"]
    before = num_resumed(router.spec.log_file.read_text())
    with killable.stopped_at("decoding") as stop, Load([rig.address], questions, num_clients=6) as load:
        stop.wait()
        load.wait_running(5)  # each will stop at its decode instance: none can end
        router.kill()
        stop.release()
        rig.stack.restart("router")
        load.wait_running(1)
    load.assert_exact()
    assert num_resumed(router.spec.log_file.read_text()) > before
    wait_idle(rig, FREED_WITHIN_S)


def test_a_beginning_that_the_constraint_excludes_is_the_clients_error(killable: Stack) -> None:
    """No router can have sent it: no instance fails at it, and the next request is served."""
    rig = killable.rig
    request = generate_request([5, 6, 7], {"regex": "[ab]{3}", "seed": 1, "max_tokens": 20})
    request.resume.choices.add(token_ids=[350, 351])
    with grpc.insecure_channel(rig.address) as channel:
        stub = blocking_stub(generation_pb2_grpc.GenerationServiceStub, channel)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(request, timeout=HANG_S))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        request.resume.CopyFrom(generation_pb2.Resume())
        assert list(stub.Generate(request, timeout=HANG_S))[-1].tokens.HasField("finish")
    wait_idle(rig, FREED_WITHIN_S)
