"""A transfer whose reader reads the blocks themselves: how it is described, lent, and checked by its reader.

    prefill  SaveOp per block ─▶ digest on an I/O thread ─▶ op_ended ─▶ TransferEvent(digests), no gaps
             request_finished("hand_over") ─▶ digest of the tail ─▶ TransferEvent(num_tokens, tail_digest)
             the lease ends ─▶ its lease tag is cleared ─▶ blocks freed
    wire     TransferMetadata ─▶ encode(key) ─▶ connector_metadata of the first event ─▶ decode(key, …)
    decode   reserve ─▶ KVProgress(connector_metadata) ─▶ source known ─▶ KVProgress(digests) … ─▶ LoadOps ─▶ reads

The reader trusts none of the metadata: bytes are authenticated with the key of the digests before they are parsed
(without a key a plain checksum detects accidents only), sizes are compared with the reader's own layout, block numbers
with the size of the pool, and the address range with the address space. NIXL itself checks, against `agent_metadata`,
that the range was registered. Metadata or digests that do not fit fail the load, and its pages are computed.

Lease tags are 8 bytes of registered memory for each transfer, by which a reader finds out, after it has read pages,
whether they were still held when it did:

    free ──acquire──▶ a value never used before ──release, before any page of the transfer is freed──▶ zero, free

After the pages a reader reads the tag. If it is still the one in the metadata, the lease had not ended when the pages
were read, and they had not been overwritten. This needs nothing of the other process but its memory, so it holds
for a producer that was frozen, for a reader that was, and with digests off.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import blake3
import msgspec
import numpy as np

from engine.core.messages import KVProgress, TransferEvent
from engine.scheduling.request import Request
from kv_transfer.nixl.agent import NixlAgent, Region, UcxSettings
from kv_transfer.page.format import Buffer, PageNaming, PageSpec, spec_values
from kv_transfer.transfer.lease import LeaseTable
from kv_transfer.transfer.loader import Load, Loader, LoadOp
from kv_transfer.transfer.producer import ProducedTransfer, Producer, SaveOp

# Metadata

VERSION = 1
EPOCH_BYTES = 16
TAG_BYTES = 8
MAC_BYTES = 32
_MAX_AGENT_METADATA_BYTES = 1 << 20
_MAX_NAME_LEN = 128
_ADDRESS_SPACE = 1 << 63
_METADATA_LABEL = b"TNDMMETA"


class MetadataError(Exception):
    """The metadata does not describe this transfer."""


class TransferMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who holds one transfer, where its pages are, and its lease tag. The agent's name contains the epoch, so a process
    that has restarted is another agent."""

    version: int
    agent_name: str
    epoch: bytes
    agent_metadata: bytes
    memory_type: Literal["DRAM", "VRAM"]
    device_id: int
    pages_address: int
    page_bytes: int
    num_blocks: int
    tags_address: int
    num_tags: int
    tag_index: int
    tag: bytes
    """Value of the lease tag for as long as the pages are held, 8 bytes."""
    block_ids: list[int]
    """Of the transfer's pages, the tail's last."""

    def pages(self, num_layers: int) -> Region:
        """The producer's KV memory. It has its pages in as many layers as the reader's, whose layout is the same."""
        span_bytes = self.page_bytes // num_layers
        return Region(
            self.memory_type, self.device_id, self.pages_address, span_bytes, self.num_blocks, num_layers=num_layers
        )

    @property
    def tags(self) -> Region:
        """The producer's lease tags."""
        return Region("DRAM", 0, self.tags_address, TAG_BYTES, self.num_tags)


def encode(metadata: TransferMetadata, key: bytes | None) -> bytes:
    body = msgspec.msgpack.encode(metadata)
    return _mac(body, key) + body


def decode(data: bytes, key: bytes | None, *, page_bytes: int, num_pages: int) -> TransferMetadata:
    """What `encode` was given, compared with what the reader expects. Raises MetadataError."""
    mac, body = data[:MAC_BYTES], data[MAC_BYTES:]
    if not data:
        raise MetadataError("the producer sent no metadata of the nixl connector")
    if not hmac.compare_digest(mac, _mac(body, key)):
        raise MetadataError(
            "the producer's metadata is not authentic: kv_secret_file or digest differ, or it is damaged"
        )
    try:
        metadata = msgspec.msgpack.decode(body, type=TransferMetadata)
    except msgspec.MsgspecError as error:
        raise MetadataError(f"the producer's metadata cannot be read: {error}") from error
    for field_name, is_good in _checks(metadata, page_bytes, num_pages):
        if not is_good:
            raise MetadataError(f"the producer's metadata has a bad {field_name}")
    return metadata


