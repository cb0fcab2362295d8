"""An admission controller with capacity that a test sets, and requests that stay in flight until the test ends them."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from router.admission.capacity import Capacity, Usage
from router.admission.controller import AdmissionController
from router.admission.settings import AdmissionSettings
from router.admission.slots import Ticket
from router.request.generation_request import GenerationRequest
from serving.errors import Overloaded

GUARD_S = 20.0


def request(num_prompt: int = 6, max_tokens: int = 4, *, n: int = 1, **fields: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return GenerationRequest("label", "id", "model", tuple(range(num_prompt)), params, **fields)


class AdmissionRig:
    """The controller, its capacity, and the requests by name."""

    def __init__(
        self,
        capacity: Capacity | None = None,
        *,
        ttft_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        **fields: Any,
    ) -> None:
        self.capacity = capacity or Capacity(num_instances=1, num_sequences=2)
        fields = {"sequence_fraction": 1.0, "queue_timeout_s": GUARD_S, **fields}
        self.admission = AdmissionController(
            AdmissionSettings(**fields), lambda: self.capacity, ttft_s=ttft_s, rng=random.Random(0), clock=clock
        )
        self.inside: list[str] = []
        self.tickets: dict[str, Ticket] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(self, name: str, wanted: GenerationRequest | None = None, *, num_output_tokens: int = 4) -> None:
        """A request arrives; afterwards it is in flight, waiting, or rejected."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, wanted or request(), num_output_tokens))
        await settled()

    async def finish(self, name: str) -> None:
        """Ends a request that is in flight."""
        self._ends[name].set()
        await self.tasks[name]
        await settled()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await settled()

    async def rejection(self, name: str) -> Overloaded:
        """The error of a rejected request."""
        with pytest.raises(Overloaded) as raised:
            async with asyncio.timeout(GUARD_S):
                await self.tasks[name]
        return raised.value

    async def close(self) -> None:
        """Ends all requests and checks that nothing is left."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        admission = self.admission
        assert admission.in_use == Usage()
        assert (admission.num_queued, admission.queue.queued_cost, len(admission.queue._flows)) == (0, 0, 0)

    async def _stay(self, name: str, wanted: GenerationRequest, num_output_tokens: int) -> None:
        async with self.admission.admit(wanted) as ticket:
            self.inside.append(name)
            self.tickets[name] = ticket
            await self._ends[name].wait()
            ticket.num_emitted = lambda: num_output_tokens


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
