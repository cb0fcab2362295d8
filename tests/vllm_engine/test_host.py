"""The host of vLLM's requests, beside names in the place of vLLM's. What vLLM itself does is tested in tests/vllm."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core.messages import (
    CoreMessage,
    EngineLoad,
    EngineRequest,
    Outputs,
    RemoteKV,
    TokensEvent,
    TransferEvent,
)
from engine.errors import CapacityError, EngineDeadError, InvalidRequest
from engine.sampling.constraints import Constraint
from engine.sampling.params import SamplingParams
from tests.instance.scripted_core import INFO
from tests.waiting import until


@pytest.fixture
def module(names_of_vllm: None) -> Any:
    return importlib.import_module("vllm_engine.host")


class _Vllm:
    """Computes nothing. Its two workers compile what is released."""

    def __init__(self, grammars: Any) -> None:
        self.received: list[str] = []
        self.release = threading.Event()
        self.lacks: str | None = None
        """The regex for which there is no memory."""
        self.compiled = list[str]()
        """By the last worker."""
        self.workers = [grammars.WorkerGrammars(Path(), 100) for _ in range(2)]
        for number, worker in enumerate(self.workers):
            worker._compiler._library = SimpleNamespace(compile=partial(self._compile, number), compilers=dict)
        self.num_threads = self.workers[0]._compiler._threads._max_workers

    def _compile(self, number: int, constraint: Constraint) -> Any:
        if constraint.source == self.lacks:
            raise CapacityError("no memory")
        assert self.release.wait(60)
        if constraint.source == "none":
            raise InvalidRequest("regex", "is none")
        if number:
            self.compiled.append(constraint.source)
        return SimpleNamespace(num_bytes=1)

    async def collective_rpc(self, method: str, args: tuple[bytes]) -> list[Any]:
        assert method == "tandem_compile"
        return [worker.compile(*args) for worker in self.workers]

    async def generate(self, _: object, request: EngineRequest, request_id: str, **more: Any) -> AsyncIterator[Any]:
        assert request.params.constraint is not None
        assert all(worker.grammar(request.params.constraint).done() for worker in self.workers)
        self.received.append(request_id)
        for output in ():
            yield output


class _Rig:
    """A host beside `_Vllm`."""

    def __init__(self, module: Any, grammar_s: float) -> None:
        self.vllm = _Vllm(sys.modules["vllm_engine.grammars"])
        self.sent: list[Outputs] = []
        self.events: list[TokensEvent] = []
        link = SimpleNamespace(load=None, send=lambda _: None)
        meter = SimpleNamespace(idle=lambda: None, load=lambda *_: EngineLoad())
        failed, socket = SimpleNamespace(forget=lambda _: None), SimpleNamespace(send=self._receive)
        self.host = module.Host(self.vllm, socket, meter, failed, link=link, info=INFO, grammar_s=grammar_s)

    def _receive(self, encoded: bytes) -> None:
        message = msgspec.msgpack.decode(encoded, type=CoreMessage)
        assert isinstance(message, Outputs)
        self.sent.append(message)
        self.events += [event for event in message.events if isinstance(event, TokensEvent)]

    def add(self, **regexes: str) -> None:
        for request_id, regex in regexes.items():
            params = SamplingParams(max_tokens=4, regex=regex)
            self.host._add(EngineRequest(request_id=request_id, prompt_token_ids=[1], params=params))

    async def queue(self, **regexes: str) -> None:
        """Returns when the workers have the constraints, of which they compile none yet."""
        self.add(**regexes)
        await until(lambda: all(self.is_asked_for(regex) for regex in regexes.values()))

    def is_asked_for(self, regex: str) -> bool:
        return any(Constraint("regex", regex) in worker._compiler._cache for worker in self.vllm.workers)


@pytest.fixture
def make_rig(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module, "vllm_input", lambda request: request)
    monkeypatch.setattr(module, "vllm_params", lambda request: request)
    rigs: list[_Rig] = []

    def make(grammar_s: float = 60.0) -> _Rig:
        rigs.append(_Rig(module, grammar_s))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.vllm.release.set()
        for worker in rig.vllm.workers:
            worker._compiler.shutdown()


async def test_an_abort_cancels_no_other_request_s_constraint(make_rig: Any) -> None:
    rig = make_rig()
    host, vllm = rig.host, rig.vllm
    await rig.queue(**{f"busy{number}": f"a{number}" for number in range(vllm.num_threads)})
    await rig.queue(left="[a-z]+", stays="[a-z]+")
    host._cancel("left")
    await until(lambda: "left" not in host._running)
    vllm.release.set()
    await until(lambda: "stays" in vllm.received or "stays" not in host._running)
    assert "stays" in vllm.received
    rig.add(next="[0-9]+")
    await until(lambda: "next" in vllm.received or host._dead.done())
    assert not host._dead.done()
    assert "left" not in vllm.received


async def test_constraints_that_no_request_waits_for_are_not_compiled(make_rig: Any) -> None:
    rig = make_rig()
    busy = {f"busy{number}": f"a{number}" for number in range(rig.vllm.num_threads)}
    await rig.queue(**busy)
    await rig.queue(left="[a-z]+")
    rig.host._cancel("left")
    await until(lambda: not rig.is_asked_for("[a-z]+"))
    rig.vllm.release.set()
    await until(lambda: set(rig.vllm.received) == busy.keys())
    assert sorted(rig.vllm.compiled) == sorted(busy.values())


async def test_a_constraint_without_a_grammar_ends_its_request(make_rig: Any) -> None:
    rig = make_rig()
    rig.vllm.release.set()
    rig.add(fails="none", stays="[a-z]+")
    await until(lambda: rig.events and "stays" in rig.vllm.received)
    [event] = rig.events
    assert (event.request_id, event.error_kind, event.error) == ("fails", "invalid_constraint", "regex: is none")
    assert "fails" not in rig.vllm.received


async def test_failures_of_requests_that_have_ended_are_not_kept(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM computes a request that has failed once more, before it knows that it has ended."""
    rig, failures = make_rig(), sys.modules["vllm_engine.failures"]
    failed, log = failures.FailedRequests(tmp_path), failures.FailureLog(tmp_path)

    async def generate(_: object, request: EngineRequest, request_id: str, **more: Any) -> AsyncIterator[object]:
        log.add(request_id, is_finite=True)
        yield "a token"

    monkeypatch.setattr(rig.host, "_failed", failed)
    monkeypatch.setattr(rig.vllm, "generate", generate)
    for number in range(3):
        rig.host._add(EngineRequest(request_id=f"r{number}", prompt_token_ids=[1], params=SamplingParams()))
        await until(lambda: not rig.host._running)
        log.add(f"r{number}", is_finite=True)
    await until(lambda: len(rig.events) == 3)
    assert {event.error_kind for event in rig.events} == {"nothing_allowed"}
    assert not failed._failures


