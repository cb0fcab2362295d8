"""The examples run against the same rigs as the router's tests."""

from __future__ import annotations

from tests.router.conftest import model, model_folder, run

__all__ = ["model", "model_folder", "run"]
