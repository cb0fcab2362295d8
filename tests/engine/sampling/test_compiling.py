"""Constraints are compiled beside the steps, once, and only while a request waits for them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.core import core as core_module
from engine.core.core import EngineCore
from engine.core.messages import AbortRequests, AddRequest, EngineRequest, TokensEvent
from engine.errors import CapacityError, EngineError, InvalidRequest
from engine.sampling import grammar
from engine.sampling.constraints import Constraint
from engine.sampling.grammar import Grammar, GrammarCompiler, _Library
from tests.engine.sampling.grammar_cores import END, gathered, grammar_checkpoint
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grammar_checkpoint(tmp_path_factory.mktemp("model"))


class Gate:
    """Compiles nothing until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.future: Future[Any] = Future()
        monkeypatch.setattr(GrammarCompiler, "compiled", lambda *_: self.future)


def test_a_request_waits_for_its_grammar_and_others_do_not(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=64), wake=lambda: None)
    grammar = core._grammars.compiled(Constraint("regex", "ab")).result()
    gate = Gate(monkeypatch)
    waiting = SamplingParams(regex="ab", max_tokens=4)
    for request_id, params in (("waits", waiting), ("aborted", waiting), ("runs", SamplingParams(max_tokens=3))):
        spec = EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], params=params, eos_token_ids=(END,))
        core.handle(AddRequest(spec))
    assert gathered(core, 1).keys() == {"runs"}
    assert core.load.num_waiting == 2
    core.handle(AbortRequests(["aborted"]))
    assert core.load.num_waiting == 1
    gate.future.set_result(grammar)
    assert gathered(core, 1).keys() == {"waits"}
    core.shutdown()


def test_a_request_whose_grammar_takes_too_long_ends(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=64, grammar_s=0.0)
    core = EngineCore(config, wake=lambda: None)
    Gate(monkeypatch)
    core.handle(AddRequest(EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(regex="ab"))))
    [event] = core.step()
    assert isinstance(event, TokensEvent)
    assert (event.error_kind, event.error) == ("no_room", "the constraint was not compiled in time")
    assert core.load.num_waiting == 0
    core.shutdown()


@pytest.mark.parametrize(
    ("failure", "message"),
    [(None, "the constraint was not compiled in time"), (OSError("the disk is gone"), "the disk is gone")],
)
def test_a_call_offline_waits_no_longer_for_its_grammars_than_a_request_that_is_served(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None, message: str
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "grammar_s": 0.0 if failure is None else 60.0}
    llm = LLM(checkpoint, skip_tokenizer_init=True, **options)
    gate = Gate(monkeypatch)
    if failure is not None:
        gate.future.set_exception(failure)
    with pytest.raises(EngineError, match=message):
        llm.generate([[1, 2]], SamplingParams(regex="ab", stop_token_ids=(END,)), use_tqdm=False)
    assert llm.core.load.num_waiting == 0


