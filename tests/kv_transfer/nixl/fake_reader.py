"""NIXL's reads without NIXL."""

from __future__ import annotations

from kv_transfer.nixl.reader import PageReader, Read


class FakeReader(PageReader):
    """Reads that end when the test says so."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.rebuild_requested = False

    def submit(self, read: Read) -> None:
        self.reads.append(read)

    def rebuild(self) -> None:
        assert not self.rebuild_requested, "asked twice"
        self.rebuild_requested = True

    def shutdown(self, timeout_s: float) -> None:
        del timeout_s
