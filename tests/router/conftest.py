"""What the router's tests share: one model folder and a way to start a rig."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from router.request.validation import ServedModel
from tests.fakes.model_folder import write_model_folder
from tests.router.rig import Rig, running

Run = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(model_folder: Path) -> ServedModel:
    return ServedModel.from_folder(model_folder, "fake")


@pytest.fixture
def run(model: ServedModel, model_folder: Path) -> Run:
    """`async with run(prefill=2, decode=2) as rig`."""
    return partial(running, model, model_folder)
