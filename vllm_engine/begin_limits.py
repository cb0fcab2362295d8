"""Requests that no step of vLLM has begun within their `begin_s`: they end, as at the built-in engine.

    request ─begin_s─▶ late ─▶ in the next question to the workers ─▶ a step has computed some of it: it continues
       └─ a token, or the end: no limit any more                         └─ none has: an error

vLLM reports nothing of a prompt before its first token. Its workers know which requests were in a step; they answer
between two steps, so a request that begins after its time and before the answer is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm.v1.engine.async_llm import AsyncLLM

from engine.core.messages import EngineRequest

_OUTPUTS_S = 0.05
"""In which the outputs that came before the workers' answer reach their requests: the answer knows no ended request."""


class BeginLimits:
    """Belongs to the host's event loop."""

    def __init__(
        self,
        engine: AsyncLLM,
        interrupt: Callable[[], None],
        end: Callable[[EngineRequest], None],
        answered: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`interrupt` is called before each question, `end` for each request that has not begun, `answered` when a
        question has its answer or an error."""
        self._engine = engine
        self._interrupt = interrupt
        self._end = end
        self._answered = answered
        self._limited: dict[str, tuple[EngineRequest, asyncio.TimerHandle]] = {}
        """They have no token yet."""
        self._late: list[EngineRequest] = []
        """For the next question."""
        self._question: asyncio.Task[None] | None = None
        """The last one."""

    def add(self, request: EngineRequest) -> None:
        """What was begun elsewhere has no limit."""
        if request.begin_s is not None and request.remote_kv is None and not request.output_token_ids:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(request.begin_s, self._is_late, request)
            self._limited[request.request_id] = request, timer

    def remove(self, request_id: str) -> None:
        """Idempotent."""
        if limited := self._limited.pop(request_id, None):
            limited[1].cancel()

    def close(self) -> None:
        if self._question is not None:
            self._question.cancel()

    def _is_late(self, request: EngineRequest) -> None:
        self._late.append(request)
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask())
            self._question.add_done_callback(self._answered)

    async def _ask(self) -> None:
        while self._late:
            late, self._late = self._late, []
            self._interrupt()
            begun, *_ = await self._engine.collective_rpc("tandem_begun")
            await asyncio.sleep(_OUTPUTS_S)
            for request in late:
                limited = self._limited.get(request.request_id)
                if limited is not None and limited[0] is request and request.request_id not in begun:
                    self._end(request)
