"""The stack that the end-to-end tests talk to: real processes, started once per session, idle between tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.checker import wait_idle
from tests.faults.rig import Rig
from tests.lively import checkpoint, prompts, reference, rig_settings

__all__ = ["checkpoint", "prompts", "reference"]

FAILPOINTS = {
    "prefill-0": ("engine.step", "prefill.accepted", "prefill.first_token", "kv.save"),
    "decode-0": ("engine.step", "decode.reserved", "decode.loaded", "decode.after_token", "kv.load"),
}


@pytest.fixture(scope="session")
def shared_rig(checkpoint: Path) -> Iterator[Rig]:
    rig = Rig(rig_settings(checkpoint), failpoints=FAILPOINTS)
    rig.start()
    try:
        yield rig
    finally:
        rig.stop()


@pytest.fixture
def rig(shared_rig: Rig) -> Iterator[Rig]:
    """The session's stack, idle before and after."""
    wait_idle(shared_rig)
    yield shared_rig
    wait_idle(shared_rig)
