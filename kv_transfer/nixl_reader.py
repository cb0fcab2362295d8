"""The thread that reads pages out of holders' memory. It owns the reading agent; nobody else touches it.

    submit ─▶ queued ─▶ pages posted ──done──▶ word posted ──done──▶ ended, well or "lease_ended"
                │              │                    │
                └─cancelled─▶ ended "skipped"       │
                               ├──disconnected──────┴─▶ ended "nixl_remotedisconnect"
                               ├──another error─▶ stuck: whether it still writes is unknown
                               └──rebuild: given up ─▶ ended "given_up"; wanted ─▶ queued again

An end is told once, through `on_end`, when nothing of the read can write to memory any more. A frozen peer makes a
read that never ends; the connector then gives it up, keeps its blocks in quarantine, and asks for a rebuild when that
is too much. A rebuild breaks the agent's connections, which ends its reads, destroys it and makes another. Before that,
what is still wanted may end by itself for a while: a holder whose connection breaks in the middle of a read may abort
(nixl_ucx), and it is not to blame for the others.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine import failpoints
from engine.errors import EngineError
from kv_transfer.nixl_agent import Handle, NixlAgent, NixlDisconnected, NixlError, Region
from kv_transfer.nixl_metadata import WORD_BYTES
from kv_transfer.nixl_peers import Peer, Peers
from kv_transfer.nixl_wire import GIVEN_UP, OnEnd, Read
from kv_transfer.page_io import SKIPPED

LEASE_ENDED = "lease_ended"
_READS_PER_PEER = 2
"""Whose pages move at once: while one is verified the next one moves, and no word waits long behind pages."""
_NUM_WORDS = 1024
_MAX_PEERS = 256
_REBUILD_WAIT_S, _END_WAIT_S = 5.0, 1.0
"""For reads in flight to end by themselves before the agent is destroyed."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Active:
    """One read in flight."""

    read: Read
    peer: Peer
    transfer: Handle
    word_slot: int
    started: float
    stage: Literal["pages", "word", "stuck"] = "pages"


