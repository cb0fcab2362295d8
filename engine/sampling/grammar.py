"""Compiled constraints. The library is xgrammar, imported by the first of them.

    Constraint ─▶ queued ─▶ compiling, on a thread ─▶ compiled, cached
                    │           ├─▶ InvalidRequest: the grammar is none, or xgrammar cannot do it
                    │           └─▶ CapacityError: no file, memory or thread at the moment; the next request tries again
                    └─no request waits for it─▶ cancelled

grammar_masks.py has the masks that they put on the next tokens of requests. `WhitespaceLimit` is the part that
xgrammar would do too slowly.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import CapacityError, InvalidRequest, may_pass
from engine.machine import useful_threads
from engine.sampling.constraints import INSTALL_XGRAMMAR, MAX_WHITESPACE, Constraint, has_xgrammar
from engine.sampling.sampler_kernels import exclude_address
from engine.text.token_bytes import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    import xgrammar

_MAX_THREADS = 2
_NICENESS = 10
"""Of the compiling threads, above that of the process: nine tenths of a shared core are left to the steps."""
MAX_CACHE_BYTES = 64 * 2**20
_ENTRY_BYTES = 4096
"""Of a cached grammar, besides what xgrammar counts."""
_MAX_PART_BYTES = 48 * 2**20
"""Of xgrammar's cache for a vocabulary: a third for parts that grammars share, such as strings of a length."""
_MAX_FAILED_BYTES = 2**20
"""Of the sources of constraints that cannot be compiled: xgrammar's cache keeps them without counting them."""
_MAX_ERROR_CHARS = 200
_CONTROL_BYTES = frozenset(range(0x20)) - {ord("\n")}
MASK_BITS = 32
"""Tokens that one number of a mask stands for."""
_SPACES = b" \t\n\r"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|$)', re.DOTALL)
_TOO_LONG = re.compile(rb"[ \t\n\r]{%d}" % (MAX_WHITESPACE + 1))


class WhitespaceLimit:
    """The limit on white space between two elements of JSON, in one vocabulary. Immutable.

        output ids ─▶ white space at the end (`run_after`) ─▶ tokens that exceed the limit ─▶ not in the mask

    xgrammar can count them itself. Then it tries all tokens that begin with a space, half of a vocabulary, wherever one
    may stand: 0.5 ms a row with 152 k tokens, without the count 3 µs. So its grammars allow any number.
    """

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._runs = {
            token_id: (run, run == len(token))
            for token_id, token in enumerate(vocabulary)
            if (run := len(token) - len(token.rstrip(_SPACES)))
        }
        """Of tokens that end with white space: how much, and whether they are nothing else."""
        self._excluded = _excluded(vocabulary)

    def run_after(self, run: int, token_id: int) -> int:
        """The white space at the end of an output that ended with `run` characters of it, and now with `token_id`."""
        own, is_all = self._runs.get(token_id, (0, False))
        return run + own if is_all else own

    def apply(self, mask: npt.NDArray[np.int32], run: int, is_between: Callable[[], bool]) -> None:
        """Remove tokens from `mask`, of an output that ends with `run`. `is_between`, whether it ends between elements,
        is called if it matters."""
        excluded = self._excluded[min(run, MAX_WHITESPACE)]
        if excluded is not None and (mask & excluded).any() and is_between():
            mask &= ~excluded


def _excluded(vocabulary: Sequence[bytes]) -> list[npt.NDArray[np.int32] | None]:
    """For each number of characters of white space: the tokens that may not follow, as bits; None if there are none."""
    leading = np.zeros(-(-len(vocabulary) // MASK_BITS) * MASK_BITS, np.int32)
    for token_id, token in enumerate(vocabulary):
        leading[token_id] = len(token) - len(token.lstrip(_SPACES))
        if len(token) > MAX_WHITESPACE and _TOO_LONG.search(_STRING.sub(b'""', token)):
            leading[token_id] = MAX_WHITESPACE + 1
    too_long = [leading > MAX_WHITESPACE - run for run in range(MAX_WHITESPACE + 1)]
    return [np.packbits(bits, bitorder="little").view(np.int32) if bits.any() else None for bits in too_long]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint."""

    compiled: xgrammar.CompiledGrammar
    textless_ids: frozenset[int]
    """Tokens that are no text to it: they can only end the output."""
    whitespace: WhitespaceLimit | None = None
    """None: it is no JSON, or xgrammar counts its white space."""
    num_bytes: int = 0
    """Of the cache. To ask xgrammar takes the longer the larger it is, so a compiling thread does, once."""


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
        """Those whose end `_settle` has not seen yet."""
        self._num_bytes = 0
        """Of all others in the cache."""

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
        for grammar in self._pending.values():
            if grammar not in wanted:
                grammar.cancel()
        self._settle()

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _drop_oldest(self) -> None:
        """Keep the most recently used grammars that fit, and those that are being compiled. What it costs does not grow
        with the cache: streams wait meanwhile."""
        self._settle()
        while self._num_bytes > MAX_CACHE_BYTES:
            oldest = next(constraint for constraint in self._cache if constraint not in self._pending)
            self._num_bytes -= self._cache.pop(oldest).result().num_bytes

    def _settle(self) -> None:
        """Count what has been compiled; forget what has failed or was cancelled."""
        for constraint, grammar in [(one, grammar) for one, grammar in self._pending.items() if grammar.done()]:
            del self._pending[constraint]
            if grammar.cancelled() or grammar.exception() is not None:
                del self._cache[constraint]
            else:
                self._num_bytes += grammar.result().num_bytes


def _prepare_thread(library: _Library) -> None:
    """Imports and Python code come first: they hold the interpreter, and at low priority on a busy machine would stop
    the steps for seconds. An error raised here would break the pool, and with its next constraint the step loop."""
    with suppress(Exception):  # every constraint raises it again
        library.compilers()
    with suppress(OSError):  # not every sandbox allows it
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    with suppress(Exception):  # the step that needs it raises it again
        exclude_address()  # it is compiled here, not in a step


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
        num_bytes = compiled.memory_size_bytes + _ENTRY_BYTES
        return Grammar(compiled, textless_ids, whitespace if limits_whitespace else None, num_bytes)

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
