"""NIXL's reads without NIXL."""

from __future__ import annotations

from kv_transfer.nixl_wire import Read


class FakeWire:
    """Reads that end when the test says so."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.rebuild_asked = False

    def submit(self, read: Read) -> None:
        self.reads.append(read)

    def rebuild(self) -> None:
        assert not self.rebuild_asked, "asked twice"
        self.rebuild_asked = True

    def shutdown(self, timeout_s: float) -> bool:
        del timeout_s
        return not self.reads
