"""Names and specs of a request's pages, which writer and reader compute independently."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from engine.kv_layout import PageLayout
from engine.scheduling.block_hash import extend_block_hashes
from engine.scheduling.request import Request
from kv_transfer.page.format import PageSpec, tail_hash


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
        space = fingerprint if key is None else _keyed(fingerprint, key)
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


def _keyed(fingerprint: bytes, key: bytes) -> bytes:
    """32 bytes that do not reveal the key."""
    return hashlib.blake2b(fingerprint, key=key, digest_size=32, person=b"tandem-names-v1").digest()
