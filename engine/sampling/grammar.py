"""Compiled constraints, and the masks that they put on the next tokens of requests. The library is xgrammar.

    Constraint ─▶ queued ─▶ compiling, on a thread ─▶ compiled, cached ─▶ a matcher per request ─▶ a mask per token
                    │           ├─▶ InvalidRequest: the grammar is none, or xgrammar cannot do it
                    │           └─▶ CapacityError: no file, memory or thread at the moment; the next request tries again
                    └─no request waits for it─▶ cancelled

The state of a matcher is a pure function of the request's output ids: a request that was preempted, handed over or
resumed elsewhere advances a new matcher over the ids emitted so far. The built-in engine does so before the request
enters, a part before each step (`GrammarMasks.replay`), vLLM's sampler in the first step that samples the request.
xgrammar is imported by the first constraint.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.openmp import Launcher, launcher
from engine.errors import CapacityError, InvalidRequest, may_pass
from engine.machine import useful_threads
from engine.sampling.constraints import INSTALL_XGRAMMAR, Constraint, has_xgrammar
from engine.sampling.grammar_kernels import exclude_address
from engine.sampling.whitespace import WhitespaceLimit
from engine.scheduling.request import Request
from engine.text.token_bytes import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    import xgrammar

_MAX_THREADS = 2
_NICENESS = 10
"""Of the compiling threads, above that of the process: nine tenths of a shared core are left to the steps."""
MAX_CACHE_BYTES = 64 * 2**20
_MAX_PART_BYTES = 48 * 2**20
"""Of xgrammar's cache for a vocabulary: a third for parts that grammars share, such as strings of a length."""
_MAX_FAILED_BYTES = 2**20
"""Of the sources of constraints that cannot be compiled: xgrammar's cache keeps them without counting them."""
_TOKEN_S = 0.005
_FREE_S = 0.5
"""CPU time that a request's grammar may take in steps: for each sampled token, and beyond that until tokens that take
less have left as much. With an ambiguous grammar (`root ::= root root | "a"`) each token takes more than the one
before, and the streams of the batch wait for it."""
_STEP_S = 1.0
"""What all of them together may take in a step beyond `_TOKEN_S` for each: an engine that is silent for longer than
`core_silence_timeout_s` is unavailable."""
_REPLAYED_S = 0.0001
"""Time for each token that was emitted elsewhere, or whose client says so, that it leaves to no other."""
_MAX_ERROR_CHARS = 200
_CONTROL_BYTES = frozenset(range(0x20)) - {ord("\n")}
_BITS = 32


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint."""

    compiled: xgrammar.CompiledGrammar
    textless_ids: frozenset[int]
    """Tokens that are no text to it: they can only end the output."""
    whitespace: WhitespaceLimit | None = None
    """None: it is no JSON, or xgrammar counts its white space."""


CompiledGrammar = Future[Grammar]


class GrammarCompiler:
    """Compiles constraints for one model's vocabulary and caches them by content. Called from the step loop alone."""

    def __init__(self, folder: Path, vocab_size: int, wake: Callable[[], None]) -> None:
        """`wake` is called, from a compiling thread, when a constraint is compiled."""
        self._library = _Library(folder, vocab_size)
        self._wake = wake
        num_threads = max(1, min(_MAX_THREADS, useful_threads() - 1))  # a core is left to the steps
        # An exit waits for them. It would not for daemons, and one that returns from xgrammar then aborts the process.
        self._threads = ThreadPoolExecutor(num_threads, "grammar", _prepare_thread, (self._library,))
        self._cache: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._pending: dict[Constraint, CompiledGrammar] = {}
        """Those whose compilation `keep` has not yet seen end."""

    def compiled(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of `constraint`, at once if it is cached. Its exception is InvalidRequest or CapacityError."""
        found = self._cache.get(constraint)
        if found is None or (found.done() and found.exception() is not None):
            self._drop_oldest()
            found = self._submit(constraint)
            self._cache[constraint] = self._pending[constraint] = found
            found.add_done_callback(lambda _: self._wake())
        self._cache.move_to_end(constraint)
        return found

    def _submit(self, constraint: Constraint) -> CompiledGrammar:
        failed = Future[Grammar]()

        def compile_unless_failed() -> Grammar:
            return failed.result() if failed.done() else self._library.compile(constraint)

        try:
            return self._threads.submit(compile_unless_failed)
        except RuntimeError as error:  # at a limit on threads; a later one finds this still queued
            failed.set_exception(CapacityError(f"no thread can be started to compile the constraint: {error}"))
            return failed

    def keep(self, wanted: Container[object]) -> None:
        """Cancel the compilations that have not begun and are not `wanted`."""
        for constraint, grammar in list(self._pending.items()):
            if grammar.done() or (grammar not in wanted and grammar.cancel()):
                del self._pending[constraint]
                if grammar.cancelled():
                    del self._cache[constraint]

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _drop_oldest(self) -> None:
        """Keep the most recently used grammars that fit, and those that are being compiled."""
        num_bytes = 0
        for constraint, grammar in reversed(list(self._cache.items())):
            if grammar.done():
                num_bytes += 0 if grammar.exception() else grammar.result().compiled.memory_size_bytes
                if grammar.exception() or num_bytes > MAX_CACHE_BYTES:
                    del self._cache[constraint]


def _prepare_thread(library: _Library) -> None:
    """Imports and Python code come first: they hold the interpreter, and at low priority on a busy machine would stop
    the steps for seconds. An error raised here would break the pool, and with its next constraint the step loop."""
    with suppress(Exception):  # every constraint raises it again
        library.compilers()
    with suppress(OSError):  # not every sandbox allows it
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    with suppress(Exception):  # the step that needs it raises it again
        _exclude_launcher()  # it is compiled here, not in a step


class _Compiler(NamedTuple):
    """xgrammar's compiler for one vocabulary, and what its grammars share."""

    compiler: xgrammar.GrammarCompiler
    textless_ids: frozenset[int]
    whitespace: WhitespaceLimit | None


class _Library:
    """xgrammar's compilers, made by the first constraint. Thread-safe."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compilers: dict[bool, _Compiler] = {}
        self._problem: InvalidRequest | None = None
        """Why there are none. What takes time is not tried again."""
        self._num_failed_bytes = 0

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises InvalidRequest with xgrammar's own words, or CapacityError."""
        kind, source, limits_whitespace, is_json = constraint
        compiler, textless_ids, whitespace = self.compilers()[is_json]
        try:
            match kind:
                case "json_schema":
                    compiled = compiler.compile_json_schema(source)
                case "regex":
                    compiled = compiler.compile_regex(source)
                case "grammar":
                    compiled = compiler.compile_grammar(source)
                case "structural_tag":
                    compiled = compiler.compile_structural_tag(source)
        except Exception as error:  # RuntimeError for all kinds of reasons, but nothing promises it
            self._forget_failed(len(source))
            if _is_passing(error):
                raise _lacking(error) from None
            raise InvalidRequest(kind, _reason(error)) from None
        return Grammar(compiled, textless_ids, whitespace if limits_whitespace else None)

    def _forget_failed(self, num_bytes: int) -> None:
        self._num_failed_bytes += num_bytes
        if self._num_failed_bytes > _MAX_FAILED_BYTES:
            self._num_failed_bytes = 0
            for one in self.compilers().values():
                one.compiler.clear_cache()

    def compilers(self) -> dict[bool, _Compiler]:
        """Those for JSON and for other text, made by the first call. Raises InvalidRequest or CapacityError."""
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if not self._compilers:
                try:
                    self._compilers = self._made()
                except Exception as error:
                    if _is_passing(error):
                        raise _lacking(error) from error
                    raise
            return self._compilers

    def _made(self) -> dict[bool, _Compiler]:
        if not has_xgrammar():
            problem = f"requires xgrammar, which is not installed: {INSTALL_XGRAMMAR}"
            raise InvalidRequest("constraint", problem, "no constraint")
        vocabulary = self._vocabulary()
        if vocabulary is None:
            raise InvalidRequest("constraint", "requires a tokenizer whose tokens have bytes", "no constraint")
        try:
            return {is_json: _compiler(vocabulary, is_json=is_json) for is_json in (True, False)}
        except Exception as error:  # a library that cannot be loaded, a vocabulary that xgrammar rejects
            if _is_passing(error):
                raise
            reason = str(error)[:_MAX_ERROR_CHARS]
            self._problem = InvalidRequest("constraint", f"xgrammar fails: {reason}", "no constraint")
            raise self._problem from error

    def _vocabulary(self) -> Vocabulary | None:
        try:
            return read_vocabulary(self._folder, self._vocab_size)
        except OSError as error:
            if _is_passing(error):
                raise
            problem = f"the tokenizer cannot be read: {error.strerror or error}"
            raise InvalidRequest("constraint", problem, "no constraint") from error


def _is_passing(error: Exception) -> bool:
    return isinstance(error, MemoryError) or may_pass(error)


def _lacking(error: Exception) -> CapacityError:
    """Of what the machine lacks for a moment, such as memory, descriptors or a disk that answers."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or "no memory is left"
    return CapacityError(f"the constraint cannot be compiled at the moment: {reason[:_MAX_ERROR_CHARS]}")


def _compiler(vocabulary: Vocabulary, *, is_json: bool) -> _Compiler:
    """Without the tokens that a constraint never allows: special ones, and with `is_json` those with control
    characters, which xgrammar would let into strings of limited length."""
    from xgrammar import GrammarCompiler, TokenizerInfo

    tokens = [b"" if token_id in vocabulary.special_ids else token for token_id, token in enumerate(vocabulary.tokens)]
    if is_json:
        tokens = [b"" if not _CONTROL_BYTES.isdisjoint(token) else token for token in tokens]
    textless_ids = frozenset(token_id for token_id, token in enumerate(tokens) if not token)
    # Each request's matcher has its own stop tokens. One given here would have no text, and where a matcher has others
    # it would be allowed as an empty text.
    info = TokenizerInfo(tokens, stop_token_ids=[])
    compiler = GrammarCompiler(info, max_threads=1, cache_limit_bytes=_MAX_PART_BYTES)
    return _Compiler(compiler, textless_ids, WhitespaceLimit(tokens) if is_json else None)


def _reason(error: Exception) -> str:
    """What xgrammar says, without the place in its source that says so."""
    text = re.sub(r"^\[[0-9:]+\] \S+: ", "", str(error).strip())
    return f"xgrammar cannot compile it: {text[:_MAX_ERROR_CHARS]}"


class _RequestGrammar:
    """One request's matcher: advanced over the output as far as it is known."""

    def __init__(self, request: Request, grammar: CompiledGrammar) -> None:
        from xgrammar import GrammarMatcher

        spec = request.spec
        stop_ids = spec.params.stop_token_ids
        self.ending_ids = (*spec.eos_token_ids, *stop_ids)
        """EOS and stop tokens without text end the grammar; others are text to it, and end the output anywhere."""
        compiled = grammar.result()
        ends = [*spec.eos_token_ids, *(token_id for token_id in stop_ids if token_id in compiled.textless_ids)]
        self._matcher = GrammarMatcher(compiled.compiled, override_stop_tokens=ends or list(stop_ids))
        self._num_accepted = 0
        self._is_possible = True
        """The grammar allows the output as far as it is accepted, and has taken no more time than it may."""
        self.left_s = _FREE_S
        """CPU time that it may take beyond `_TOKEN_S` for each token."""
        self.replayed_s = 0.0
        """CPU time that `replay` has taken."""
        self._whitespace = compiled.whitespace
        self._run = 0
        """White space at the end of the output, in characters."""

    def replay(self, request: Request, seconds: float) -> bool:
        """Accept the output that came with the request, for about so many seconds of CPU. True: no more is accepted."""
        begun_s = time.thread_time()
        is_done = self._accept(request.spec.output_token_ids[self._num_accepted :], seconds=seconds)
        self.replayed_s += time.thread_time() - begun_s
        return is_done

    def fill_mask(
        self, request: Request, masks: npt.NDArray[np.int32], row: int, step_left_s: float = _STEP_S
    ) -> float:
        """Set `masks[row]` to the tokens that may follow the output; to none if the grammar forbids the output, or took
        too much time, of its own or of `step_left_s`. Returns the CPU time that it took beyond that of its tokens."""
        before_s = self.left_s
        least_s = max(0.0, before_s - max(0.0, step_left_s))
        new_ids = request.token_ids[request.num_prompt_tokens + self._num_accepted :]
        self._accept(new_ids, least_s=least_s - _TOKEN_S)
        begun_s = time.thread_time()
        self._fill(request, masks, row)
        self.left_s = min(_FREE_S, self.left_s + _TOKEN_S - (time.thread_time() - begun_s))
        if self.left_s < least_s:
            masks[row] = 0
        return max(0.0, before_s - self.left_s)

    def _fill(self, request: Request, masks: npt.NDArray[np.int32], row: int) -> None:
        if not self._is_possible or self._matcher.is_terminated():  # by an output from elsewhere that has ended
            masks[row] = 0
            return
        self._matcher.fill_next_token_bitmask(masks, row)
        if self._whitespace is not None:
            self._whitespace.apply(masks[row], self._run, self._is_between_elements)
        if request.num_output_tokens < request.spec.params.min_tokens:
            _forbid(masks[row], self.ending_ids)

    def _accept(self, token_ids: Sequence[int], *, seconds: float = math.inf, least_s: float = 0.0) -> bool:
        """Advance over `token_ids` for about so many seconds of CPU, while it is possible and no less than `least_s` is
        left. False: the seconds are over."""
        begun_s = now_s = time.thread_time()
        for token_id in token_ids:
            if not self._is_possible:
                break
            if now_s - begun_s >= seconds:
                return False
            self._is_possible = self._accept_one(token_id)
            last_s, now_s = now_s, time.thread_time()
            self.left_s -= max(0.0, now_s - last_s - _REPLAYED_S)
            self._is_possible = self._is_possible and self.left_s >= least_s
        return True

    def _accept_one(self, token_id: int) -> bool:
        if not self._matcher.accept_token(token_id):
            return False
        self._num_accepted += 1
        if self._whitespace is not None:
            self._run = self._whitespace.run_after(self._run, token_id)
        return True

    def _is_between_elements(self) -> bool:
        """Of JSON: its white space may follow, which strings and literals do not admit, but no control character, which
        free text admits."""
        return self._accepts("\r\t") and not self._accepts("\x01")

    def _accepts(self, text: str) -> bool:
        accepted = self._matcher.accept_string(text)
        if accepted:
            self._matcher.rollback(1)
        return accepted


def _forbid(mask: npt.NDArray[np.int32], ending_ids: Iterable[int]) -> None:
    """Remove the tokens that would end the output before min_tokens, unless the grammar allows no others."""
    others = mask.copy()
    for token_id in ending_ids:
        others.view(np.uint32)[token_id // _BITS] &= ~np.uint32(1 << token_id % _BITS)
    if others.any():
        mask[:] = others


class GrammarMasks:
    """The matchers of all constrained requests. Owned by the model runner.

    That of a request is made for its replay or at its first sampled token, kept through preemptions, and dropped with
    it.
    """

    def __init__(self) -> None:
        self._by_request: WeakKeyDictionary[Request, _RequestGrammar] = WeakKeyDictionary()

    def apply(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Set the `logits` [len(requests), vocab] (float32) of tokens that a request's constraint excludes to -inf."""
        rows = [row for row, request in enumerate(requests) if request.grammar is not None]
        if not rows:
            return
        masks = np.zeros((len(requests), -(-logits.shape[1] // _BITS)), np.int32)
        grammars = sorted(((row, self._grammar_of(requests[row])) for row in rows), key=lambda one: -one[1].left_s)
        step_left_s = _STEP_S
        for row, grammar in grammars:
            if step_left_s > 0 or grammar.left_s == _FREE_S:  # the others have no mask: that ends them
                step_left_s -= grammar.fill_mask(requests[row], masks, row, step_left_s)
        if logits.device.type == "cpu":
            _exclude(logits, masks, rows)
        else:
            _exclude_on_gpu(logits, masks, rows)

    def replay(self, requests: Iterable[Request], seconds: float) -> list[Request]:
        """Advance the matchers of `requests` over the outputs that came with them, for about so many seconds of CPU;
        those that have taken the least first. Returns the ones with nothing left to do."""
        until_s = time.thread_time() + seconds
        done = []
        for request in sorted(requests, key=lambda one: self._grammar_of(one).replayed_s):
            left_s = until_s - time.thread_time()
            if left_s <= 0:
                break
            if self._grammar_of(request).replay(request, left_s):
                done.append(request)
        return done

    def _grammar_of(self, request: Request) -> _RequestGrammar:
        found = self._by_request.get(request)
        if found is None:
            assert request.grammar is not None
            found = self._by_request[request] = _RequestGrammar(request, request.grammar)
        return found


_KERNEL_VARIANTS = (1, 2, 16)
"""Numbers of rows, each of which has a kernel of its own: one, no multiple of 16, a multiple of 16."""


def warm_up_masks(logits: Tensor) -> None:
    """Compiles on a GPU what masks `logits` [any, vocab] of constrained requests, before the first of them comes."""
    if logits.device.type == "cpu" or not has_xgrammar():
        return
    for num_rows in _KERNEL_VARIANTS:
        all_allowed = np.full((num_rows, -(-logits.shape[1] // _BITS)), -1, np.int32)
        _exclude_on_gpu(logits.new_zeros((num_rows, logits.shape[1])), all_allowed, range(num_rows))


def _exclude_on_gpu(logits: Tensor, masks: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(masks).to(logits.device), indices=list(rows))


def _exclude(logits: Tensor, masks: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
    if logits.stride(1) != 1:
        contiguous = logits.contiguous()
        _exclude(contiguous, masks, rows)
        logits.copy_(contiguous)
        return
    row_bytes = logits.stride(0) * logits.element_size()
    addresses = np.array([(logits.data_ptr() + row * row_bytes, masks[row].ctypes.data) for row in rows], np.int64)
    arguments = (ctypes.c_int64 * 4)(0, len(rows), logits.shape[1], addresses.ctypes.data)
    _exclude_launcher()(1, arguments)


@functools.cache
def _exclude_launcher() -> Launcher:
    return launcher(exclude_address())
