"""The thread that reads pages out of peers' memory. It owns the reading agent; no other thread uses it.

    submit ─▶ queued ─▶ pages posted ──done──▶ tag posted ──done──▶ ended: success or "lease_ended"
                │              │                   │
                └─cancelled, or its load has a stuck read─▶ ended "skipped"
                               │                   │
                               ├──disconnected─────┴─▶ ended "nixl_remotedisconnect"
                               ├──another error─▶ stuck: `on_stuck`, as whether it still writes is unknown
                               └──rebuild: given up ─▶ ended "given_up"; wanted ─▶ queued again

`on_end` reports each end once, when nothing of the read can write to memory any more. A frozen peer makes a read that
never ends; the connector then gives it up, pins its blocks, and requests a rebuild when too many stay pinned. A rebuild
breaks the agent's connections, which ends its reads, destroys it and makes another. Before that, reads that are still
wanted get some time to end by themselves: a peer whose connection breaks in the middle of a read may abort (see
kv_transfer/nixl/agent.py), and healthy peers must not pay for a frozen one.

Peers of one agent are added when first read from, and kept while they are recently used:

    unknown ──first read──▶ known ──disconnected, its reads ended──▶ unknown
                              └──least recently used, nothing in flight──▶ unknown

A peer that has restarted has another epoch and so another name: a new peer; the old one is removed when it is least
recently used or fails. One thread does all of this, so no read of a peer runs while a peer is added or removed. An
error in it ends the process, and with that every read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine import failpoints
from engine.errors import EngineError
from kv_transfer.nixl.agent import Handle, NixlAgent, NixlDisconnected, NixlError, Region
from kv_transfer.nixl.transfers import TAG_BYTES, TransferMetadata
from kv_transfer.transfer.connector import GIVEN_UP, SKIPPED, start_thread
from kv_transfer.transfer.loader import Load, LoadOp
from serving.logging import Repeats

LEASE_ENDED = "lease_ended"
_READS_PER_PEER = 2
"""Whose pages move at once: while one is verified the next one moves, and no tag waits long behind pages."""
_NUM_TAGS = 1024
_MAX_PEERS = 256
_FOREVER_S = 1e9
_REBUILD_WAIT_S, _END_WAIT_S = 5.0, 1.0
"""For reads in flight to end by themselves before the agent is destroyed."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Read:
    """A few pages of one load, read in one operation."""

    owner: Load
    source: TransferMetadata
    ops: list[LoadOp]
    digests: list[bytes]
    """One for each operation; empty while digests are off."""
    deadline: float
    given_up_at: float = math.inf
    """When the connector noticed that its owner was aborted or given up."""
    post_s: float = 0.0
    """Seconds that it took to pass it to NIXL."""

    @property
    def late_at(self) -> float:
        """When it is given up, unless further pages of its load come."""
        return max(self.deadline, self.owner.moves_until)

    @property
    def is_cancelled(self) -> bool:
        """Not to be begun any more."""
        return all(op.is_cancelled for op in self.ops)


OnEnd = Callable[[Read, str | None, float], None]
"""Called with the read, its failure and its seconds, from any thread."""
OnStuck = Callable[[Read, str], None]
"""Called with the read and its failure, on the reading thread."""


@dataclass(slots=True, eq=False)
class Peer:
    """One producer. `pages` and `tags` are prepared lists of its memory."""

    name: str
    agent_metadata: bytes
    pages: Handle
    tags: Handle
    num_reads: int = 0
    """In flight."""
    num_moving: int = 0
    """Of these, those whose pages are in flight."""
    broken: bool = False
    """The connection is lost: nothing more is begun, and the peer is removed when nothing is in flight."""


class Peers:
    def __init__(self, agent: NixlAgent, *, num_layers: int, max_peers: int) -> None:
        self._agent = agent
        self._num_layers = num_layers
        self._max_peers = max_peers
        self._by_name: OrderedDict[str, Peer] = OrderedDict()  # least recently used first

    def get(self, metadata: TransferMetadata) -> Peer:
        """The producer of this transfer. Raises NixlError where it is unreachable or its metadata is inconsistent."""
        peer = self._by_name.get(metadata.agent_name)
        if peer is None:
            self._make_room()
            peer = self._by_name[metadata.agent_name] = self._add(metadata)
        elif peer.broken or peer.agent_metadata != metadata.agent_metadata:
            raise NixlError(ConnectionError(f"{metadata.agent_name} was lost, or its metadata has changed"))
        self._by_name.move_to_end(peer.name)
        return peer

    def remove_if_broken(self, peer: Peer) -> None:
        """Remove a broken peer once nothing of it is in flight."""
        if peer.broken and not peer.num_reads and self._by_name.get(peer.name) is peer:
            self._remove(peer)

    def remove_all(self) -> None:
        for peer in list(self._by_name.values()):
            self._remove(peer)

    def _add(self, metadata: TransferMetadata) -> Peer:
        name = self._agent.add_peer(metadata.agent_metadata)
        with contextlib.ExitStack() as undo:
            undo.callback(self._agent.remove_peer, name)
            if name != metadata.agent_name:
                raise NixlError(ConnectionError(f"metadata of {name!r} under the name {metadata.agent_name!r}"))
            pages = self._agent.prepare(metadata.pages(self._num_layers), name)
            undo.callback(self._agent.release_list, pages)
            tags = self._agent.prepare(metadata.tags, name)
            undo.pop_all()
        return Peer(name, metadata.agent_metadata, pages, tags)

    def _remove(self, peer: Peer) -> None:
        del self._by_name[peer.name]
        self._agent.release_list(peer.pages)
        self._agent.release_list(peer.tags)
        self._agent.remove_peer(peer.name)

    def _make_room(self) -> None:
        idle = [peer for peer in self._by_name.values() if not peer.num_reads]
        for peer in idle[: max(0, len(self._by_name) - self._max_peers + 1)]:
            self._remove(peer)


