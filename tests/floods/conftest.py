"""One small real stack for all floods, with short patience."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem import Client
from tests.lively import checkpoint, reference, rig_settings
from tests.system.rig import Rig

__all__ = ["checkpoint", "reference"]

PATIENCE = ("--server-read-timeout-s", "2", "--server-write-timeout-s", "2")


@pytest.fixture(scope="package")
def rig(checkpoint: Path) -> Iterator[Rig]:
    rig = Rig(rig_settings(checkpoint, router_args=PATIENCE, instance_args=PATIENCE))
    rig.start()
    try:
        _warm_up(rig)
        yield rig
    finally:
        rig.stop()


def _warm_up(rig: Rig) -> None:
    """Brings up the threads that tokenise: they stay, and are no leak of whoever comes first."""
    with Client(rig.address) as client, ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda _: client.generate("once upon a time", max_tokens=1), range(96)))