async def test_what_a_worker_lacks_for_a_moment_ends_one_request(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another constraint is compiled, and the workers are asked again and again."""
    monkeypatch.setattr("engine.sampling.grammar.useful_threads", lambda: 3)
    rig = make_rig()
    assert rig.vllm.num_threads == 2
    rig.vllm.lacks = "[a-z]+"
    await rig.queue(busy="a0")
    rig.add(fails="[a-z]+")
    await until(lambda: rig.events)
    [event] = rig.events
    assert (event.request_id, event.error_kind, event.error) == ("fails", "no_room", "no memory")
    rig.vllm.lacks = None
    rig.vllm.release.set()

    def has_ended(request_id: str) -> bool:
        return request_id in {*rig.vllm.received, *(event.request_id for event in rig.events)}

    for number in range(3):  # each of the two workers may have a failure that it has not yet reported
        rig.add(**{f"next{number}": "[a-z]+"})
        await until(partial(has_ended, f"next{number}"))
    assert "next2" in rig.vllm.received


async def test_what_was_lacking_for_a_request_that_has_ended_is_tried_again(make_rig: Any) -> None:
    """The answer comes after an abort: no request has seen it."""
    rig, lacking = make_rig(), Constraint("regex", "[a-z]+")
    rig.host._grammars._states[lacking] = ("no memory", "no_room")
    rig.vllm.release.set()
    rig.add(next="[a-z]+")
    await until(lambda: "next" in rig.vllm.received or rig.events)
    assert (rig.vllm.received, rig.events) == (["next"], [])


async def test_a_request_whose_grammar_takes_too_long_ends(make_rig: Any) -> None:
    rig = make_rig(grammar_s=0.001)
    rig.add(late="[a-z]+")
    await until(lambda: rig.events)
    [event] = rig.events
    assert (event.error_kind, event.error) == ("no_room", "the constraint was not compiled in time")
    assert rig.vllm.received == []


async def test_the_wait_for_a_grammar_takes_nothing_from_that_for_room(make_rig: Any) -> None:
    rig, now = make_rig(grammar_s=60.0), asyncio.get_running_loop().time()
    for request_id, regex in (("free", None), ("constrained", "[a-z]+")):
        params = SamplingParams(max_tokens=4, regex=regex)
        remote = RemoteKV(transfer_id=request_id, reservation_s=30.0)
        rig.host._add(EngineRequest(request_id=request_id, prompt_token_ids=[1], params=params, remote_kv=remote))
    free, constrained = (running.load.expires.when() - now for running in rig.host._running.values())
    assert 30 <= free < 90 <= constrained
    for running in rig.host._running.values():
        running.load.expires.cancel()


class _BusyVllm:
    """Has begun what is in `begun` and computes no token. It answers a question when a step ends."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.begun: list[str] = []
        self.asked: list[str] = []
        self.steps = asyncio.Queue[None]()
        self.aborted: list[str] = []

    async def collective_rpc(self, method: str) -> list[list[str]]:
        self.asked.append(method)
        await self.steps.get()
        return [list(self.begun) for _ in range(2)]

    async def generate(self, _: object, request: EngineRequest, request_id: str, **more: Any) -> AsyncIterator[Any]:
        self.received.append(request_id)
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.aborted.append(request_id)


async def test_the_wait_for_room_begins_when_the_grammar_is_there(make_rig: Any) -> None:
    rig, vllm = make_rig(grammar_s=600.0), _BusyVllm()
    rig.vllm.generate = vllm.generate
    params, remote = SamplingParams(max_tokens=4, regex="[a-z]+"), RemoteKV(transfer_id="t", reservation_s=30.0)
    rig.host._add(EngineRequest(request_id="r", prompt_token_ids=[1], params=params, remote_kv=remote))
    load = rig.host._running["r"].load
    whole, now = load.expires, asyncio.get_running_loop().time
    released = now()
    rig.vllm.release.set()
    await until(lambda: vllm.received)
    assert released + 30 <= load.expires.when() <= now() + 30
    assert whole.cancelled()
    rig.host._cancel("r")
    await until(lambda: "r" not in rig.host._running)
    assert load.expires.cancelled()


async def test_what_no_step_has_begun_in_time_ends_for_lack_of_room(make_rig: Any) -> None:
    rig = make_rig()
    vllm = rig.host._engine = rig.host._begin_limits._engine = _BusyVllm()
    vllm.begun = ["begun"]
    limits: dict[str, dict[str, Any]] = {
        "begun": {"begin_s": 0.001},
        "late": {"begin_s": 0.001},
        "unlimited": {},
        "in time": {"begin_s": 600.0},
        "resumed": {"begin_s": 0.001, "output_token_ids": [5]},
        "with a token": {"begin_s": 0.001},
    }
    for request_id, limit in limits.items():
        rig.host._add(EngineRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(), **limit))
    rig.host._begin_limits.remove("with a token")
    await until(lambda: len(vllm.received) == len(limits) and vllm.asked)
    assert rig.events == [], "vLLM has not answered yet: the step may have begun them"
    for _ in range(2):  # one question, or two where they are late one by one
        vllm.steps.put_nowait(None)
    await until(lambda: rig.events and "late" not in rig.host._running)
    [event] = rig.events
    assert (event.request_id, event.error_kind) == ("late", "no_room")
    assert event.error == "no step began the prompt within 0.001 s"
    assert vllm.aborted == ["late"]
    assert set(vllm.asked) == {"tandem_begun"}
    assert rig.host._running.keys() == limits.keys() - {"late"}


