"""The reading thread, with a library whose reads end when the test says so."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from typing import cast

import pytest

from kv_transfer.nixl.agent import Handle, NixlAgent, NixlError, Region, Spans
from kv_transfer.nixl.reader import PageReader, Read
from kv_transfer.nixl.transfers import VERSION, TransferMetadata
from kv_transfer.page.format import PageName
from kv_transfer.transfer.connector import SKIPPED
from kv_transfer.transfer.loader import Load, LoadOp
from tests.waiting import wait_until

TAG = bytes(8)
"""What the tag of a read is before anything was read into it."""
_NAME = cast(PageName, None)  # the reader does not look at it


class FakeAgent(NixlAgent):
    """All reads end once one from the peer `answering` has begun. The first `num_failing` ones fail instead."""

    transport = "(none)"

    def __init__(self) -> None:
        self.answering = ""
        self.num_failing = 0
        self.can_cut = False
        self.begun: list[str] = []
        self._handles = itertools.count()
        self._peers: dict[Handle, str] = {}
        self._reads: dict[Handle, str] = {}

    def register(self, region: Region) -> None:
        del region

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def prepare(self, region: Region, peer: str | None = None) -> Handle:
        del region
        handle = next(self._handles)
        self._peers[handle] = peer or ""
        return handle

    def make_read(self, into: Handle, into_ids: Spans, source: Handle, source_ids: Spans) -> Handle:
        handle = next(self._handles)
        self._reads[handle] = self._peers[source]
        return handle

    def post(self, read: Handle) -> bool:
        self.begun.append(self._reads[read])
        if len(self.begun) <= self.num_failing:
            raise NixlError(RuntimeError("a fault that the test asked for"))
        return self.is_done(read)

    def is_done(self, read: Handle) -> bool:
        return self.answering in self.begun

    def release_read(self, read: Handle) -> None:
        del self._reads[read]

    def release_list(self, handle: Handle) -> None:
        del self._peers[handle]

    def cut_connections(self) -> int:
        if self.can_cut:
            return 0
        raise OSError(errno.EMFILE, "a fault that the test asked for")

    def remove_peer(self, name: str) -> None:
        del name

    def close(self) -> None:
        assert not self._reads
        assert not self._peers


def read_from(peer: str) -> Read:
    """A read of one block."""
    source = TransferMetadata(
        VERSION, peer, b"", peer.encode(), "DRAM", 0, pages_address=0, page_bytes=8, num_blocks=1,
        tags_address=0, num_tags=1, tag_index=0, tag=TAG, block_ids=[0],
    )  # fmt: skip
    load = Load(
        "request", "transfer", num_tokens=16, block_size=16, num_full_blocks=1, num_local_blocks=0, pages=[_NAME],
        block_ids=(0,), is_lookup=False, num_started=0,
    )  # fmt: skip
    return Read(load, source, [LoadOp(0, 0, load)], [], deadline=0.0)


class Reading:
    """A reader over a fake agent, and what it reported."""

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.ended: list[tuple[Read, str | None]] = []
        self.stuck: list[tuple[Read, str]] = []
        self.reader = PageReader(
            lambda: self.agent,
            Region("DRAM", 0, 0, 8, 1),
            own_name="",
            on_end=lambda read, failure, seconds: self.ended.append((read, failure)),
            on_stuck=lambda read, failure: self.stuck.append((read, failure)),
            on_rebuilt=lambda: None,
        )

    def submit(self, peer: str) -> Read:
        read = read_from(peer)
        self.reader.submit(read)
        return read


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.reader.shutdown(20.0)


def test_a_queued_read_begins_when_all_that_it_waited_for_end_in_the_same_moment(reading: Reading) -> None:
    """The busy peer's reads end while another peer's read is begun: nothing is in flight then, and no job comes."""
    for _ in range(2):
        reading.submit("busy")
    wait_until(lambda: reading.agent.begun == ["busy", "busy"])
    reading.submit("busy")
    reading.agent.answering = "other"
    reading.submit("other")
    wait_until(lambda: len(reading.ended) == 4, "a read was forgotten")
    assert {failure for _, failure in reading.ended} == {None}


def test_stuck_reads_are_reported_and_do_not_block_their_peer(reading: Reading) -> None:
    reading.agent.num_failing, reading.agent.answering, reading.agent.can_cut = 2, "peer", True
    stuck = [reading.submit("peer") for _ in range(2)]
    wait_until(lambda: len(reading.stuck) == 2)
    assert reading.stuck == [(read, "nixl_runtime") for read in stuck]
    later = reading.submit("peer")
    wait_until(lambda: reading.ended == [(later, None)], "the peer is blocked")


def test_a_stuck_read_leaves_the_rest_of_its_load_unread(reading: Reading) -> None:
    """What is queued is ended before the step loop gives the load up."""
    reading.agent.answering, reading.agent.can_cut = "other", True
    load = read_from("peer").owner
    reads = [Read(load, read_from("peer").source, [LoadOp(0, 0, load)], [], deadline=0.0) for _ in range(5)]
    reading.agent.num_failing = 1
    for read in reads:
        reading.reader.submit(read)
    reading.submit("other")
    wait_until(lambda: len(reading.ended) == 5, "a read of a load that has failed is begun")
    assert reading.stuck == [(reads[0], "nixl_runtime")]
    assert {read: failure for read, failure in reading.ended if read.owner is load} == dict.fromkeys(reads[1:], SKIPPED)
    assert reading.agent.begun.count("peer") == 1


def test_the_transport_to_each_peer_is_logged_once_and_long_gone_ones_take_no_memory(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    reading.agent.answering, num_peers = "peer-0", 1200
    with caplog.at_level("INFO"):
        for number in (*range(num_peers), num_peers - 1):
            reading.submit(f"peer-{number}")
        wait_until(lambda: len(reading.ended) == num_peers + 1)
    logged = [record.getMessage() for record in caplog.records if "come over" in record.msg]
    assert logged == [f"pages of peer-{number} come over UCX (none)" for number in range(num_peers)]
    assert len(reading.reader._logged_peers._seen_at_s) <= 1000


def test_process_ends_where_the_reads_of_an_agent_cannot_be_ended(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is free: reads could write on, and none that waits would ever begin."""
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    read = reading.submit("frozen")
    wait_until(lambda: reading.agent.begun)
    read.owner.holds_blocks = True
    reading.reader.rebuild()
    reading.reader.shutdown(20.0)
    assert statuses == [1]
