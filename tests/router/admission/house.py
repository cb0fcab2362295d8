"""The door by itself, with pools of a test's own and requests that stay until they are told to go."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from router.admission.budget import Budget
from router.admission.capacity import Capacity
from router.admission.door import Admission
from router.config import AdmissionSettings
from router.request import GenerationRequest
from serving.errors import Overloaded

GUARD_S = 20.0


def request(num_prompt: int = 6, max_tokens: int = 4, *, n: int = 1, **fields: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return GenerationRequest("label", "id", "model", tuple(range(num_prompt)), params, seed=5, **fields)


class House:
    """An admission with pools of our own, and requests that stay until they are told to go."""

    def __init__(self, capacity: Capacity | None = None, **fields: Any) -> None:
        self.capacity = capacity or Capacity(num_instances=1, num_sequences=2)
        fields = {"sequence_fraction": 1.0, "queue_timeout_s": GUARD_S, **fields}
        self.admission = Admission(AdmissionSettings(**fields), lambda: self.capacity, rng=random.Random(0))
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, wanted: GenerationRequest | None = None, *, num_output_tokens: int = 4) -> None:
        """A request arrives; afterwards it is inside, waiting, or refused."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, wanted or request(), num_output_tokens))
        await settled()

    async def go(self, name: str) -> None:
        """A request that is inside ends by itself."""
        self._ends[name].set()
        await self.tasks[name]
        await settled()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await settled()

    async def refusal(self, name: str) -> Overloaded:
        """Why a request was refused."""
        with pytest.raises(Overloaded) as raised:
            async with asyncio.timeout(GUARD_S):
                await self.tasks[name]
        return raised.value

    async def empty(self) -> None:
        """Sends everybody home and checks that nothing is left."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        admission = self.admission
        assert vars(admission.held) == vars(Budget())
        assert (admission.num_queued, admission.num_queued_tokens, admission.num_tenants) == (0, 0, 0)

    async def _stay(self, name: str, wanted: GenerationRequest, num_output_tokens: int) -> None:
        async with self.admission.admit(wanted) as place:
            self.inside.append(name)
            await self._ends[name].wait()
            place.num_output_tokens = num_output_tokens


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
