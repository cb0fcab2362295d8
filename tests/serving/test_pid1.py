"""A process that is PID 1 ends at SIGTERM while it imports, as any other does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from serving.lifecycle import EXIT_TERMINATED

PROGRAM = """
import os, runpy, sys

class Slow:
    def find_spec(self, name, *_):
        if name in ("engine", "instance.server", "grpc", "torch"):
            print(name, flush=True)
            sys.stdin.read()

sys.meta_path.insert(0, Slow())
pid = int(sys.argv[2])
os.getpid = lambda: pid
runpy.run_module(sys.argv[1], run_name="__main__")
"""
"""Stops at its first import that takes long."""


@pytest.mark.parametrize("module", ["router", "prefill_service", "decode_service"])
@pytest.mark.parametrize(("pid", "status"), [(1, EXIT_TERMINATED), (2, -signal.SIGTERM)])
def test_sigterm_ends_a_service_that_still_imports(module: str, pid: int, status: int) -> None:
    command = [sys.executable, "-c", PROGRAM, module, str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the import"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == status