class PageReader:
    """Implements Wire over NIXL. `make_agent` is called at once, and on the thread after each rebuild. The transport to
    each peer is logged once, but for `own_lender`, from which only the self-test reads."""

    def __init__(
        self,
        make_agent: Callable[[], NixlAgent],
        pages: Region,
        *,
        own_lender: str,
        on_end: OnEnd,
        on_rebuilt: Callable[[], None],
    ) -> None:
        self._make_agent = make_agent
        self._region = pages
        self._on_end = on_end
        self._on_rebuilt = on_rebuilt
        self._jobs: queue.SimpleQueue[Read | Literal["rebuild", "end"]] = queue.SimpleQueue()
        self._queued: deque[Read] = deque()
        self._active: list[_Active] = []
        self._words = np.zeros(_NUM_WORDS, dtype="<u8")
        self._free_words = list(range(_NUM_WORDS))
        self._agent: NixlAgent | None = None
        self._peers: Peers
        self._pages: Handle
        self._word_list: Handle
        self._named = {own_lender}  # peers whose transport was logged
        self._connect()  # here, so that what is wrong is known at the start, and the first read need not wait
        self._thread = threading.Thread(target=self._run, name="kv-nixl-reader", daemon=True)
        self._thread.start()

    def submit(self, read: Read) -> None:
        self._jobs.put(read)

    def rebuild(self) -> None:
        self._jobs.put("rebuild")

    def shutdown(self, timeout_s: float) -> bool:
        self._jobs.put("end")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._pause_s())
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
        for read in self._take_queued():
            self._on_end(read, SKIPPED, 0.0)
        self._let_end(_END_WAIT_S, wanted_only=False)
        self._destroy(GIVEN_UP, keep_wanted=False)

    def _pause_s(self) -> float | None:
        """Until the next look: short for young reads, long for those nobody waits for; None: there are none."""
        wanted = [active for active in self._active if not active.read.owner.holds_blocks and active.stage != "stuck"]
        if wanted:
            age_s = time.monotonic() - max(active.started for active in wanted)
            return min(2e-3, max(1e-4, age_s / 20))
        return 0.02 if self._active else None

    def _advance(self) -> None:
        self._step_all()
        waiting = self._take_queued()
        while waiting:
            read = waiting.popleft()
            if read.is_cancelled:
                self._on_end(read, SKIPPED, 0.0)
            elif not self._begin(read):
                self._queued.append(read)
            else:
                self._step_all()  # over shared memory it took milliseconds; what was waiting for a word may have it

    def _step_all(self) -> None:
        for active in list(self._active):
            self._step(active)

    def _take_queued(self) -> deque[Read]:
        waiting, self._queued = self._queued, deque()
        return waiting

    def _begin(self, read: Read) -> bool:
        """False: later, its peer is busy."""
        started = time.monotonic()
        try:
            failpoints.hit("kv.load")
            agent = self._connect()
            peer = self._peers.get(read.source)
            if peer.num_moving >= _READS_PER_PEER or not self._free_words:
                return False
            remote_ids = [read.source.block_ids[op.block_index] for op in read.ops]
            transfer = agent.read(self._pages, [op.block_id for op in read.ops], peer.pages, remote_ids)
        except (NixlError, EngineError, failpoints.FailpointError) as error:
            _log.warning("pages of %s cannot be read: %s", read.source.agent_name, error)
            self._on_end(read, _reason(error), 0.0)
            return True
        active = _Active(read, peer, transfer, self._free_words.pop(), started)
        peer.num_reads += 1
        peer.num_moving += 1
        self._active.append(active)
        self._step(active, is_new=True)
        return True

    def _step(self, active: _Active, *, is_new: bool = False) -> None:
        """Take a read in flight as far as it goes now."""
        agent = self._agent
        if agent is None or active.stage == "stuck":
            return
        try:
            done = self._post(agent, active) if is_new else agent.is_done(active.transfer)
            if done and active.stage == "pages":
                done = self._ask_word(agent, active)
        except NixlDisconnected as error:
            active.peer.broken = True
            self._end(active, error.reason)
        except NixlError as error:
            _log.error("a read from %s is stuck: %s", active.peer.name, error)
            active.stage = "stuck"
        else:
            if done:
                self._end(active, None if self._word_is_right(active) else LEASE_ENDED)

    def _post(self, agent: NixlAgent, active: _Active) -> bool:
        started = time.monotonic()
        try:
            return agent.post(active.transfer)
        finally:
            active.read.post_s = time.monotonic() - started

    def _ask_word(self, agent: NixlAgent, active: _Active) -> bool:
        """The pages are here: now the lease word, after them. True: it is here too."""
        word_index = active.read.source.word_index
        self._words[active.word_slot] = 0
        transfer = agent.read(self._word_list, [active.word_slot], active.peer.words, [word_index])
        agent.release(active.transfer)
        active.transfer, active.stage = transfer, "word"
        active.peer.num_moving -= 1
        return agent.post(transfer)

    def _word_is_right(self, active: _Active) -> bool:
        return bytes(self._words[active.word_slot].tobytes()) == active.read.source.word

    def _end(self, active: _Active, failure: str | None) -> None:
        assert self._agent is not None
        self._agent.release(active.transfer)
        self._active.remove(active)
        self._free_words.append(active.word_slot)
        active.peer.num_reads -= 1
        active.peer.num_moving -= active.stage == "pages"
        if failure is None:
            self._name_transport(active.peer)
        self._peers.drop_if_broken(active.peer)
        self._on_end(active.read, failure, time.monotonic() - active.started)

    def _name_transport(self, peer: Peer) -> None:
        if peer.name not in self._named and self._agent is not None:
            self._named.add(peer.name)
            _log.info("pages of %s come over UCX %s", peer.name, self._agent.transport)

    # The agent

    def _connect(self) -> NixlAgent:
        """The agent, made if there is none."""
        if self._agent is None:
            agent = self._make_agent()
            try:
                words = Region("DRAM", 0, self._words.ctypes.data, WORD_BYTES, _NUM_WORDS)
                for region in (self._region, words):
                    agent.register(region)
                self._pages, self._word_list = agent.prepare(self._region), agent.prepare(words)
            except NixlError:
                agent.close()
                raise
            self._agent = agent
            self._peers = Peers(agent, max_peers=_MAX_PEERS)
        return self._agent

    def _rebuild(self) -> None:
        num_given_up = sum(active.read.owner.holds_blocks for active in self._active)
        _log.warning("the reading agent is rebuilt, to end %d reads that were given up", num_given_up)
        self._let_end(_REBUILD_WAIT_S, wanted_only=True)
        self._destroy(GIVEN_UP, keep_wanted=True)
        self._on_rebuilt()
        self._advance()

    def _let_end(self, timeout_s: float, *, wanted_only: bool) -> None:
        """Begin nothing; wait until no read is in flight, or none that is wanted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(
            active.stage != "stuck" and not (wanted_only and active.read.owner.holds_blocks) for active in self._active
        ):
            self._step_all()
            time.sleep(1e-3)

    def _destroy(self, failure: str, *, keep_wanted: bool) -> None:
        """Break the connections, let go of everything, and end the reads; those still wanted go back to the queue."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        ended, self._active = self._active, []
        if ended:
            agent.cut()
        for active in ended:
            agent.release(active.transfer)
            active.peer.num_reads -= 1
            self._free_words.append(active.word_slot)
        self._peers.drop_all()
        agent.release_list(self._pages)
        agent.release_list(self._word_list)
        agent.close()
        for active in ended:
            if keep_wanted and not active.read.owner.holds_blocks and active.stage != "stuck":
                self._queued.appendleft(active.read)
            else:
                self._on_end(active.read, failure, time.monotonic() - active.started)


def _reason(error: Exception) -> str:
    if isinstance(error, NixlError):
        return error.reason
    return "failpoint" if isinstance(error, failpoints.FailpointError) else "nixl_agent"