def _checks(metadata: TransferMetadata, page_bytes: int, num_pages: int) -> list[tuple[str, bool]]:
    pages_end = metadata.pages_address + metadata.page_bytes * metadata.num_blocks
    tags_end = metadata.tags_address + TAG_BYTES * metadata.num_tags
    return [
        ("version", metadata.version == VERSION),
        ("agent_name", 0 < len(metadata.agent_name) <= _MAX_NAME_LEN),
        ("epoch", len(metadata.epoch) == EPOCH_BYTES and metadata.epoch.hex() in metadata.agent_name),
        ("agent_metadata", 0 < len(metadata.agent_metadata) <= _MAX_AGENT_METADATA_BYTES),
        ("device_id", 0 <= metadata.device_id < 1 << 16),
        ("page_bytes", metadata.page_bytes == page_bytes),
        ("num_blocks", 0 < metadata.num_blocks < 1 << 31),
        ("pages_address", 0 < metadata.pages_address < pages_end <= _ADDRESS_SPACE),
        ("num_tags", 0 < metadata.num_tags < 1 << 31),
        ("tags_address", 0 < metadata.tags_address < tags_end <= _ADDRESS_SPACE),
        ("tag_index", 0 <= metadata.tag_index < metadata.num_tags),
        ("tag", len(metadata.tag) == TAG_BYTES and any(metadata.tag)),
        ("number of block_ids", len(metadata.block_ids) == num_pages),
        ("block id", all(0 <= block_id < metadata.num_blocks for block_id in metadata.block_ids)),
    ]


def _mac(body: bytes, key: bytes | None) -> bytes:
    hasher = blake3.blake3(_METADATA_LABEL) if key is None else blake3.blake3(_METADATA_LABEL, key=key)
    hasher.update(body)
    return bytes(hasher.digest())


# Digests

DIGEST_BYTES = 32
_DIGEST_LABEL = b"TNDMMEM1"
_DIGESTED_FIELDS = struct.Struct("<8s32s32sII32s32sQ?16s")


def page_digest(spec: PageSpec, page: Buffer, *, key: bytes, epoch: bytes) -> bytes:
    """Digest of a page that is read from memory and so has no header: keyed BLAKE3 over what a header would contain,
    and the page.

    The label differs from a stored page's magic, so that neither digest is ever valid for the other. The producer's
    epoch is included: what a process announced before it restarted is not valid after.
    """
    fields = _DIGESTED_FIELDS.pack(_DIGEST_LABEL, *spec_values(spec), spec.is_tail, epoch)
    hasher = blake3.blake3(fields, key=key)
    hasher.update(page)
    return bytes(hasher.digest())


# Prefill side


class LeaseTags:
    """Owns the tags of one core. Used in the step loop alone; readers see its memory."""

    def __init__(self, num_tags: int) -> None:
        self._tags = np.zeros(num_tags, dtype="<u8")
        self._free = list(range(num_tags - 1, -1, -1))
        # Random, so that no tag of this process is one of the process before it.
        self._last = secrets.randbits(62) | 1

    @property
    def region(self) -> Region:
        """The memory, to be registered."""
        return Region("DRAM", 0, self._tags.ctypes.data, TAG_BYTES, len(self._tags))

    def acquire(self) -> tuple[int, bytes] | None:
        """A free tag's index and its new value; None: all are in use."""
        if not self._free:
            return None
        index = self._free.pop()
        self._last += 1
        self._tags[index] = self._last
        return index, self._last.to_bytes(TAG_BYTES, "little")

    def release(self, index: int) -> None:
        """The transfer has ended; its pages may be freed after this."""
        self._tags[index] = 0
        self._free.append(index)


class LendingAgent:
    """Owns the agent whose memory peers read. It is made once, and neither rebuilt nor closed, and lives on without its
    owner: peers keep its metadata for as long as this process lives, and may read past the end of a lease
    (kv_transfer/nixl/agent.py)."""

    def __init__(self, epoch: bytes, pages: Region, tags: Region, settings: UcxSettings, key: bytes | None) -> None:
        self._epoch = epoch
        self._pages = pages
        self._tags = tags
        self._key = key
        self._agent = NixlAgent(f"lends-{epoch.hex()}", settings)
        self._agent.check_devices()
        for region in (pages, tags):
            self._agent.register(region)
        self._agent_metadata = self._agent.metadata()
        self._agent.keep()

    @property
    def name(self) -> str:
        return self._agent.name

    def describe(self, block_ids: Sequence[int], tag_index: int, tag: bytes) -> bytes:
        """Connector metadata of a transfer whose pages are in these blocks, the tail's last."""
        metadata = TransferMetadata(
            version=VERSION,
            agent_name=self._agent.name,
            epoch=self._epoch,
            agent_metadata=self._agent_metadata,
            memory_type=self._pages.memory_type,
            device_id=self._pages.device_id,
            pages_address=self._pages.address,
            page_bytes=self._pages.page_bytes,
            num_blocks=self._pages.num_pages,
            tags_address=self._tags.address,
            num_tags=self._tags.num_pages,
            tag_index=tag_index,
            tag=tag,
            block_ids=list(block_ids),
        )
        return encode(metadata, self._key)


