"""What the tests of the live page share."""

from __future__ import annotations

from tests.router.api.openai.conftest import run_http

__all__ = ["run_http"]
