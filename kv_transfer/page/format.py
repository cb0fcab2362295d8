"""Pages, as writer and reader compute them independently: the names of a request's pages, and the format of each.

A KV page is checked here: `check_header` compares the header, `check_payload` the digest; both are called by
`PageIO._read` in stores/page_io.py before a page is used. A page is a fixed header, then one KV block as it is in
memory: the same bytes in a file, Redis and LMCache.

    offset size  field
         0    8  magic "TNDMKV1\\0"
         8    2  format version            10    2  header length (256)
        12    4  flags: 1 = digest is set, 2 = tail page; others are rejected
        16   32  model fingerprint         48   32  layout digest
        80    4  shard                     84    4  number of tokens
        88   32  block hash               120   32  parent hash
       152    8  payload length, bytes    160   16  writer epoch
       176   32  digest: keyed BLAKE3 over bytes 0..175 and the payload; zero where switched off
       208    4  CRC-32 over the header without this field
       212   44  zero

Little-endian. The reader computes what every field except writer epoch, digest and CRC must be, and compares, before it
reads the payload where the store reads in parts. Any difference is a PageError: a miss that is counted and recomputed,
never a wrong token. Pages that NIXL reads from memory have no header; `NixlConnector._verify` in
kv_transfer/nixl/connector.py compares their digest.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import overload

import blake3

from engine.kv_layout import PageLayout
from engine.scheduling.block_hash import extend_block_hashes
from engine.scheduling.request import Request

FORMAT_VERSION = 1
HEADER_BYTES = 256
EPOCH_BYTES = 16
_MAGIC = b"TNDMKV1\0"
_HEADER = struct.Struct("<8sHHI32s32sII32s32sQ16s32sI44x")
_DIGESTED_BYTES = 176
_CRC_OFFSET, _PAD_OFFSET = 208, 212
_FLAG_DIGEST, _FLAG_TAIL = 1, 2
_NO_DIGEST = bytes(32)

Buffer = bytes | bytearray | memoryview


class PageError(Exception):
    """The page is not the expected one. `reason` is one word, fit for a counter's label."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class PageSpec:
    """What a page must be. Hashes are 32 bytes."""

    fingerprint: bytes
    layout_digest: bytes
    block_hash: bytes
    parent_hash: bytes
    num_tokens: int
    payload_bytes: int
    is_tail: bool = False
    shard: int = 0
    """Of the model, where a page has a part of it; 0: all of it."""


_SPEC_FIELDS = ("fingerprint", "layout_digest", "shard", "num_tokens", "block_hash", "parent_hash", "payload_bytes")
spec_values = attrgetter(*_SPEC_FIELDS)
"""What a header has of a PageSpec, in its order; the tail is a flag."""


def seal(spec: PageSpec, payload: Buffer, *, key: bytes | None, writer_epoch: bytes) -> bytes:
    """The header for `payload`. `key` None leaves the payload without a digest."""
    if len(payload) != spec.payload_bytes:
        raise ValueError(f"the page has {len(payload)} bytes; expected {spec.payload_bytes}")
    flags = (_FLAG_DIGEST if key is not None else 0) | (_FLAG_TAIL if spec.is_tail else 0)
    start = (_MAGIC, FORMAT_VERSION, HEADER_BYTES, flags)
    header = bytearray(_HEADER.pack(*start, *spec_values(spec), writer_epoch, _NO_DIGEST, 0))
    if key is not None:
        header[_DIGESTED_BYTES:_CRC_OFFSET] = _digest(header, payload, key)
    header[_CRC_OFFSET:_PAD_OFFSET] = _crc(header).to_bytes(4, "little")
    return bytes(header)


def check_header(header: Buffer, spec: PageSpec, *, digest: bool) -> None:
    """Compare every field with what it must be. `digest`: reject a page that has none. Raises PageError."""
    if len(header) != HEADER_BYTES:
        raise PageError("header_length")
    magic, version, header_bytes, flags, *fields, _epoch, digest_field, crc = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise PageError("magic")
    if (version, header_bytes) != (FORMAT_VERSION, HEADER_BYTES):
        raise PageError("format_version")
    if crc != _crc(header):
        raise PageError("header_crc")
    if any(bytes(header[_PAD_OFFSET:])):
        raise PageError("padding")
    has_digest = bool(flags & _FLAG_DIGEST)
    if flags & ~(_FLAG_DIGEST | _FLAG_TAIL) or bool(flags & _FLAG_TAIL) != spec.is_tail:
        raise PageError("flags")
    if (digest and not has_digest) or (not has_digest and digest_field != _NO_DIGEST):
        raise PageError("no_digest")
    for name, found, expected in zip(_SPEC_FIELDS, fields, spec_values(spec), strict=True):
        if found != expected:
            raise PageError(name)


def check_payload(header: Buffer, payload: Buffer, spec: PageSpec, *, key: bytes | None) -> None:
    """Compare the digest of a page whose header was checked. `key` None: the length alone. Raises PageError."""
    if len(payload) != spec.payload_bytes:
        raise PageError("payload_bytes")
    if key is None:
        return
    if not hmac.compare_digest(bytes(header[_DIGESTED_BYTES:_CRC_OFFSET]), _digest(header, payload, key)):
        raise PageError("digest")


def _digest(header: Buffer, payload: Buffer, key: bytes) -> bytes:
    hasher = blake3.blake3(memoryview(header)[:_DIGESTED_BYTES], key=key)
    hasher.update(payload)
    return bytes(hasher.digest())