class MemoryProducer(Producer):
    """Keeps a transfer's blocks until its lease ends. A hand-over request has all of its blocks from the beginning, so
    the first event names them all."""

    def __init__(self, naming: PageNaming, leases: LeaseTable, tags: LeaseTags, agent: LendingAgent) -> None:
        super().__init__(naming, leases)
        self._tags = tags
        self._agent = agent
        self._tag_indices: dict[str, int] = {}  # by transfer_id, leases that have not ended
        self._digests: dict[ProducedTransfer, dict[int, bytes]] = {}

    def add_digest(self, op: SaveOp, digest: bytes) -> None:
        """The digest of a page, before its `op_ended`."""
        if not op.owner.cancelled:
            self._digests.setdefault(op.owner, {})[op.block_index] = digest

    def _offer_event(self, transfer: ProducedTransfer, block_ids: Sequence[int]) -> TransferEvent:
        if len(block_ids) < transfer.num_pages or (acquired := self._tags.acquire()) is None:
            return TransferEvent(transfer.transfer_id, 0)  # without metadata its reader computes
        index, tag = acquired
        self._tag_indices[transfer.transfer_id] = index
        metadata = self._agent.describe(block_ids[: transfer.num_pages], index, tag)
        return TransferEvent(transfer.transfer_id, 0, connector_metadata=metadata)

    def _progress_event(self, transfer: ProducedTransfer, first: int, num_ready: int, *, is_end: bool) -> TransferEvent:
        digests = self._digests.get(transfer, {})
        new = [digests.pop(index) for index in range(first, num_ready) if index in digests]
        return TransferEvent(
            transfer.transfer_id,
            num_ready,
            digests=new,
            num_tokens=transfer.num_tokens if is_end else None,
            tail_digest=digests.pop(transfer.num_full_blocks, b"") if is_end else b"",
        )

    def _is_in_use(self, transfer: ProducedTransfer) -> bool:
        return transfer.num_in_flight > 0 or not transfer.cancelled

    def _end(self, transfer_id: str) -> None:
        index = self._tag_indices.pop(transfer_id, None)
        if index is not None:
            self._tags.release(index)
        transfer = self._by_transfer.get(transfer_id)
        if transfer is not None:
            self._digests.pop(transfer, None)
        super()._end(transfer_id)


# Decode side


@dataclass(slots=True)
class Source:
    """Where the pages of one load are. `digests` has one for each announced page, unless they are off."""

    metadata: TransferMetadata
    digests: list[bytes] = field(default_factory=list)


class MemoryLoader(Loader):
    """Checks the producer's announcements before it uses them. `key` None: digests are off.

    Each read has a deadline of its own, which the connector watches instead of `next_deadline`.
    """

    def __init__(self, naming: PageNaming, *, load_timeout_s: float, key: bytes | None) -> None:
        super().__init__(naming, load_timeout_s=load_timeout_s)
        self._key = key
        self._sources: dict[str, Source] = {}

    def source(self, op: LoadOp) -> Source:
        """Where this operation's page is. The operation is one that `take_ops` has just returned."""
        return self._sources[op.owner.request_id]

    def request_finished(self, request: Request) -> bool:
        self._sources.pop(request.request_id, None)
        return super().request_finished(request)

    def handle_progress(self, command: KVProgress, now: float) -> None:
        load = self._loads.get(command.request_id)
        if load is None or load.failure is not None or load.complete:
            return
        if command.failed is None and (problem := self._add_announcement(load, command)) is not None:
            command = KVProgress(command.request_id, 0, failed=problem)
        super().handle_progress(command, now)

    def _add_announcement(self, load: Load, command: KVProgress) -> str | None:
        """Keep metadata and digests; returns what is wrong with them."""
        source = self._sources.get(load.request_id)
        if source is None and (command.connector_metadata or command.num_ready_blocks or command.num_tokens):
            try:
                metadata = decode(
                    command.connector_metadata,
                    self._key,
                    page_bytes=self._naming.layout.bytes_per_block,
                    num_pages=len(load.pages),
                )
            except MetadataError as error:
                return str(error)
            source = self._sources[load.request_id] = Source(metadata)
        if source is None or self._key is None:
            return None
        source.digests += command.digests
        num_full = min(command.num_ready_blocks, load.num_full_blocks)
        num_announced = len(load.pages) if command.num_tokens == load.num_tokens else num_full
        if any(len(digest) != DIGEST_BYTES for digest in command.digests) or len(source.digests) < num_announced:
            return f"{len(source.digests)} good digests for {num_announced} pages: is digest off at the producer?"
        if len(source.digests) > len(load.pages):
            return f"{len(source.digests)} digests for {len(load.pages)} pages"
        return None
