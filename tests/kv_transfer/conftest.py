"""One small model for all tests that run real engine cores; NIXL's agents end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.nixl.agent import NixlAgent
from tests.builders import lively_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(autouse=True)
def _closed_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lending agents live to the end of their process, and each has a thread that polls: a worker of pytest would have
    more of them with each test."""
    kept: list[NixlAgent] = []

    def keep(agent: NixlAgent) -> None:
        kept.append(agent)

    monkeypatch.setattr(NixlAgent, "keep", keep)
    yield
    for agent in kept:
        agent.close()
