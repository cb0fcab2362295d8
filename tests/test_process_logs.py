"""The check over the logs of processes finds every exception, and nothing else."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest

from tandem.client.registry import StackFolder
from tests.process_logs import ProcessLogs, exceptions_in

FINE = "12:00:00.000 WARNING router attempt 1 of choice 0 failed: UNAVAILABLE\n"
TRACEBACK = """12:00:01.000 ERROR   serving.interceptor [r1] Generate failed
    | Traceback (most recent call last):
    |   File "x.py", line 1, in <module>
    | {error}
"""
BATCH_ERROR = (
    'grpc._cython.cygrpc.ExecuteBatchError: Failed "execute_batch": (<grpc._cython.cygrpc.{operation} object>,)'
)
LOST = """12:00:02.000 ERROR   asyncio Task exception was never retrieved
"""
UNRAISABLE = """Exception ignored in: <function f at 0x7f>
"""


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (FINE, 0),
        (FINE + TRACEBACK.format(error="ValueError: x") + FINE, 1),
        (FINE + LOST + FINE + UNRAISABLE, 2),
        (UNRAISABLE, 1),
        ('{"time": "t", "traceback": "Traceback (most recent call last):\\\\n  x"}\n' + FINE, 1),
        (TRACEBACK.format(error="engine.failpoints.FailpointError: kv.save") + FINE, 0),
        (TRACEBACK.format(error=BATCH_ERROR.format(operation="SendStatusFromServerOperation")), 0),
        (TRACEBACK.format(error=BATCH_ERROR.format(operation="SendMessageOperation")), 1),
    ],
)
def test_exceptions_are_found_one_for_each_line_of_the_log(log: str, count: int) -> None:
    assert len(exceptions_in(log)) == count


def test_the_logs_of_a_stack_are_read_before_they_are_removed(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, process_logs: ProcessLogs
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    logs = ProcessLogs()
    with logs.watched(), process_logs.expected("a bug|on purpose"):  # the run's own watch reads them too
        for error in ("ValueError: a bug", "KeyError: on purpose"):
            folder = StackFolder()
            (folder.path / "logs").mkdir()
            (folder.path / "logs" / "decode-0.log").write_text(FINE + TRACEBACK.format(error=error))
            with logs.expected("on purpose"):
                folder.remove()
            assert not folder.path.exists()
    [found] = logs.take_found()
    assert found.startswith("decode-0.log:\n12:00:01.000 ERROR")
    assert "a bug" in found
    assert logs.take_found() == []


def test_what_a_test_logs_with_an_exception_counts_where_it_is_ours(process_logs: ProcessLogs) -> None:
    logs = ProcessLogs()
    logged = [
        ("router.app", "in a call", "a bug"),
        ("router.app", "in a call", "a fault that the test asked for"),
        ("asyncio", "Task exception was never retrieved", "a bug"),
        ("asyncio", "Exception in callback PollerCompletionQueue._handle_events", "Event loop is closed"),
    ]
    with logs.watched(), process_logs.expected("a bug"):
        for name, message, text in logged:
            try:
                raise ValueError(text)
            except ValueError:
                logging.getLogger(name).exception(message)
        logging.getLogger("router.app").error("without one")
    first, second = logs.take_found()
    assert first.startswith("router.app:\nin a call\nTraceback")
    assert first.endswith("ValueError: a bug")
    assert second.startswith("asyncio:\nTask exception")
