"""One NIXL agent over UCX, typed: what this package calls of the library, with its errors as ours.

    made ─▶ register_pages, register_words ─▶ add_peer ⇄ remove_peer; prepare ─▶ read ─▶ state … ─▶ release ─▶ close

NIXL's own Python wrapper is passed by for one number that it fixes: how long the progress thread sleeps between two
looks. At its 0 a thread spins; on 2 busy cores an idle agent took 0.4 of one, and transfers were 3 to 5 times slower
than with the 100 µs set here. Not thread-safe: an agent belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engine.errors import EngineError
from kv_transfer.nixl_ucx import UcxSettings, cut_connections, ucx

_PROGRESS_DELAY_US = 100
MemoryType = Literal["DRAM", "VRAM"]
Handle = int
"""Of a prepared list or of a transfer."""


class NixlError(Exception):
    """NIXL refused or failed. `reason` is one word, fit for a counter's label."""

    def __init__(self, error: Exception) -> None:
        name = type(error).__name__.removeprefix("nixl").removesuffix("Error").lower()
        self.reason = f"nixl_{name or 'error'}"
        super().__init__(f"{self.reason}: {error}")


class NixlDisconnected(NixlError):
    """The peer is gone, or the connection to it. What was in flight has ended."""


@dataclass(frozen=True, slots=True)
class Region:
    """Equal spans, one after the other, in one piece of memory."""

    memory_type: MemoryType
    device_id: int
    address: int
    span_bytes: int
    num_spans: int


def load_bindings() -> Any:
    """The library. Raises EngineError that says how to get it."""
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise EngineError(
            f"the nixl connector needs the NIXL library: pip install 'nixl>=1.5.1,<1.6' ({error})"
        ) from error


class NixlAgent:
    """Owns one agent: its registrations, its peers and its transfers."""

    def __init__(self, name: str, settings: UcxSettings) -> None:
        self.name = name
        with ucx.prepared(settings) as self._mark:
            bindings = self._bindings = load_bindings()
            config = bindings.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = _PROGRESS_DELAY_US
            config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
            try:
                self._agent = bindings.nixlAgent(name, config)
                self._agent.createBackend("UCX", {})
            except Exception as error:
                raise EngineError(f"NIXL cannot make an agent over UCX: {error}") from error

    # Memory

    def register(self, region: Region) -> None:
        """Let this memory be read into and, by peers that know its metadata, from."""
        spans = [(region.address, region.span_bytes * region.num_spans, region.device_id, b"")]
        with self._errors():
            self._agent.registerMem(self._bindings.nixlRegDList(self._segment(region), spans), [])

    def metadata(self) -> bytes:
        """What a peer needs to read from here; complete once everything is registered."""
        with self._errors():
            return bytes(self._agent.getLocalMD())

    # Peers

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer known; returns its name."""
        with self._errors():
            name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer and close the connection to it. Its transfers and lists must have been released."""
        with contextlib.suppress(NixlError), self._errors():
            self._agent.invalidateRemoteMD(name)

    def prepare(self, region: Region, peer: str | None = None) -> Handle:
        """All spans of a region, of this agent or of a peer, to be named by their number in `read`. NIXL checks that
        they were registered."""
        row = (region.address, region.span_bytes, region.device_id, region.span_bytes, region.num_spans)
        table = np.array([row], dtype=np.uint64)
        name = self._bindings.NIXL_INIT_AGENT if peer is None else peer
        with self._errors():
            return int(self._agent.prepXferDlist(name, self._segment(region), table, []))

    def release_list(self, handle: Handle) -> None:
        with contextlib.suppress(NixlError), self._errors():
            self._agent.releasedDlistH(handle)

    # Transfers

    def read(self, into: Handle, into_ids: Sequence[int], source: Handle, source_ids: Sequence[int]) -> Handle:
        """Make a transfer of spans of a peer's list into spans of a list of ours; `post` begins it."""
        ids = (np.asarray(into_ids, dtype=np.int32), np.asarray(source_ids, dtype=np.int32))
        with self._errors():
            return int(self._agent.makeXferReq(self._bindings.NIXL_READ, into, ids[0], source, ids[1], b"", [], False))

    def post(self, transfer: Handle) -> bool:
        """Begin; True: it has ended already, well. Over shared memory this is where the bytes are copied."""
        with self._errors():
            return self._is_done(self._agent.postXferReq(transfer, b""))

    def is_done(self, transfer: Handle) -> bool:
        """Whether it has ended well. Raises NixlDisconnected where it has ended badly; another NixlError leaves open
        whether it has ended."""
        with self._errors():
            return self._is_done(self._agent.getXferStatus(transfer))

    def release(self, transfer: Handle) -> None:
        """Forget a transfer. In flight it goes on all the same."""
        with contextlib.suppress(NixlError), self._errors():
            self._agent.releaseXferReq(transfer)

    @property
    def transport(self) -> str:
        """What UCX chose for the peer that was added last."""
        return ucx.transport(self.name)

    def cut(self) -> int:
        """Break this agent's connections: transfers in flight over them end with NixlDisconnected. See nixl_ucx."""
        return cut_connections(self._mark)

    def close(self) -> None:
        """Destroy the agent. Nothing of it writes to memory any more. `cut` and release everything first."""
        del self._agent
        ucx.pass_on_log()

    # Inside

    def _segment(self, region: Region) -> Any:
        return self._bindings.VRAM_SEG if region.memory_type == "VRAM" else self._bindings.DRAM_SEG

    def _is_done(self, status: Any) -> bool:
        if status == self._bindings.NIXL_SUCCESS:
            return True
        if status == self._bindings.NIXL_IN_PROG:
            return False
        raise NixlError(RuntimeError(str(status)))

    @contextlib.contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except NixlError:
            raise
        except self._bindings.nixlRemoteDisconnectError as error:
            raise NixlDisconnected(error) from error
        except Exception as error:
            raise NixlError(error) from error