class Clock:
    """The core's time, in which compilations take so many seconds, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, seconds: list[float]) -> None:
        self.now_s = 0.0
        self._grammar = grammar
        self._seconds = seconds
        self._futures: dict[Constraint, Future[Grammar]] = {}
        monkeypatch.setattr(GrammarCompiler, "compiled", lambda _, one: self._futures.setdefault(one, Future()))
        monkeypatch.setattr(core_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(core_module, "wait", self._wait)

    def _wait(self, awaited: Collection[Future[Grammar]], timeout: float) -> None:
        end_s = self.now_s + timeout
        while not all(one.done() for one in awaited):
            seconds = self._seconds[0]
            if self.now_s + seconds > end_s:
                self._seconds[0] -= end_s - self.now_s
                self.now_s = end_s
                return
            self.now_s += self._seconds.pop(0)
            next(one for one in self._futures.values() if not one.done()).set_result(self._grammar)


@pytest.mark.parametrize(("seconds", "is_error"), [([40, 40, 59, 40], False), ([40, 61, 40, 40], True)])
def test_a_call_offline_limits_each_compilation_and_not_how_many_there_are(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seconds: list[float], is_error: bool
) -> None:
    llm = LLM(checkpoint, skip_tokenizer_init=True, dtype="float32", num_blocks=64, grammar_s=60.0)
    clock = Clock(monkeypatch, llm.core._grammars.compiled(Constraint("regex", "ab")).result(), seconds)
    params = [SamplingParams(regex=f"ab|c{number}", stop_token_ids=(END,)) for number in range(4)]
    expected = pytest.raises(EngineError, match="offline-1-0: the constraint was not") if is_error else nullcontext()
    with expected:
        llm.generate([[1, 2]] * 4, params, use_tqdm=False)
    assert clock.now_s == (100 if is_error else 179)
    assert llm.core.load.num_waiting == 0


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_further_choices_take_the_first_ones_grammar_which_the_cache_may_have_dropped(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    llm = LLM(checkpoint, skip_tokenizer_init=True, dtype="float32", num_blocks=64)
    grammars, await_grammars = llm.core._grammars, llm.core.await_grammars
    compile_now, compiled = grammars._library.compile, list[str]()

    def compile_counted(constraint: Constraint) -> Any:
        compiled.append(constraint.source)
        return compile_now(constraint)

    def await_and_drop() -> None:
        await_grammars()
        monkeypatch.setattr(grammar, "MAX_CACHE_BYTES", 0)
        grammars.compiled(Constraint("regex", "b+")).result()
        assert [one.source for one in grammars._cache] == ["b+"]

    monkeypatch.setattr(grammars._library, "compile", compile_counted)
    monkeypatch.setattr(llm.core, "await_grammars", await_and_drop)
    params = [
        SamplingParams(n=3, regex=regex, max_tokens=max_tokens, stop_token_ids=(END,)) for regex in ("a{64}", "c{64}")
    ]
    results = llm.generate([[1, 2]] * 2, params, use_tqdm=False)
    assert [len(output.token_ids) for result in results for output in result.outputs] == [max_tokens] * 6
    assert sorted(compiled) == ["a{64}", "b+", "c{64}"]


def test_constraints_that_no_request_waits_for_are_not_compiled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=64), wake=lambda: None)
    compile_now, compiled = core._grammars._library.compile, list[str]()
    begun, release = threading.Semaphore(0), threading.Event()

    def compile_when_released(constraint: Constraint) -> Any:
        begun.release()
        assert release.wait(60)
        compiled.append(constraint.source)
        return compile_now(constraint)

    monkeypatch.setattr(core._grammars._library, "compile", compile_when_released)
    busy = [f"b{number}" for number in range(core._grammars._threads._max_workers)]

    def add(request_id: str, regex: str) -> None:
        params = SamplingParams(regex=regex, max_tokens=4)
        spec = EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], params=params, eos_token_ids=(END,))
        core.handle(AddRequest(spec))

    try:
        for regex in busy:
            add(regex, regex)
        for _ in busy:
            assert begun.acquire(timeout=60)
        for request_id, regex in (("left", "a1"), ("too", "a1"), ("stays", "a2"), ("one", "a3"), ("other", "a3")):
            add(request_id, regex)
        core.handle(AbortRequests(["left", "too", "one"]))
        core.step()
        add("again", "a1")
        core.handle(AbortRequests(["again"]))
        core.step()
        release.set()
        assert gathered(core, len(busy) + 2).keys() == {*busy, "stays", "other"}
        assert sorted(compiled) == sorted([*busy, "a2", "a3"])
        add("again", "a1")
        assert gathered(core, 1).keys() == {"again"}
    finally:
        release.set()
        core.shutdown()


def test_equal_constraints_are_compiled_once_and_the_cache_is_bounded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 58."""
    woken = []
    compiler = GrammarCompiler(checkpoint, 480, wake=lambda: woken.append(1))
    first = compiler.compiled(Constraint("regex", "a+"))
    assert compiler.compiled(Constraint("regex", "a+")) is first
    size = first.result().compiled.memory_size_bytes
    monkeypatch.setattr(grammar, "MAX_CACHE_BYTES", 20 * size)
    for number in range(100):
        compiler.compiled(Constraint("regex", f"a+|b{number}")).result()
    assert 0 < len(compiler._cache) <= 22
    assert compiler.compiled(Constraint("regex", "a+")) is not first
    # a failure is not kept
    wrong = Constraint("grammar", "root ::= foo")
    failed = compiler.compiled(wrong)
    assert isinstance(failed.exception(), InvalidRequest)
    assert compiler.compiled(wrong) is not failed
    compiler.shutdown()
    assert woken


