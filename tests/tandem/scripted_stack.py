"""Local stacks whose members are small scripts: they start at once, and do what a test wants of a process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem import crew
from tandem.local_stack import LocalStack
from tandem.member import MemberSpec
from tandem.stack_settings import StackSettings
from tandem.topology import Topology

BECOMES_READY = """
import os, sys, time
from serving.lifetime import bind_to_parent
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
from serving.lifetime import bind_to_parent
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
"""Told to go, it ends when a file lies beside its ready file."""


def scripted(monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], newcomers: str = BECOMES_READY) -> None:
    """Makes every LocalStack run `scripts`, by member name; whoever is not named there runs `newcomers`."""

    class Scripted(Topology):
        def router(self, *addresses: Any) -> MemberSpec:
            return self._scripted(super().router(*addresses))

        def instance(self, name: str, address: str) -> MemberSpec:
            return self._scripted(super().instance(name, address))

        def _scripted(self, spec: MemberSpec) -> MemberSpec:
            script = scripts.get(spec.name, newcomers)
            argv = (sys.executable, "-c", script, spec.name, str(spec.ready_file), *spec.argv)
            return replace(spec, argv=argv)

    monkeypatch.setattr(crew, "Topology", Scripted)
    monkeypatch.setattr(LocalStack, "_wait_serving", lambda stack: None)  # there is no router behind these scripts


def settings(**fields: Any) -> StackSettings:
    told: dict[str, Any] = {"num_prefill": 0, "num_blocks": 64, "start_timeout_s": 20, **fields}
    return StackSettings(model=Path("unused"), model_name="unused", **told)


def until(stack: LocalStack, condition: Callable[[], bool], within_s: float = 30.0) -> list[str]:
    """Supervises until the condition holds; what was told meanwhile."""
    deadline_s, told = time.monotonic() + within_s, []
    while not condition():
        told += [event.what for event in stack.supervise()]
        assert time.monotonic() < deadline_s, told
        time.sleep(0.01)
    return told


def let_go(stack: LocalStack, name: str) -> None:
    """One that DRAINS may end now."""
    (stack.folder / "ready" / f"{name}.go").touch()