@dataclass(slots=True, eq=False)
class _ActiveRead:
    """One read in flight. `handle` is of its pages or of its tag, by `stage`."""

    read: Read
    peer: Peer
    handle: Handle
    tag_slot: int
    started: float
    stage: Literal["pages", "tag", "stuck"] = "pages"

    @property
    def is_wanted(self) -> bool:
        """Not given up, and it can still succeed."""
        return self.stage != "stuck" and not self.read.owner.holds_blocks


class PageReader:
    """Owns the thread. `make_agent` is called at once, and on the thread after each rebuild. The transport to each peer
    is logged once, except for `own_name`, from which only the self-test reads."""

    def __init__(
        self,
        make_agent: Callable[[], NixlAgent],
        pages: Region,
        *,
        own_name: str,
        on_end: OnEnd,
        on_stuck: OnStuck,
        on_rebuilt: Callable[[], None],
    ) -> None:
        self._make_agent = make_agent
        self._region = pages
        self._on_end = on_end
        self._on_stuck = on_stuck
        self._on_rebuilt = on_rebuilt
        self._jobs: queue.Queue[Read | Literal["rebuild", "end"]] = queue.Queue()
        self._queued: deque[Read] = deque()
        self._active: list[_ActiveRead] = []
        self._tags = np.zeros(_NUM_TAGS, dtype="<u8")
        self._tag_region = Region("DRAM", 0, self._tags.ctypes.data, TAG_BYTES, _NUM_TAGS)
        self._free_tag_slots = list(range(_NUM_TAGS))
        self._agent: NixlAgent | None = None
        self._peers: Peers
        self._page_list: Handle
        self._tag_list: Handle
        self._logged_peers = Repeats(_FOREVER_S)  # bounded: each process that has ever been read from is another peer
        self._logged_peers.is_repeat(own_name)
        self._connect()  # here, so that a problem is found at the start, and the first read need not wait
        self._thread = start_thread(self._run, "kv-nixl-reader")

    def submit(self, read: Read) -> None:
        self._jobs.put(read)

    def rebuild(self) -> None:
        """End every read that was given up (`owner.holds_blocks`). Returns at once."""
        self._jobs.put("rebuild")

    def shutdown(self, timeout_s: float) -> None:
        """End all reads; some may be left after `timeout_s`."""
        self._jobs.put("end")
        self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._poll_interval_s())
            except queue.Empty:
                self._advance()
                continue
            if job == "end":
                break
            if job == "rebuild":
                self._rebuild()
            elif isinstance(job, Read):
                self._queued.append(job)
                self._advance()
        for read in self._queued:
            self._on_end(read, SKIPPED, 0.0)
        self._let_end(_END_WAIT_S, wanted_only=False)
        self._destroy(keep_wanted=False)

    def _poll_interval_s(self) -> float | None:
        """Short for young reads, long for those that were given up; None: wait for a job."""
        if not self._active:
            return 0.0 if self._queued else None  # the reads that a queued one waited for have ended
        started = [active.started for active in self._active if active.is_wanted]
        if started:
            return min(2e-3, max(1e-4, (time.monotonic() - max(started)) / 20))
        return 0.02

    def _advance(self) -> None:
        self._step_all()
        waiting, self._queued = self._queued, deque()
        while waiting:
            read = waiting.popleft()
            if read.is_cancelled or self._is_load_stuck(read.owner):
                self._on_end(read, SKIPPED, 0.0)
            elif not self._begin(read):
                self._queued.append(read)
            else:
                self._step_all()  # over shared memory it took milliseconds, in which other reads may have got on

    def _is_load_stuck(self, load: Load) -> bool:
        """One of its reads is stuck: the step loop will give it up, and each further read would only pin blocks."""
        return any(active.stage == "stuck" and active.read.owner is load for active in self._active)

    def _step_all(self) -> None:
        for active in list(self._active):
            self._step(active)

    def _begin(self, read: Read) -> bool:
        """False: later, its peer is busy."""
        started = time.monotonic()
        try:
            failpoints.hit("kv.load")
            agent = self._connect()
            peer = self._peers.get(read.source)
            if peer.num_moving >= _READS_PER_PEER or not self._free_tag_slots:
                return False
            into = self._region.spans([op.block_id for op in read.ops])
            remote_ids = [read.source.block_ids[op.block_index] for op in read.ops]
            source = read.source.pages(self._region.num_layers).spans(remote_ids)
            handle = agent.make_read(self._page_list, into, peer.pages, source)
        except (NixlError, EngineError, failpoints.FailpointError) as error:
            _log.warning("pages of %s cannot be read: %s", read.source.agent_name, error)
            self._on_end(read, _reason(error), 0.0)
            return True
        active = _ActiveRead(read, peer, handle, self._free_tag_slots.pop(), started)
        peer.num_reads += 1
        peer.num_moving += 1
        self._active.append(active)
        self._step(active, is_new=True)
        return True

    def _step(self, active: _ActiveRead, *, is_new: bool = False) -> None:
        """Advance a read in flight as far as possible now."""
        agent = self._agent
        if agent is None or active.stage == "stuck":
            return
        try:
            if is_new:
                started = time.monotonic()
                done = agent.post(active.handle)
                active.read.post_s = time.monotonic() - started
            else:
                done = agent.is_done(active.handle)
            if done and active.stage == "pages":
                done = self._read_tag(agent, active)
        except NixlDisconnected as error:
            active.peer.broken = True
            self._end(active, error.reason)
        except NixlError as error:
            _log.error("a read from %s is stuck: %s", active.peer.name, error)
            active.peer.num_moving -= active.stage == "pages"  # it does not block its peer
            active.stage = "stuck"
            self._on_stuck(active.read, error.reason)
        else:
            if done:
                is_held = self._tags[active.tag_slot].tobytes() == active.read.source.tag
                self._end(active, None if is_held else LEASE_ENDED)

    def _read_tag(self, agent: NixlAgent, active: _ActiveRead) -> bool:
        """The pages are here: now the lease tag, after them. True: it is here too."""
        self._tags[active.tag_slot] = 0
        tag_index = active.read.source.tag_index
        handle = agent.make_read(self._tag_list, [active.tag_slot], active.peer.tags, [tag_index])
        agent.release_read(active.handle)
        active.handle, active.stage = handle, "tag"
        active.peer.num_moving -= 1
        return agent.post(handle)

    def _end(self, active: _ActiveRead, failure: str | None) -> None:
        assert self._agent is not None
        self._agent.release_read(active.handle)
        self._active.remove(active)
        self._free_tag_slots.append(active.tag_slot)
        active.peer.num_reads -= 1
        active.peer.num_moving -= active.stage == "pages"
        if failure is None and not self._logged_peers.is_repeat(active.peer.name):
            _log.info("pages of %s come over UCX %s", active.peer.name, self._agent.transport)
        self._peers.remove_if_broken(active.peer)
        self._on_end(active.read, failure, time.monotonic() - active.started)

    # The agent

    def _connect(self) -> NixlAgent:
        """The agent, made if there is none."""
        if self._agent is None:
            agent = self._make_agent()
            try:
                for region in (self._region, self._tag_region):
                    agent.register(region)
                self._page_list, self._tag_list = agent.prepare(self._region), agent.prepare(self._tag_region)
            except NixlError:
                agent.close()
                raise
            self._agent = agent
            self._peers = Peers(agent, num_layers=self._region.num_layers, max_peers=_MAX_PEERS)
        return self._agent

    def _rebuild(self) -> None:
        num_given_up = sum(active.read.owner.holds_blocks for active in self._active)
        _log.warning("rebuilding the reading agent to end %d reads that were given up", num_given_up)
        self._let_end(_REBUILD_WAIT_S, wanted_only=True)
        self._destroy(keep_wanted=True)
        self._on_rebuilt()
        self._advance()

    def _let_end(self, timeout_s: float, *, wanted_only: bool) -> None:
        """Begin nothing; wait until no read is in flight, or none that is wanted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(
            active.is_wanted if wanted_only else active.stage != "stuck" for active in self._active
        ):
            self._step_all()
            time.sleep(1e-3)

    def _destroy(self, *, keep_wanted: bool) -> None:
        """Break the connections, release everything, and end the reads; those still wanted return to the queue."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        ended, self._active = self._active, []
        if ended:
            agent.cut_connections()
        for active in ended:
            agent.release_read(active.handle)
            active.peer.num_reads -= 1
            self._free_tag_slots.append(active.tag_slot)
        self._peers.remove_all()
        agent.release_list(self._page_list)
        agent.release_list(self._tag_list)
        agent.close()
        for active in ended:
            if keep_wanted and active.is_wanted:
                self._queued.appendleft(active.read)
            else:
                self._on_end(active.read, GIVEN_UP, time.monotonic() - active.started)


def _reason(error: Exception) -> str:
    if isinstance(error, NixlError):
        return error.reason
    return "failpoint" if isinstance(error, failpoints.FailpointError) else "nixl_agent"