def _crc(header: Buffer) -> int:
    view = memoryview(header)
    return zlib.crc32(view[_PAD_OFFSET:], zlib.crc32(view[:_CRC_OFFSET]))


# Names


@dataclass(frozen=True, slots=True)
class PageKey:
    """Names a page. `scope` is empty for a full block, which requests share, and SHA-256(transfer_id) for a tail."""

    space: bytes
    """As of PageNaming."""
    block_hash: bytes
    scope: bytes = b""

    @property
    def parts(self) -> tuple[str, ...]:
        """The key as path components of hex digits; they never contain a string that a user sent."""
        space, name = self.space[:8].hex(), self.block_hash.hex()
        if self.scope:
            return ("v1", space, "transfers", self.scope.hex(), name)
        return ("v1", space, name[:2], name)


@dataclass(frozen=True, slots=True)
class PageName:
    key: PageKey
    spec: PageSpec


@dataclass(frozen=True, slots=True)
class PageOp:
    """One page to write or read."""

    block_index: int
    """Position in the request's block table."""
    block_id: int
    """Physical block."""


@dataclass(frozen=True, slots=True)
class PageNaming:
    """Names pages of one model in one layout. `fingerprint` is the model's, 32 bytes."""

    fingerprint: bytes
    layout: PageLayout
    layout_digest: bytes
    space: bytes
    """Begins every name, 32 bytes: pages that a reader must reject for their key have other names than its own."""

    @classmethod
    def of(cls, fingerprint: bytes, layout: PageLayout, key: bytes | None = None) -> PageNaming:
        """`key` is the one of the pages' digests, None: there are none."""
        space = fingerprint
        if key is not None:  # 32 bytes that do not reveal it
            space = hashlib.blake2b(fingerprint, key=key, digest_size=32, person=b"tandem-names-v1").digest()
        return cls(fingerprint, layout, layout.digest, space)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def num_full_blocks(self, request: Request) -> int:
        """Full blocks of the tokens whose KV moves."""
        return request.num_initial_tokens // self.block_size

    def num_tail_tokens(self, request: Request) -> int:
        """Tokens in the last, unfilled block; 0: there is none."""
        return request.num_initial_tokens % self.block_size

    def full_block(self, hashes: list[bytes], root: bytes, index: int) -> PageName:
        """The page of full block `index` of a chain of hashes; requests with the same tokens share it."""
        parent = hashes[index - 1] if index else root
        return PageName(PageKey(self.space, hashes[index]), self._spec(hashes[index], parent, self.block_size))

    def tail(self, request: Request, hashes: list[bytes], transfer_id: str) -> PageName:
        """The page of a request's unfilled last block; it belongs to the transfer."""
        num_full = self.num_full_blocks(request)
        parent = hashes[num_full - 1] if num_full else request.root_hash
        token_ids = request.token_ids[num_full * self.block_size : request.num_initial_tokens]
        identity = tail_hash(transfer_id, parent, token_ids)
        scope = hashlib.sha256(transfer_id.encode()).digest()
        spec = self._spec(identity, parent, len(token_ids), is_tail=True)
        return PageName(PageKey(self.space, identity, scope), spec)

    def private_page(self) -> PageName:
        """A tail page of no transfer, with a random name that no request has: for a connector's self-test."""
        identity, scope = os.urandom(32), os.urandom(32)
        return PageName(PageKey(self.space, identity, scope), self._spec(identity, bytes(32), 1, is_tail=True))

    def block_hashes(self, request: Request) -> list[bytes]:
        """Hashes of all full blocks of the tokens whose KV moves. The request is not changed."""
        num_full = self.num_full_blocks(request)
        hashes = request.block_hashes[:num_full]
        if len(hashes) < num_full:
            token_ids = request.token_ids[: num_full * self.block_size]
            extend_block_hashes(hashes, request.root_hash, token_ids, self.block_size)
        return hashes

    def _spec(self, identity: bytes, parent: bytes, num_tokens: int, *, is_tail: bool = False) -> PageSpec:
        return PageSpec(
            fingerprint=self.fingerprint,
            layout_digest=self.layout_digest,
            block_hash=identity,
            parent_hash=parent,
            num_tokens=num_tokens,
            payload_bytes=self.layout.bytes_per_block,
            is_tail=is_tail,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PageNames(Sequence[PageName]):
    """Names of a request's first `num_full` blocks, and of its tail if there is one. Each is made when it is read: a
    long prompt has thousands of pages, and the step loop waits for none of their names."""

    naming: PageNaming
    hashes: list[bytes]
    root: bytes
    num_full: int
    tail: PageName | None = None

    def __len__(self) -> int:
        return self.num_full + (self.tail is not None)

    @overload
    def __getitem__(self, index: int) -> PageName: ...
    @overload
    def __getitem__(self, index: slice) -> list[PageName]: ...
    def __getitem__(self, index: int | slice) -> PageName | list[PageName]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        if self.tail is not None and number == self.num_full:
            return self.tail
        return self.naming.full_block(self.hashes, self.root, number)


def tail_hash(transfer_id: str, parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of an unfilled last block, unique to its transfer."""
    digest = hashlib.sha256(b"tandem-tail-v1")
    for part in (transfer_id.encode(), parent_hash, struct.pack(f"<{len(token_ids)}q", *token_ids)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
