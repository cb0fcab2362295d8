"""What the tests of commands share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tandem.commands.background import Background


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    """A router with one prefill and two decode instances, all fakes."""
    background = Background(tmp_path_factory.mktemp("model"))
    background.start()
    yield background
    background.stop()


@pytest.fixture
def no_other_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No running stack is found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
