"""One container as a process group of this machine: started, watched by its probes, started again, ended.

starting ──startup probe──▶ running ⇄ ready (readiness probe)
   ▲           │               │
   └─back-off──┴── its own end, startup or liveness probe failed

end: preStop, SIGTERM to the first process, at the end of the grace SIGKILL; with the first process all others go
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

import psutil

from serving.lifecycle import ParentBond
from tests.chart.fake_kube.container_view import Node, View
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import SetReady
from tests.chart.fake_kube.probes import Probe

_TREE = Path(__file__).parents[3]
"""Whose modules the services run, whichever is installed."""
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 300.0
_GONE_WITHIN_S = 20.0


class Container:
    """One container of one pod, and its successors after restarts."""

    def __init__(self, node: Node, pod: Object, spec: Object, folder: Path, bond: ParentBond) -> None:
        self.spec = spec
        self.num_restarts = 0
        self._node = node
        self._pod = pod
        self._folder = folder
        self._bond = bond
        self._log = folder / f"{spec['name']}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._group_is_gone = False

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def log(self) -> str:
        """All that it has written, its predecessors too."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    async def wait(self) -> int:
        """For the end of the one that runs; its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def run(self) -> int:
        """Starts it and waits for its end; its exit status."""
        await self._begin()
        return await self.wait()

    async def keep_running(self, set_ready: SetReady) -> None:
        """Until it is cancelled, which ends nothing: the process runs on."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            await self._begin()
            await self._live(set_ready)
            set_ready(False, self.num_restarts)
            await self.end(self._pod["spec"].get("terminationGracePeriodSeconds", 30))
            await asyncio.sleep(backoff_s)
            self.num_restarts, backoff_s = self.num_restarts + 1, min(2 * backoff_s, _MAX_BACKOFF_S)

    async def end(self, grace_s: float) -> int | None:
        """Returns when it is gone; its exit status, None if it never ran."""
        if self._process is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._pre_stop()
                if self.is_running:
                    self._process.send_signal(signal.SIGTERM)
                await self._process.wait()
        return await self.kill()

    async def kill(self) -> int | None:
        """At once, with all that it has started; returns when they are gone. Raises TimeoutError if they stay.

        A group is signalled once: later its number may be somebody else's.
        """
        if self._process is None:
            return None
        if not self._group_is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            async with asyncio.timeout(_GONE_WITHIN_S):
                while running_in({self._process.pid}):
                    await asyncio.sleep(0.01)
        self._group_is_gone = True
        return await self._process.wait()

    @property
    def group(self) -> int | None:
        """Of its processes, the last one that ran; None if it never did."""
        return None if self._process is None else self._process.pid

    async def _begin(self) -> None:
        self._process, self._group_is_gone = await self._start(None), False

    async def _live(self, set_ready: SetReady) -> None:
        """Returns at its own end, or when a probe says that it is to be ended."""
        await _first_of(self.wait(), self._given_up(set_ready))

    async def _given_up(self, set_ready: SetReady) -> None:
        startup, liveness, readiness = (self._probe(name) for name in ("startup", "liveness", "readiness"))
        if startup is not None and not await startup.starts():
            return
        alive = asyncio.Event().wait() if liveness is None else liveness.until(False)
        await _first_of(alive, self._tell_ready(readiness, set_ready))

    async def _tell_ready(self, readiness: Probe | None, set_ready: SetReady) -> None:
        while readiness is not None:
            await readiness.until(True)
            set_ready(True, self.num_restarts)
            await readiness.until(False)
            set_ready(False, self.num_restarts)
        set_ready(True, self.num_restarts)
        await asyncio.Event().wait()

    def _probe(self, name: str) -> Probe | None:
        spec = self.spec.get(f"{name}Probe")
        return None if spec is None else Probe(spec, self._pod, self._exec)

    async def _pre_stop(self) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop") or {}
        if self.is_running and "exec" in hook:
            await self._exec(hook["exec"]["command"])
        if self.is_running and "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])

    async def _exec(self, command: list[str]) -> int:
        process = await self._start(command)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _start(self, command: list[str] | None) -> asyncio.subprocess.Process:
        """The container's own command, or another one inside of it."""
        view = View(self._node, self._pod, self.spec, self._folder)
        argv = view.argv() if command is None else [view.local(word) for word in command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONPATH": str(_TREE), **view.environment()}
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**environment, **self._bond.environment()},
                pass_fds=self._bond.pass_fds,
                start_new_session=True,
            )


async def _first_of(*ways: Coroutine[Any, Any, object]) -> None:
    """Returns when one is over, with the others cancelled. Raises what went wrong in any."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def running_in(groups: Collection[int | None]) -> list[int]:
    """Processes of these groups, zombies not counted."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) in groups and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
