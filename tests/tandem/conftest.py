"""What the tests of the `tandem` command share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def ignored_hangup() -> Iterator[signal.Handlers]:
    """SIGHUP is ignored, as under nohup; afterwards the handlers are as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield signal.SIG_IGN
    for number, handler in before.items():
        signal.signal(number, handler)
