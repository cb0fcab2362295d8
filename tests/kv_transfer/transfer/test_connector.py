"""What all connectors share."""

from __future__ import annotations

import pytest

from kv_transfer.transfer.connector import IOThreads


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
