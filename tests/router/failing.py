"""Builders of pools in which something goes wrong, and the status that a client then gets."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.rig import Rig


def decodes(*behaviours: Behaviour) -> list[FakeInstance]:
    """One decode instance for each."""
    return [FakeInstance("decode", f"decode-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


def prefills(*behaviours: Behaviour) -> list[FakeInstance]:
    """One prefill instance for each."""
    return [FakeInstance("prefill", f"prefill-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


def busy(**fields: object) -> Behaviour:
    """An instance that is only taken when the other has failed."""
    return Behaviour(num_running=9, **fields)  # type: ignore[arg-type]


async def status_of(rig: Rig, **fields: Any) -> grpc.aio.AioRpcError:
    """The error that a request ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.generate(**fields)
    return raised.value
