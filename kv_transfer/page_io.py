"""One page to the store, or from it, on an I/O thread: sealed on the way out, verified on the way in. Never raises.

A page that is wrong is removed from the store, so that the next request writes it anew and does not trip over it again.
Where one page is wrong its successors may be too: `inspect` looks at them for their own sake.
"""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass

from engine import failpoints
from engine.failpoints import FailpointError
from kv_transfer.breaker import Breaker
from kv_transfer.loads import LoadOp
from kv_transfer.page import HEADER_BYTES, Buffer, PageError, check_header, check_payload, seal
from kv_transfer.page_memory import PageMemory
from kv_transfer.page_naming import PageName
from kv_transfer.production import SaveOp
from kv_transfer.store import BadValue, BlockStore, PageKey, StoreError

SKIPPED = "skipped"
STORE_DOWN = "store_down"
_DAMAGED = "page_"
_DELETE_PAUSES_S = (0.05, 0.2, 0.0)
"""After each try to remove a page."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IOEnd:
    """How one operation ended. `failure` is a word for a counter's label; `num_bytes` were moved in `duration_s`."""

    op: SaveOp | LoadOp
    failure: str | None
    num_bytes: int = 0
    duration_s: float = 0.0

    @property
    def is_damage(self) -> bool:
        """The store gave a page that is wrong."""
        return self.failure is not None and self.failure.startswith(_DAMAGED)


@dataclass(frozen=True, slots=True)
class PageIO:
    """What an I/O thread needs. `key` None switches digests off: neither made nor checked."""

    store: BlockStore
    memory: PageMemory
    key: bytes | None
    writer_epoch: bytes
    breaker: Breaker

    def run(self, op: SaveOp | LoadOp) -> IOEnd:
        """Carry out one operation."""
        if op.is_cancelled:
            return IOEnd(op, SKIPPED)
        if not self.breaker.allows():
            return IOEnd(op, STORE_DOWN)
        started = time.perf_counter()
        try:
            num_bytes = self._save(op) if isinstance(op, SaveOp) else self._load(op)
        except (PageError, BadValue) as error:
            self.breaker.record(good=True)  # the store works, the page does not
            self.delete(op.name.key)
            return IOEnd(op, _DAMAGED + error.reason, duration_s=time.perf_counter() - started)
        except Exception as error:
            self.breaker.record(good=False)
            return IOEnd(op, _reason(error), duration_s=time.perf_counter() - started)
        self.breaker.record(good=True)
        failure = "missing" if num_bytes is None else None
        return IOEnd(op, failure, num_bytes or 0, time.perf_counter() - started)

    def inspect(self, name: PageName) -> None:
        """Read one page for nobody, and remove it if it is wrong."""
        header, page = bytearray(HEADER_BYTES), bytearray(name.spec.payload_bytes)
        try:
            self._read(name, header, page)
        except (PageError, BadValue):
            self.delete(name.key)
        except Exception as error:
            _log.debug("a page could not be inspected: %s", _reason(error))

    def delete(self, key: PageKey) -> None:
        """Remove a page, if the store can: what it was too busy for is tried again, what it is too dead for is not."""
        for pause_s in _DELETE_PAUSES_S:
            try:
                self.store.delete(key)
            except Exception as error:
                if self.breaker.is_open:
                    break
                _log.debug("a page could not be removed: %s", _reason(error))
                time.sleep(pause_s)
            else:
                break

    def _save(self, op: SaveOp) -> int:
        failpoints.hit("kv.save")
        name = op.name
        if not name.spec.is_tail and self.store.contains(name.key, HEADER_BYTES + name.spec.payload_bytes):
            return 0
        page = self.memory.page_out(op.block_id)
        header = seal(name.spec, page, key=self.key, writer_epoch=self.writer_epoch)
        failpoints.hit("kv.store.put")
        self.store.put(name.key, (header, page))
        return HEADER_BYTES + len(page)

    def _load(self, op: LoadOp) -> int | None:
        failpoints.hit("kv.load")
        header, page = bytearray(HEADER_BYTES), self.memory.page_in(op.block_id)
        failpoints.hit("kv.store.get")
        if not self._read(op.name, header, page):
            return None
        self.memory.commit(op.block_id, page)
        return HEADER_BYTES + len(page)

    def _read(self, name: PageName, header: bytearray, page: Buffer) -> bool:
        """Fill both and verify them; False: there is no such page."""

        def check() -> None:
            check_header(header, name.spec, digest=self.key is not None)

        if not self.store.get_into(name.key, (header, page), check):
            return False
        check_payload(header, page, name.spec, key=self.key)
        return True


def _reason(error: Exception) -> str:
    if isinstance(error, StoreError):
        return f"store_{error.reason}"
    if isinstance(error, FailpointError):
        return "failpoint"
    if isinstance(error, OSError) and error.errno is not None:
        return f"store_{errno.errorcode.get(error.errno, str(error.errno)).lower()}"
    return f"store_{type(error).__name__.lower()}"
