"""Pods whose containers are fake instances: they listen at their pod's address, and drain when they are terminated."""

from __future__ import annotations

import asyncio
import socket
from typing import Literal

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import SetReady
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance

SLOTS = 8
"""Requests that each runs at one time."""


class FakePods:
    """A Runtime. Pods of the workload `prefill` are prefill instances, all others decode instances."""

    def __init__(self, token_s: float = 0.0) -> None:
        self._token_s = token_s
        self._of: dict[str, FakeInstance] = {}
        self.ended_early: list[str] = []
        """Pods that were killed at the end of their grace, with calls that ran."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])

    @property
    def running(self) -> dict[str, FakeInstance]:
        """By the pods' names."""
        return self._of

    async def start(self, pod: Object, set_ready: SetReady) -> None:
        role: Literal["prefill", "decode"] = (
            "prefill" if pod["spec"]["containers"][0]["name"] == "prefill" else "decode"
        )
        behaviour = Behaviour(token_s=self._token_s, slots=SLOTS)
        fake = FakeInstance(role, pod["metadata"]["name"], behaviour=behaviour)
        fake.address = f"{pod['status']['podIP']}:{self.port}"
        await fake.restart()
        self._of[pod["metadata"]["name"]] = fake
        set_ready(True)

    async def ended(self, pod: Object) -> bool:
        await asyncio.Event().wait()
        return True

    async def stop(self, pod: Object, grace_s: float) -> None:
        fake = self._of.pop(pod["metadata"]["name"], None)
        if fake is None:
            return
        fake.behaviour.draining = True
        try:
            async with asyncio.timeout(grace_s):
                while fake.num_open_calls:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self.ended_early.append(fake.name)
        await fake.kill()

    def log(self, pod: Object) -> str:
        return ""

    async def close(self) -> None:
        """Ends those that are left."""
        for fake in self._of.values():
            await fake.kill()