async def test_running_requests_without_a_token_are_prompts(module: Any) -> None:
    """vLLM runs three of the five: the two that have a token, and one prompt."""
    meter = module.LoadMeter()
    meter.num_blocks = 100
    meter.record(SimpleNamespace(num_running_reqs=3, kv_cache_usage=0.5), None)
    link, unused = SimpleNamespace(load=importlib.import_module("vllm_engine.kv_messages").KVLoad()), SimpleNamespace()
    host = module.Host(unused, unused, meter, unused, link=link, info=INFO, grammar_s=60.0)
    for number in range(5):
        request = EngineRequest(request_id=f"{number}", prompt_token_ids=[1], params=SamplingParams())
        host._running[request.request_id] = module._Running(request, has_token=number < 2)
    load = meter.load(host._count_requests(), link.load)
    assert (load.num_waiting, load.num_running, load.num_prefilling) == (2, 3, 1)
    host._running["2"].has_token = True  # vLLM's own numbers are older
    assert meter.load(host._count_requests(), link.load).num_prefilling == 0


async def test_steps_are_counted(module: Any) -> None:
    meter = module.LoadMeter()
    meter.num_blocks = 100
    for computed, generated in ((30, 1), (0, 2)):
        prompts = SimpleNamespace(computed=computed)
        step = SimpleNamespace(prompt_token_stats=prompts, num_generation_tokens=generated, num_preempted_reqs=1)
        meter.record(None, step)
    kv = importlib.import_module("vllm_engine.kv_messages").KVLoad()
    load = meter.load(importlib.import_module("vllm_engine.load").RequestCounts(), kv)
    assert (load.num_steps, load.num_step_tokens, sum(load.steps_by_tokens)) == (2, 33, 2)
    assert (load.num_prefilled_tokens, load.num_generated_tokens, load.num_preemptions) == (30, 3, 2)


