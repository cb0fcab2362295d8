"""What can become of a stored page: every byte of its header, bits of its payload, other lengths, other pages under its
name, well-formed pages of other models, layouts, shards and keys. Each mutation has the reason that it must be counted
by.

Random where a choice is left, from a seed: the same list in every run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.scheduling.request import Request
from kv_transfer.page.format import EPOCH_BYTES, HEADER_BYTES, PageName, PageNaming, PageSpec, seal
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT, LAYOUT, make_request, page_content
from tests.kv_transfer.page.test_format import FIELDS, resealed

PROMPT = list(range(100, 100 + 3 * BLOCK_SIZE + 2))
NUM_FULL, NUM_PAGES = 3, 4
PAGE_BYTES = HEADER_BYTES + LAYOUT.bytes_per_block
_EPOCH = b"e" * EPOCH_BYTES
# Fields that a reader cannot predict are under the digest; a forged header with a valid CRC is found by the field's
# name.
_REASONS = {"format version": "format_version", "header length": "format_version", "number of tokens": "num_tokens"}
_REASONS |= {"payload length": "payload_bytes", "writer epoch": "digest"}


@dataclass(frozen=True, slots=True)
class Written:
    """The good pages of one request, the tail last, sealed as their writer does. `key` None: without digests."""

    names: list[PageName]
    payloads: list[bytes]
    key: bytes | None

    @classmethod
    def of(cls, number: int, key: bytes | None) -> Written:
        """Those of request `number`."""
        request = reader_of(number)
        naming = PageNaming.of(FINGERPRINT, LAYOUT, key)
        hashes = naming.block_hashes(request)
        names = [naming.full_block(hashes, request.root_hash, index) for index in range(NUM_FULL)]
        names.append(naming.tail(request, hashes, f"t{number}"))
        return cls(names, [page_content(request.token_ids, index) for index in range(NUM_PAGES)], key)

    def value(self, index: int) -> bytes:
        """Header and page, as they are stored."""
        return self.forged(index)

    def forged(self, index: int, *, payload_of: int | None = None, **changes: object) -> bytes:
        """A page that is right in itself: another spec, another key, another payload."""
        key: bytes | None = changes.pop("key", self.key)  # type: ignore[assignment]
        payload = self.payloads[index if payload_of is None else payload_of]
        spec: PageSpec = dataclasses.replace(self.names[index].spec, **changes)  # type: ignore[arg-type]
        payload = (payload * 2)[: spec.payload_bytes]
        return seal(spec, payload, key=key, writer_epoch=_EPOCH) + payload


Change = Callable[[Written, int], dict[int, bytes]]
"""New values by the index of their page, for a mutation of page `index`."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """It is counted by one of `reasons`."""

    label: str
    reasons: frozenset[str]
    change: Change


def reader_of(number: int) -> Request:
    """Request `number`, of a prompt that no other shares."""
    return make_request([number, *PROMPT[1:]], request_id=f"r{number}", transfer_id=f"t{number}", remote=True)


def catalogue(*, digest: bool) -> list[Mutation]:
    """All of them; without digests those that are promised to be found by the header and the length alone."""
    source = random.Random("mutations")
    made = [*_flipped_headers(source), *_lengths(source), *_misplaced(), *_foreign(), *_mended_headers(source)]
    made += [*_flipped_payloads(source), *_spliced(), *_garbage(source)]
    if digest:
        return [*made, *_keys()]
    return [mutation for mutation in made if mutation.reasons != {"digest"}]


def _one(label: str, reason: str, change: Callable[[Written, int], bytes]) -> Mutation:
    return Mutation(label, frozenset({reason}), lambda written, index: {index: change(written, index)})


def _flip(value: bytes, offset: int, mask: int) -> bytes:
    return value[:offset] + bytes([value[offset] ^ mask]) + value[offset + 1 :]


def _flipped_headers(source: random.Random) -> Iterator[Mutation]:
    """A bit of every byte of the header, its CRC left as it was."""
    for name, (offset, size) in FIELDS.items():
        reason = {"magic": "magic", "format version": "format_version", "header length": "format_version"}
        for position in range(offset, offset + size):
            mask = 1 << source.randrange(8)
            yield _one(
                f"{name}, byte {position}",
                reason.get(name, "header_crc"),
                lambda written, index, at=position, mask=mask: _flip(written.value(index), at, mask),  # type: ignore[misc]
            )


def _mended_headers(source: random.Random) -> Iterator[Mutation]:
    """The same by a forger who knows the format but not the key."""
    for name, (offset, size) in FIELDS.items():
        if name == "crc":
            continue
        for position in range(offset, offset + size):
            mask = 1 << source.randrange(8) if name != "flags" else 1 << source.randrange(2, 8)

            def change(written: Written, index: int, at: int = position, mask: int = mask) -> bytes:
                value = _flip(written.value(index), at, mask)
                return resealed(bytearray(value[:HEADER_BYTES])) + value[HEADER_BYTES:]

            reason = _REASONS.get(name, name.replace(" ", "_"))
            if name == "digest":  # where there must be none, one is refused
                yield Mutation(
                    f"mended {name}, byte {position}",
                    frozenset({"digest", "no_digest"}),
                    lambda written, index, change=change: {index: change(written, index)},  # type: ignore[misc]
                )
            else:
                yield _one(f"mended {name}, byte {position}", reason, change)


def _flipped_payloads(source: random.Random) -> Iterator[Mutation]:
    last = PAGE_BYTES * 8 - 1
    bits = [HEADER_BYTES * 8, last, *(source.randrange(HEADER_BYTES * 8, last) for _ in range(126))]
    for bit in bits:
        yield _one(
            f"payload, bit {bit}",
            "digest",
            lambda written, index, bit=bit: _flip(written.value(index), bit // 8, 1 << bit % 8),  # type: ignore[misc]
        )


def _lengths(source: random.Random) -> Iterator[Mutation]:
    """Shorter and longer. An empty value is "missing" to Redis, where GETRANGE cannot tell."""
    yield Mutation("empty", frozenset({"size", "missing"}), lambda _, index: {index: b""})
    fixed = [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, PAGE_BYTES - 1, PAGE_BYTES + 1, 2 * PAGE_BYTES]
    drawn = [source.randrange(2, PAGE_BYTES) for _ in range(40)]
    drawn += [source.randrange(PAGE_BYTES + 1, 4 * PAGE_BYTES) for _ in range(20)]
    for length in [*fixed, *drawn]:
        yield _one(
            f"{length} bytes",
            "size",
            lambda written, index, length=length: (written.value(index) * 4)[:length],  # type: ignore[misc]
        )


def _misplaced() -> Iterator[Mutation]:
    """Good pages under the names of others: swapped, copied, and another request's."""
    reasons = frozenset({"block_hash", "flags"})
    for step in range(1, NUM_PAGES):
        for _ in range(NUM_PAGES):
            yield Mutation(
                f"swapped with the page {step} further",
                reasons,
                lambda written, index, step=step: {  # type: ignore[misc]
                    index: written.value((index + step) % NUM_PAGES),
                    (index + step) % NUM_PAGES: written.value(index),
                },
            )
            yield Mutation(
                f"a copy of the page {step} further",
                reasons,
                lambda written, index, step=step: {index: written.value((index + step) % NUM_PAGES)},  # type: ignore[misc]
            )
    for _ in range(NUM_PAGES):
        yield _one(
            "another request's", "block_hash", lambda written, index: Written.of(99_999, written.key).value(index)
        )


