"""Local stacks whose processes are small scripts: they start at once, and behave as a test needs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.local_stack import topology
from tandem.local_stack.process import ProcessSpec
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack
from tandem.local_stack.topology import Topology

BECOMES_READY = """
import os, sys, time
from serving.lifecycle import bind_to_parent
bind_to_parent()
print(f"log of {sys.argv[1]}", flush=True)
open(sys.argv[2], "w").write("ready")
time.sleep(60)
"""
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + BECOMES_READY
HAS_A_CHILD = "import subprocess; subprocess.Popen(['sleep', '60'])\n" + BECOMES_READY
DIES = "import sys; print('cannot load: disk on fire', flush=True); sys.exit(3)"
DRAINS = """
import os, signal, sys, time
from serving.lifecycle import bind_to_parent
bind_to_parent()
def drain(*_):
    print("draining", flush=True)
    while not os.path.exists(sys.argv[2] + ".go"):
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
open(sys.argv[2], "w").write("ready")
while True:
    time.sleep(1)
"""
"""After SIGTERM it ends when a file lies beside its ready file."""


def scripted(monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], others: str = BECOMES_READY) -> None:
    """Makes every LocalStack run `scripts`, by process name; processes not named there run `others`."""

    class Scripted(Topology):
        def router(self, *addresses: Any) -> ProcessSpec:
            return self._scripted(super().router(*addresses))

        def instance(self, name: str, address: str) -> ProcessSpec:
            return self._scripted(super().instance(name, address))

        def _scripted(self, spec: ProcessSpec) -> ProcessSpec:
            script = scripts.get(spec.name, others)
            argv = (sys.executable, "-c", script, spec.name, str(spec.ready_file), *spec.argv)
            return replace(spec, argv=argv)

    monkeypatch.setattr(topology, "Topology", Scripted)
    monkeypatch.setattr(LocalStack, "_wait_serving", lambda stack: None)  # the scripts are no routers


def settings(**fields: Any) -> StackSettings:
    values: dict[str, Any] = {"num_prefill": 0, "num_blocks": 64, "start_timeout_s": 20, **fields}
    return StackSettings(model=Path("unused"), model_name="unused", **values)


def until(stack: LocalStack, condition: Callable[[], bool], within_s: float = 30.0) -> list[str]:
    """Supervises until the condition holds; returns the events meanwhile."""
    deadline_s, texts = time.monotonic() + within_s, []
    while not condition():
        texts += [event.text for event in stack.supervise()]
        assert time.monotonic() < deadline_s, texts
        time.sleep(0.01)
    return texts


def let_go(stack: LocalStack, name: str) -> None:
    """One that DRAINS may end now."""
    (stack.folder / "ready" / f"{name}.go").touch()
