"""What a holder tells a reader once per transfer: who it is, where its pages lie, and which of them the transfer has.

    holder: TransferMetadata ─▶ encode(key) ─▶ connector_metadata of the first event ─▶ decode(key, …) ─▶ reader

The reader trusts none of it: bytes are authenticated with the key of the digests before they are parsed (without a key
a plain checksum tells accidents alone), sizes are compared with what the reader's own layout says, block numbers with
the size of the pool, and the address range with the address space. That the range is one the holder has registered NIXL
itself checks, against `agent_metadata`.
"""

from __future__ import annotations

import hmac
from typing import Literal

import blake3
import msgspec

from kv_transfer.nixl_agent import Region

VERSION = 1
EPOCH_BYTES = 16
_MAC_BYTES = 32
_MAX_AGENT_METADATA_BYTES = 1 << 20
_MAX_NAME_LEN = 128
_ADDRESS_SPACE = 1 << 63
_LABEL = b"TNDMMETA"


class MetadataError(Exception):
    """Metadata that is not what a holder of this transfer would send."""


class TransferMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One transfer. The agent's name is as good as its process: it has the epoch in it."""

    version: int
    agent_name: str
    epoch: bytes
    agent_metadata: bytes
    memory_type: Literal["DRAM", "VRAM"]
    device_id: int
    pages_address: int
    page_bytes: int
    num_blocks: int
    words_address: int
    num_words: int
    word_index: int
    """The transfer's lease word; see nixl_words."""
    word: bytes
    """What it says for as long as the pages are held, 8 bytes."""
    block_ids: list[int]
    """Of the transfer's pages, the tail's last."""

    @property
    def pages(self) -> Region:
        """The holder's KV memory."""
        return Region(self.memory_type, self.device_id, self.pages_address, self.page_bytes, self.num_blocks)

    @property
    def words(self) -> Region:
        """The holder's lease words."""
        return Region("DRAM", 0, self.words_address, WORD_BYTES, self.num_words)


WORD_BYTES = 8


def encode(metadata: TransferMetadata, key: bytes | None) -> bytes:
    """The bytes for the wire."""
    body = msgspec.msgpack.encode(metadata)
    return _mac(body, key) + body


def decode(data: bytes, key: bytes | None, *, page_bytes: int, num_pages: int) -> TransferMetadata:
    """What `encode` was given, checked against what the reader knows. Raises MetadataError."""
    mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if not data:
        raise MetadataError("the holder sent no metadata of the nixl connector")
    if not hmac.compare_digest(mac, _mac(body, key)):
        raise MetadataError("the holder's metadata is not authentic: kv_secret_file or digest differ, or it is damaged")
    try:
        metadata = msgspec.msgpack.decode(body, type=TransferMetadata)
    except msgspec.MsgspecError as error:
        raise MetadataError(f"the holder's metadata cannot be read: {error}") from error
    for what, good in _checks(metadata, page_bytes, num_pages):
        if not good:
            raise MetadataError(f"the holder's metadata has a bad {what}")
    return metadata


def _checks(metadata: TransferMetadata, page_bytes: int, num_pages: int) -> list[tuple[str, bool]]:
    pages_end = metadata.pages_address + metadata.page_bytes * metadata.num_blocks
    words_end = metadata.words_address + WORD_BYTES * metadata.num_words
    return [
        ("version", metadata.version == VERSION),
        ("agent_name", 0 < len(metadata.agent_name) <= _MAX_NAME_LEN),
        ("epoch", len(metadata.epoch) == EPOCH_BYTES and metadata.epoch.hex() in metadata.agent_name),
        ("agent_metadata", 0 < len(metadata.agent_metadata) <= _MAX_AGENT_METADATA_BYTES),
        ("device_id", 0 <= metadata.device_id < 1 << 16),
        ("page_bytes", metadata.page_bytes == page_bytes),
        ("num_blocks", 0 < metadata.num_blocks < 1 << 31),
        ("pages_address", 0 < metadata.pages_address < pages_end <= _ADDRESS_SPACE),
        ("num_words", 0 < metadata.num_words < 1 << 31),
        ("words_address", 0 < metadata.words_address < words_end <= _ADDRESS_SPACE),
        ("word_index", 0 <= metadata.word_index < metadata.num_words),
        ("word", len(metadata.word) == WORD_BYTES and any(metadata.word)),
        ("number of block_ids", len(metadata.block_ids) == num_pages),
        ("block id", all(0 <= block_id < metadata.num_blocks for block_id in metadata.block_ids)),
    ]


def _mac(body: bytes, key: bytes | None) -> bytes:
    hasher = blake3.blake3(_LABEL) if key is None else blake3.blake3(_LABEL, key=key)
    hasher.update(body)
    return bytes(hasher.digest())