def test_a_new_constraint_costs_the_same_however_many_are_cached(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xgrammar walks a whole grammar to say how large it is, and the step loop waits."""
    compiler, num_asked, sizes = GrammarCompiler(checkpoint, 480, wake=lambda: None), 0, list[int]()

    class Compiled:
        @property
        def memory_size_bytes(self) -> int:
            nonlocal num_asked
            num_asked += 1
            return 1000

    made = SimpleNamespace(compile_regex=lambda _: Compiled())
    monkeypatch.setattr(compiler._library, "compilers", lambda: {False: (made, frozenset(), None)})
    monkeypatch.setattr(grammar, "MAX_CACHE_BYTES", 10 * (1000 + grammar._ENTRY_BYTES))
    for number in range(100):
        compiler.compiled(Constraint("regex", f"b{number}")).result()
        compiler.keep(())
        sizes.append(len(compiler._cache))
    assert num_asked == 100, "once for each"
    assert max(sizes) == 11, "those that fit, and the newest"
    assert [one.source for one in compiler._cache][-1] == "b99"
    compiler.shutdown()


def test_constraints_that_cannot_be_compiled_fill_no_memory(checkpoint: Path) -> None:
    """Row 58: xgrammar keeps their sources, and its size does not count them."""
    library = _Library(checkpoint, 480)
    library.compile(Constraint("regex", "a+"))
    compiler = library.compilers()[False].compiler
    for number in range(17):
        assert compiler.get_cache_size_bytes() > 0
        with pytest.raises(InvalidRequest, match="not defined"):
            library.compile(Constraint("grammar", f"root ::= foo{number}".ljust(2**16)))
    assert compiler.get_cache_size_bytes() == 0


def ended_with(core: EngineCore, constraint: str) -> tuple[str | None, str]:
    """Kind and text of the error with which a request with this regex ends."""
    params = SamplingParams(regex=constraint, max_tokens=4)
    core.handle(AddRequest(EngineRequest(request_id="fails", prompt_token_ids=[1, 2], params=params)))
    events: list[Any] = []

    def has_ended() -> bool:
        events.extend(core.step())
        return bool(events)

    wait_until(has_ended)
    [event] = events
    assert (event.request_id, event.finish_reason) == ("fails", "error")
    return event.error_kind, event.error


def assert_compiles(core: EngineCore, regex: str) -> None:
    params = SamplingParams(regex=regex, max_tokens=4)
    spec = EngineRequest(request_id="runs", prompt_token_ids=[1, 2], params=params, eos_token_ids=(END,))
    core.handle(AddRequest(spec))
    assert len(gathered(core, 1)["runs"]) > 1


@pytest.mark.parametrize("failure", [OSError(errno.ESTALE, os.strerror(errno.ESTALE)), MemoryError()], ids=repr)
@pytest.mark.parametrize("place", ["read_vocabulary", "_compiler", "exclude_address"])
def test_what_the_machine_lacks_for_a_moment_ends_one_request_and_is_tried_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, place: str
) -> None:
    """While a compiling thread starts: an error there would break all of them for good."""
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=64), wake=lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(grammar, place, Mock(side_effect=failure))
        if place == "exclude_address":
            core._grammars.compiled(Constraint("regex", "ab")).result(60)
        else:
            kind, error = ended_with(core, "ab")
            assert kind == "no_room"
            reason = getattr(failure, "strerror", None) or "no memory is left"
            assert error == f"the constraint cannot be compiled at the moment: {reason}"
    assert_compiles(core, "ab")
    assert_compiles(core, "ac")
    core.shutdown()


@pytest.mark.parametrize("place", ["read_vocabulary", "_compiler"])
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError("libfoo.so: cannot open shared object file"), "libfoo.so: cannot open shared object file"),
    ],
    ids=repr,
)
def test_what_stays_wrong_rejects_the_constraint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError, reason: str, place: str
) -> None:
    monkeypatch.setattr(grammar, place, Mock(side_effect=failure))
    with pytest.raises(InvalidRequest, match=f"{reason}; allowed: no constraint"):
        _Library(checkpoint, 480).compile(Constraint("regex", "a+"))


def test_a_library_for_which_no_descriptor_is_left_is_loaded_later(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library(checkpoint, 480)
    failure = ImportError(f"libfoo.so: cannot open shared object file: {os.strerror(errno.EMFILE)}")
    with monkeypatch.context() as patched:
        patched.setattr(grammar, "_compiler", Mock(side_effect=failure))
        with pytest.raises(CapacityError, match=os.strerror(errno.EMFILE)):
            library.compile(Constraint("regex", "a+"))
    library.compile(Constraint("regex", "a+"))


def test_a_constraint_that_takes_more_memory_than_there_is_may_be_tried_elsewhere(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library(checkpoint, 480)
    compiler: Any = SimpleNamespace(compile_regex=Mock(side_effect=MemoryError))
    failing = library.compilers()[False]._replace(compiler=compiler)
    monkeypatch.setitem(library.compilers(), False, failing)
    with pytest.raises(CapacityError, match="no memory is left"):
        library.compile(Constraint("regex", "a+"))


def test_a_thread_that_cannot_start_ends_one_request(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constraint stays queued in the pool, and is not compiled for the threads that start later."""
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=64), wake=lambda: None)
    start, compile_now, compiled = threading.Thread.start, core._grammars._library.compile, list[str]()

    def compile_counted(constraint: Constraint) -> Any:
        compiled.append(constraint.source)
        return compile_now(constraint)

    monkeypatch.setattr(core._grammars._library, "compile", compile_counted)

    def start_others(thread: threading.Thread) -> None:
        if thread.name.startswith("grammar"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_others)
        kind, error = ended_with(core, "ab")
    assert kind == "no_room"
    assert error == "no thread can be started to compile the constraint: can't start new thread"
    assert_compiles(core, "ac")
    assert compiled == ["ac"]
    assert_compiles(core, "ab")
    core.shutdown()
