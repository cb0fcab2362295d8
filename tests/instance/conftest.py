"""A prefill and a decode instance, each with a scripted core."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from decode_service.service import ROLE
from prefill_service.service import ROLE as PREFILL
from tests.instance.rig import Rig, model_folder, running


@pytest.fixture
async def decode(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(model_folder(tmp_path / "model"), ROLE) as rig:
        yield rig


@pytest.fixture
async def prefill(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(model_folder(tmp_path / "model"), PREFILL) as rig:
        yield rig
