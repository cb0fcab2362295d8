"""One small real stack for all floods, with short patience."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem import Client
from tests.faults.rig import Rig
from tests.lively import checkpoint, reference, rig_settings

__all__ = ["checkpoint", "reference"]

PATIENCE = ("--server-read-timeout-s", "2", "--server-write-timeout-s", "2")
# A flood takes the cores that a beat needs: nobody is to be taken for dead.
CALM = ("--pools-beat-timeout-s", "30", "--pools-core-silence-timeout-s", "30")


@pytest.fixture(scope="package")
def rig(checkpoint: Path) -> Iterator[Rig]:
    settings = rig_settings(checkpoint)
    rig = Rig(
        rig_settings(checkpoint, router_args=(*PATIENCE, *CALM), instance_args=(*settings.instance_args, *PATIENCE))
    )
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
