"""One small model for all tests that run real engine cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import lively_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
