"""What all connectors share."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kv_transfer.transfer.connector import IOThreads


def test_what_a_prompt_waits_for_comes_before_what_is_saved() -> None:
    threads, begun, gate, ended = IOThreads(1, "io"), threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        begun.set()
        gate.wait()

    threads.submit(hold)
    begun.wait()
    for name in ("save 0", "save 1"):
        threads.submit(partial(ended.append, name))
    for name in ("load 0", "load 1"):
        threads.submit(partial(ended.append, name), is_urgent=True)
    gate.set()
    threads.shutdown(20.0)
    assert ended == ["load 0", "load 1", "save 0", "save 1"], "all that was queued before the end"


def test_process_ends_with_a_job_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its thread, jobs that wait would keep their blocks for good."""
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)

    def raise_an_error() -> None:
        raise RuntimeError("a fault that the test asked for")

    threads = IOThreads(1, "io")
    threads.submit(raise_an_error)
    threads.shutdown(20.0)
    assert statuses == [1]
