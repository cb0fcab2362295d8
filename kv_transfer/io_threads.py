"""A few threads that run jobs in the order they came, so that the step loop never waits for a disk or a network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]


class IOThreads:
    """Runs jobs first come, first served. A job must not raise."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Daemons: a thread that hangs in a dead file system must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Returns at once."""
        self._jobs.put(job)

    def shutdown(self, timeout_s: float) -> bool:
        """Finish what was queued, then end the threads; False if some were still busy after `timeout_s`."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
