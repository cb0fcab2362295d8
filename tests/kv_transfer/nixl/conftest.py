"""One template of processes for all tests of NIXL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kv_transfer.nixl.prefill_process import ProcessTemplate


@pytest.fixture(scope="session")
def template() -> Iterator[ProcessTemplate]:
    template = ProcessTemplate()
    yield template
    template.close()