def _foreign() -> Iterator[Mutation]:
    """Pages of others who write well: another model's weights, another layout, another shard, another chain."""
    other = hashlib.sha256(b"other").digest()
    for field in ("fingerprint", "layout_digest", "block_hash", "parent_hash"):
        for _ in range(NUM_PAGES):
            yield _one(
                f"of another {field}",
                field,
                lambda written, index, field=field: written.forged(index, **{field: other}),  # type: ignore[misc]
            )
    for _ in range(NUM_PAGES):
        yield _one("of another shard", "shard", lambda written, index: written.forged(index, shard=1))
        yield _one("of fewer tokens", "num_tokens", lambda written, index: written.forged(index, num_tokens=1))
        yield _one(
            "a tail for a full block, and the reverse",
            "flags",
            lambda written, index: written.forged(index, is_tail=not written.names[index].spec.is_tail),
        )
        for share in (0.5, 2):
            yield _one(
                f"of a layout {share} times as large",
                "size",
                lambda written, index, share=share: written.forged(  # type: ignore[misc]
                    index, layout_digest=other, payload_bytes=int(LAYOUT.bytes_per_block * share)
                ),
            )


def _keys() -> Iterator[Mutation]:
    """A writer with the key of yesterday, and one who makes no digests."""
    for _ in range(NUM_PAGES):
        yield _one("under an old key", "digest", lambda written, index: written.forged(index, key=b"o" * 32))
        yield _one("without a digest", "no_digest", lambda written, index: written.forged(index, key=None))


def _spliced() -> Iterator[Mutation]:
    """A good header with another good page behind it: what a torn write would leave."""
    for step in range(1, NUM_PAGES):
        for _ in range(NUM_PAGES):

            def change(written: Written, index: int, step: int = step) -> bytes:
                other = written.value((index + step) % NUM_PAGES)
                return written.value(index)[:HEADER_BYTES] + other[HEADER_BYTES:]

            yield _one(f"the payload of the page {step} further", "digest", change)
    for cut in (HEADER_BYTES, HEADER_BYTES + 1, PAGE_BYTES // 2, PAGE_BYTES - 16):

        def torn(written: Written, index: int, cut: int = cut) -> bytes:
            return written.value(index)[:cut] + bytes(PAGE_BYTES - cut)

        yield _one(f"zeros from byte {cut} on", "digest", torn)


def _garbage(source: random.Random) -> Iterator[Mutation]:
    for label, content in {
        "zeros": bytes(PAGE_BYTES),
        "ones": b"\xff" * PAGE_BYTES,
        "noise": source.randbytes(PAGE_BYTES),
        "text": (b"GET / HTTP/1.1\r\n" * PAGE_BYTES)[:PAGE_BYTES],
    }.items():
        for _ in range(NUM_PAGES):
            yield _one(label, "magic", lambda written, index, content=content: content)  # type: ignore[misc]
