"""Grammars in vLLM's workers, whose steps need them: they are compiled beside the steps, before vLLM gets the request.

    request ─▶ in the next question to the workers, every 20 ms ─▶ compiled in all of them ─▶ submitted
                  └─▶ its constraint has no grammar, or none in time: an error

A question names the constraints of all unfinished requests. A worker compiles those that are new, keeps the others,
however often vLLM preempts their requests, and cancels what is named no more.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM

from engine.core.messages import ErrorKind
from engine.sampling.constraints import Constraint
from engine.sampling.grammar import CompiledGrammar, GrammarCompiler
from engine.scheduling.request import constraint_error

_POLL_S = 0.02
State = tuple[str, ErrorKind | None] | None
"""Of a constraint: None while it is compiled, then `_COMPILED`, or the error and its kind."""
_COMPILED: State = "", None
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Constraint])


class HostGrammars:
    """Compilations as the host sees them. Belongs to the event loop."""

    def __init__(
        self,
        engine: AsyncLLM,
        timeout_s: float,
        constraints: Callable[[], Collection[Constraint]],
        interrupt: Callable[[], None],
    ) -> None:
        """`constraints`: those of all unfinished requests. `interrupt` is called before each question."""
        self._engine = engine
        self.timeout_s = timeout_s
        self._constraints = constraints
        self._interrupt = interrupt
        self._states: dict[Constraint, State] = {}
        """The answer to the last question."""
        self._question: asyncio.Task[None] | None = None
        """The last one, or the next while something is compiled."""

    async def compile(self, constraint: Constraint) -> tuple[str, ErrorKind] | None:
        """Until every worker has its grammar; or the error."""
        if (known := self._states.get(constraint)) is not None and known[1] == "no_room":  # at an earlier moment
            del self._states[constraint]
        try:
            async with asyncio.timeout(self.timeout_s):
                while (state := self._states.get(constraint)) is None:
                    if self._question is None or self._question.done():
                        self._question = asyncio.create_task(self._ask())
                    await asyncio.shield(self._question)
        except TimeoutError:
            return "the constraint was not compiled in time", "no_room"
        error, kind = state
        return None if kind is None else (error, kind)

    async def _ask(self) -> None:
        if None in self._states.values():
            await asyncio.sleep(_POLL_S)
        constraints = list(self._constraints())
        self._states = {constraint: self._states.get(constraint) for constraint in constraints}  # others are dropped
        self._interrupt()
        found = await self._engine.collective_rpc("tandem_compile", args=(_encoder.encode(constraints),))
        answers = msgspec.convert(found, list[list[State]])  # vLLM makes lists of tuples
        self._states = {constraint: _common(states) for constraint, *states in zip(constraints, *answers, strict=True)}
        if None in self._states.values():  # though no request may wait any more: then this cancels its compilation
            self._question = asyncio.create_task(self._ask())


def _common(states: Sequence[State]) -> State:
    """Of several workers."""
    failed = (state for state in states if state is not None and state[1] is not None)
    return next(failed, None if None in states else _COMPILED)


class WorkerGrammars:
    """The grammars of one worker. Called between steps and in them."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._compiler = GrammarCompiler(folder, vocab_size, wake=lambda: None)
        self._kept: dict[Constraint, CompiledGrammar] = {}

    def compile(self, constraints: bytes) -> list[State]:
        """The state of each of `constraints`, a list of Constraint as msgpack. Does not block."""
        self._kept = {one: self.grammar(one) for one in _decoder.decode(constraints)}
        self._compiler.keep(set(self._kept.values()))
        states = {one: _state(grammar) for one, grammar in self._kept.items()}
        for one, state in states.items():
            if state is not None and state[1] == "no_room":
                del self._kept[one]  # the next question tries it again
        return [*states.values()]

    def grammar(self, constraint: Constraint) -> CompiledGrammar:
        """Compiled, if the host has asked for it."""
        return self._kept.get(constraint) or self._compiler.compiled(constraint)


def _state(grammar: CompiledGrammar) -> State:
    if not grammar.done():
        return None
    return _COMPILED if (error := grammar.exception()) is None else constraint_error(error)


worker_grammars = functools.cache(WorkerGrammars)
"""One for the sampling and the host's questions."""