async def test_events_of_an_earlier_request_are_not_sent_as_those_of_the_next(make_rig: Any) -> None:
    rig = make_rig()
    rig.add(a="a")
    rig.host._emit(TokensEvent("a", [1]))  # is sent at the end of this turn of the loop
    rig.add(a="b")
    rig.host._emit(TokensEvent("a", [2]))
    await until(lambda: len(rig.events) == 2)
    assert [(message.num_added, event.token_ids) for message in rig.sent for event in message.events] == [
        (1, [1]),
        (2, [2]),
    ]


async def test_a_step_without_outputs_is_a_step(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a request whose prompt takes sixty steps makes one of their sum, and a hung vLLM is noticed late."""
    load = importlib.import_module("vllm_engine.load")
    kv = importlib.import_module("vllm_engine.kv_messages").KVLoad()
    now_s = 0.0
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: now_s))
    meter = load.LoadMeter()
    meter.num_blocks = 100
    outputs = SimpleNamespace(
        prompt_token_stats=SimpleNamespace(computed=0), num_generation_tokens=1, num_preempted_reqs=0
    )
    for step in (outputs, *60 * [None], outputs):
        now_s += 0.05
        meter.record(None, step)
    assert meter.load(load.RequestCounts(), kv).step_s == pytest.approx(0.05)
    meter.idle()
    for _ in range(2):  # a hand-over is still read, and the next request comes an hour later
        now_s += 1800.0
        meter.record(None, None)
    meter.record(None, outputs)
    assert meter.load(load.RequestCounts(), kv).step_s < 0.06


async def test_reports_while_vllm_computes_are_not_answered(module: Any) -> None:
    sent: list[Any] = []
    moved, steps, reports = TransferEvent("t1", 1), asyncio.Queue[None](), asyncio.Queue[Any]()
    socket = SimpleNamespace(
        send=lambda data: sent.append(msgspec.msgpack.decode(data, type=CoreMessage)), recv=asyncio.Event().wait
    )
    link = SimpleNamespace(load=None, send=lambda _: None, receive=reports.get)
    meter = SimpleNamespace(idle=lambda: None, load=lambda *_: EngineLoad())
    vllm = SimpleNamespace(is_paused=steps.get)
    host = module.Host(vllm, socket, meter, SimpleNamespace(), link=link, info=INFO, grammar_s=60.0)
    serving = asyncio.create_task(host.serve())
    try:
        reports.put_nowait(SimpleNamespace(events=[moved], given_up=[]))
        await until(lambda: Outputs([moved], EngineLoad(), answered=False) in sent)
        assert not any(report.answered for report in sent)
        steps.put_nowait(None)  # a step has ended
        await until(lambda: Outputs([], EngineLoad()) in sent)
    finally:
        serving.cancel()


async def test_an_end_of_vllm_while_it_starts_is_an_engine_error(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where workers load adapters: an unexpected error has a traceback, and waits for vLLM's threads."""
    ended: list[float] = []

    class _Ended:
        def shutdown(self, timeout: float) -> None:
            ended.append(timeout)

    async def asked(*_: object) -> None:
        raise module.EngineDeadError("EngineCore encountered an issue")

    monkeypatch.setattr(module, "set_environment", lambda *_: None)
    monkeypatch.setattr(module, "start", lambda *_: _Ended())
    monkeypatch.setattr(module, "engine_info", asked)
    with pytest.raises(EngineDeadError, match="vLLM has ended: EngineCore encountered an issue"):
        await module.serve(EngineConfig(model=""), f"ipc://{tmp_path}/core")
    assert ended
