"""Exceptions in the logs of the tests and of the processes that they start: each is a bug, but where a failpoint or a
fake raised it on purpose.

Every local stack's logs are read before its folder is removed, and those of a removed instance before that. Where a
test starts a service, or `tandem up`, as a process of its own, it gives the log to `LOGS` when that has ended. The test
run fails where one has a traceback, or an exception that asyncio or the garbage collector found. A test that makes such
an exception on purpose says so with `expected`. What is logged with an exception in a test's own process counts too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.client.registry import StackFolder
from tandem.local_stack.process import ManagedProcess

_SIGNS = re.compile(
    r"Traceback \(most recent call last\)|exception was never retrieved|Exception ignored in|Task was destroyed"
)
_ON_PURPOSE = re.compile(r"engine\.failpoints\.FailpointError|a fault that the test asked for")
_CANCELLED_AT_ITS_END = re.compile(r'ExecuteBatchError: Failed "execute_batch": .*SendStatusFromServerOperation')
"""grpcio's own, for a call that its client cancelled in the moment in which the server sent its status."""
_OWN = ("decode_service", "engine", "instance", "kv_transfer", "prefill_service", "router", "serving", "tandem")
"""Loggers of this process that count, beside lost tasks: grpcio logs exceptions of its own, where several event loops
have clients and servers, and for calls that end with their server."""
_LOST_TASK = re.compile(r"Task exception was never retrieved(?!.*asynchronous generator is already running)", re.DOTALL)
_NEXT_LINE = re.compile(r'^(?:\d\d:\d\d:\d\d\.\d{3} |\{"time")', re.MULTILINE)
_MAX_CHARS = 4000


def exceptions_in(log: str) -> list[str]:
    """The log lines that hold an exception, each with the lines that belong to it."""
    starts = [0, *(match.start() for match in _NEXT_LINE.finditer(log)), len(log)]
    lines = (log[start:end] for start, end in pairwise(starts))
    found = (line for line in lines if _SIGNS.search(line))
    return [line for line in found if not (_ON_PURPOSE.search(line) or _CANCELLED_AT_ITS_END.search(line))]


class ProcessLogs:
    """What was found in the logs of the processes that this test process has started."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._expected: list[re.Pattern[str]] = []

    @contextmanager
    def expected(self, pattern: str) -> Iterator[None]:
        """Exceptions whose text matches are on purpose in logs that are read inside the block."""
        self._expected.append(re.compile(pattern))
        try:
            yield
        finally:
            self._expected.pop()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Reads the logs of local stacks before they are removed, and what this process logs."""
        remove_folder, remove_files = StackFolder.remove, ManagedProcess.remove_files

        def read_and_remove_folder(folder: StackFolder) -> None:
            for file in sorted((folder.path / "logs").glob("*.log")):
                self.read(file)
            remove_folder(folder)

        def read_and_remove_files(process: ManagedProcess) -> None:
            self.read(process.spec.log_file)
            remove_files(process)

        handler = _ExceptionHandler(self)
        logging.getLogger().addHandler(handler)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(StackFolder, "remove", read_and_remove_folder)
                patch.setattr(ManagedProcess, "remove_files", read_and_remove_files)
                yield
        finally:
            logging.getLogger().removeHandler(handler)

    def read(self, file: Path) -> None:
        """Searches one log; a file that is missing has none."""
        if file.exists():
            self.search(file.name, file.read_text(errors="replace"))

    def search(self, name: str, log: str) -> None:
        """The same for a log that is no file."""
        for text in exceptions_in(log):
            if not any(pattern.search(text) for pattern in self._expected):
                self._found.append(f"{name}:\n{text[:_MAX_CHARS]}")

    def take_found(self) -> list[str]:
        """What was found since the last call."""
        found, self._found = self._found, []
        return found


class _ExceptionHandler(logging.Handler):
    """Searches what is logged with an exception."""

    def __init__(self, logs: ProcessLogs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info or not record.exc_info[0]:
            return
        text = self.format(record)
        if record.name.partition(".")[0] in _OWN or _LOST_TASK.search(text):
            self._logs.search(record.name, text)


LOGS = ProcessLogs()
"""Those of this run; a test takes them by the fixture `process_logs`."""
