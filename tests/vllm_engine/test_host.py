"""The host of vLLM's requests, beside names in the place of vLLM's. What vLLM itself does is tested in tests/vllm."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.core.messages import CoreMessage, EngineLoad, EngineRequest, Outputs, TransferEvent
from engine.sampling.constraints import Constraint
from engine.sampling.grammar import GrammarCompiler
from engine.sampling.params import SamplingParams
from tests.instance.scripted_core import INFO
from tests.waiting import until


class _Names(ModuleType):
    """Every name is an empty class; an error's is an exception."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        base: type = Exception if name.endswith("Error") else object
        found = type(name, (base,), {"__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture
def module() -> Iterator[Any]:
    """vllm_engine.host without vLLM."""
    before, finder = dict(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("vllm_engine.host")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_engine")]:
            del sys.modules[name]
        sys.modules.update({name: before[name] for name in before if name.startswith("vllm_engine")})


class _Vllm:
    """Computes nothing."""

    def __init__(self) -> None:
        self.received: list[str] = []

    async def generate(self, _: object, __: object, request_id: str, **more: Any) -> AsyncIterator[Any]:
        self.received.append(request_id)
        for output in ():
            yield output


async def test_running_requests_without_a_token_are_prompts(module: Any) -> None:
    """vLLM runs three of the five: the two that have a token, and one prompt."""
    meter = module.LoadMeter()
    meter.num_blocks = 100
    meter.record(SimpleNamespace(num_running_reqs=3, kv_cache_usage=0.5), None)
    link, socket = SimpleNamespace(load=importlib.import_module("vllm_engine.kv_messages").KVLoad()), SimpleNamespace()
    host = module.Host(_Vllm(), socket, meter, SimpleNamespace(), SimpleNamespace(), link=link, info=INFO)
    for number in range(5):
        request = _request(f"{number}", "a")
        host._running[request.request_id] = module._Running(request, has_token=number < 2)
    load = meter.load(host._count_requests(), link.load)
    assert (load.num_waiting, load.num_running, load.num_prefilling) == (2, 3, 1)
    host._running["2"].has_token = True  # vLLM's own numbers are older
    assert meter.load(host._count_requests(), link.load).num_prefilling == 0


def _request(request_id: str, regex: str) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(max_tokens=4, regex=regex))


async def test_an_abort_cancels_no_other_request_s_constraint(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def compile_when_released(constraint: Constraint) -> Any:
        assert release.wait(60)
        return SimpleNamespace(compiled=SimpleNamespace(memory_size_bytes=1))

    monkeypatch.setattr(module, "vllm_input", lambda request: request)
    monkeypatch.setattr(module, "vllm_params", lambda request: request)
    grammars = GrammarCompiler(Path(), 100, wake=lambda: None)
    library = SimpleNamespace(compile=compile_when_released, compilers=dict)
    monkeypatch.setattr(grammars, "_library", library)
    meter = SimpleNamespace(idle=lambda: None, load=lambda *_: EngineLoad())
    vllm, failed = _Vllm(), SimpleNamespace(forget=lambda _: None)
    link, socket = SimpleNamespace(load=None, send=lambda _: None), SimpleNamespace(send=lambda _: None)
    host = module.Host(vllm, socket, meter, failed, grammars, link=link, info=INFO)
    try:
        for number in range(grammars._threads._max_workers):
            host._add(_request(f"busy-{number}", f"a{number}"))
        for request_id in ("left", "stays"):
            host._add(_request(request_id, "[a-z]+"))
        shared = grammars._cache
        await until(lambda: Constraint("regex", "[a-z]+") in shared)
        assert not shared[Constraint("regex", "[a-z]+")].running()  # every thread has another constraint
        host._cancel("left")
        await until(lambda: "left" not in host._running)
        release.set()
        await until(lambda: "stays" in vllm.received or "stays" not in host._running)
        assert "stays" in vllm.received
        host._add(_request("next", "[0-9]+"))
        await until(lambda: "next" in vllm.received or host._dead.done())
        assert not host._dead.done()
        assert "left" not in vllm.received
    finally:
        release.set()
        grammars.shutdown()


async def test_reports_while_vllm_computes_are_not_answered(module: Any) -> None:
    sent: list[Any] = []
    moved, steps, reports = TransferEvent("t1", 1), asyncio.Queue[None](), asyncio.Queue[Any]()
    socket = SimpleNamespace(
        send=lambda data: sent.append(msgspec.msgpack.decode(data, type=CoreMessage)), recv=asyncio.Event().wait
    )
    link = SimpleNamespace(load=None, send=lambda _: None, receive=reports.get)
    meter = SimpleNamespace(idle=lambda: None, load=lambda *_: EngineLoad())
    vllm = SimpleNamespace(is_paused=steps.get)
    host = module.Host(vllm, socket, meter, SimpleNamespace(), None, link=link, info=INFO)
    serving = asyncio.create_task(host.serve())
    try:
        reports.put_nowait(SimpleNamespace(events=[moved], given_up=[]))
        await until(lambda: Outputs([moved], EngineLoad(), answered=False) in sent)
        assert not any(report.answered for report in sent)
        steps.put_nowait(None)  # a step has ended
        await until(lambda: Outputs([], EngineLoad()) in sent)
    finally:
        serving.cancel()
