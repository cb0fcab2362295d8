"""Whatever is wrong with a page, reading it is a PageError and nothing else. Names are made when pages are read,
and are those that the writer computes."""

from __future__ import annotations

import dataclasses
import struct
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.request import Request
from kv_transfer.page.format import (
    HEADER_BYTES,
    PageError,
    PageName,
    PageNames,
    PageNaming,
    PageSpec,
    check_header,
    check_payload,
    seal,
    tail_hash,
)
from kv_transfer.transfer.loader import Loader
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT, NUM_FULL, NUM_PAGES, PROMPT, make_request, reader_of

KEY = bytes(range(32))
EPOCH = b"e" * 16
PAYLOAD = bytes(index * 7 % 251 for index in range(768))
SPEC = PageSpec(
    fingerprint=b"f" * 32,
    layout_digest=b"l" * 32,
    block_hash=b"h" * 32,
    parent_hash=b"p" * 32,
    num_tokens=16,
    payload_bytes=len(PAYLOAD),
)
HEADER = seal(SPEC, PAYLOAD, key=KEY, writer_epoch=EPOCH)
# Where each field lies, as the format's table says.
FIELDS = {
    "magic": (0, 8),
    "format version": (8, 2),
    "header length": (10, 2),
    "flags": (12, 4),
    "fingerprint": (16, 32),
    "layout digest": (48, 32),
    "shard": (80, 4),
    "number of tokens": (84, 4),
    "block hash": (88, 32),
    "parent hash": (120, 32),
    "payload length": (152, 8),
    "writer epoch": (160, 16),
    "digest": (176, 32),
    "crc": (208, 4),
    "padding": (212, 44),
}


def read(header: bytes, payload: bytes, spec: PageSpec = SPEC, key: bytes | None = KEY) -> None:
    """What a reader does."""
    check_header(header, spec, digest=key is not None)
    check_payload(header, payload, spec, key=key)


def resealed(header: bytearray) -> bytes:
    """The header with a valid CRC: what a forger without the key can write."""
    import zlib

    header[208:212] = zlib.crc32(header[212:], zlib.crc32(header[:208])).to_bytes(4, "little")
    return bytes(header)


def test_page_round_trip() -> None:
    assert len(HEADER) == HEADER_BYTES
    read(HEADER, PAYLOAD)
    read(HEADER, PAYLOAD, key=None)


def test_header_is_the_documented_layout() -> None:
    assert sum(size for _, size in FIELDS.values()) == HEADER_BYTES
    assert HEADER[:8] == b"TNDMKV1\0"
    assert struct.unpack_from("<HHI", HEADER, 8) == (1, 256, 1)
    assert HEADER[16:80] == SPEC.fingerprint + SPEC.layout_digest
    assert struct.unpack_from("<II", HEADER, 80) == (0, 16)
    assert HEADER[88:152] == SPEC.block_hash + SPEC.parent_hash
    assert struct.unpack_from("<Q", HEADER, 152) == (768,)
    assert HEADER[160:176] == EPOCH
    assert HEADER[212:] == bytes(44)


@pytest.mark.parametrize("name", FIELDS)
def test_every_bit_of_every_header_field_is_checked(name: str) -> None:
    offset, size = FIELDS[name]
    for bit in range(size * 8):
        damaged = bytearray(HEADER)
        damaged[offset + bit // 8] ^= 1 << bit % 8
        with pytest.raises(PageError):
            read(bytes(damaged), PAYLOAD)
        if name != "crc":  # and a forger who mends the CRC gains nothing
            with pytest.raises(PageError):
                read(resealed(damaged), PAYLOAD)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("fingerprint", b"F" * 32, "fingerprint"),
        ("layout_digest", b"L" * 32, "layout_digest"),
        ("shard", 1, "shard"),
        ("num_tokens", 15, "num_tokens"),
        ("block_hash", b"H" * 32, "block_hash"),
        ("parent_hash", b"P" * 32, "parent_hash"),
        ("is_tail", True, "flags"),
    ],
)
def test_another_page_is_rejected_by_the_name_of_the_field(field: str, value: object, reason: str) -> None:
    other = dataclasses.replace(SPEC, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(PageError) as caught:
        read(seal(other, PAYLOAD, key=KEY, writer_epoch=EPOCH), PAYLOAD)
    assert caught.value.reason == reason


@given(position=st.integers(0, len(PAYLOAD) * 8 - 1))
def test_every_flipped_payload_bit_is_found(position: int) -> None:
    damaged = bytearray(PAYLOAD)
    damaged[position // 8] ^= 1 << position % 8
    with pytest.raises(PageError, match="digest"):
        read(HEADER, bytes(damaged))


@given(length=st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1))
@settings(max_examples=60)
def test_every_truncation_is_found(length: int) -> None:
    whole = (HEADER + PAYLOAD)[:length]
    with pytest.raises(PageError):
        read(whole[:HEADER_BYTES], whole[HEADER_BYTES:])


@given(garbage=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
@settings(max_examples=60)
def test_garbage_is_never_a_page(garbage: bytes) -> None:
    with pytest.raises(PageError):
        read(garbage, PAYLOAD)


def test_another_key_is_rejected() -> None:
    with pytest.raises(PageError, match="digest"):
        read(seal(SPEC, PAYLOAD, key=b"k" * 32, writer_epoch=EPOCH), PAYLOAD)


def test_page_without_digest_is_rejected_where_digests_are_on() -> None:
    header = seal(SPEC, PAYLOAD, key=None, writer_epoch=EPOCH)
    read(header, PAYLOAD, key=None)
    with pytest.raises(PageError, match="no_digest"):
        read(header, PAYLOAD)


def test_unknown_flag_is_rejected() -> None:
    header = bytearray(HEADER)
    header[12] |= 4
    with pytest.raises(PageError, match="flags"):
        read(resealed(header), PAYLOAD)


def test_a_header_of_another_length_is_another_version() -> None:
    header = bytearray(HEADER)
    header[10:12] = (HEADER_BYTES + 1).to_bytes(2, "little")
    with pytest.raises(PageError, match=r"^format_version$"):
        check_header(resealed(header), SPEC, digest=True)


def test_without_digests_a_page_has_its_length_and_no_digest() -> None:
    header = seal(SPEC, PAYLOAD, key=None, writer_epoch=EPOCH)
    read(header, PAYLOAD, key=None)
    for payload in (PAYLOAD[:-1], PAYLOAD + b"x"):
        with pytest.raises(PageError, match=r"^payload_bytes$"):
            read(header, payload, key=None)
    forged = bytearray(header)
    forged[176:208] = HEADER[176:208]
    with pytest.raises(PageError, match=r"^no_digest$"):
        check_header(resealed(forged), SPEC, digest=False)


def test_names_of_another_key_are_others_and_do_not_reveal_it() -> None:
    names = {PageNaming.of(FINGERPRINT, LAYOUT, key).space for key in (None, KEY, KEY[::-1])}
    assert len(names) == 3
    assert KEY not in names


def test_a_tails_name_depends_on_the_whole_prompt_and_on_nothing_behind_it() -> None:
    naming = PageNaming.of(FINGERPRINT, LAYOUT)

    def tail(request: Request, transfer_id: str = "t") -> PageName:
        return naming.tail(request, naming.block_hashes(request), transfer_id)

    name, answered = tail(make_request(PROMPT)), make_request(PROMPT)
    answered.token_ids += [7, 8, 9, 10, 11]
    assert tail(answered) == name
    assert naming.block_hashes(answered) == naming.block_hashes(make_request(PROMPT))
    assert tail(make_request([0, *PROMPT[1:]])).key.block_hash != name.key.block_hash
    assert (name.spec.is_tail, name.spec.num_tokens) == (True, 3)
    assert tail(make_request(PROMPT), "u").key.scope not in (name.key.scope, b"")


def test_tail_hash_belongs_to_its_transfer() -> None:
    hashes = {
        tail_hash("t", b"p" * 32, [1, 2]),
        tail_hash("u", b"p" * 32, [1, 2]),
        tail_hash("t", b"q" * 32, [1, 2]),
        tail_hash("t", b"p" * 32, [1, 2, 0]),
        tail_hash("t", b"p" * 32, [1]),
    }
    assert len(hashes) == 5
    assert tail_hash("t", b"p" * 32, [1, 2]) in hashes


# Names

NAMING = PageNaming.of(FINGERPRINT, LAYOUT)


class _Recorded(PageNaming):
    """Records which full blocks are named."""

    __slots__ = ()
    named: ClassVar[list[int]] = []

    def full_block(self, hashes: list[bytes], root: bytes, index: int) -> PageName:
        self.named.append(index)
        return PageNaming.full_block(self, hashes, root, index)


@pytest.mark.parametrize("has_tail", [True, False])
def test_names_of_a_request_are_those_of_its_full_blocks_and_its_tail(has_tail: bool) -> None:
    request = reader_of()
    hashes = NAMING.block_hashes(request)
    expected = [NAMING.full_block(hashes, request.root_hash, index) for index in range(NUM_FULL)]
    tail = NAMING.tail(request, hashes, "transfer") if has_tail else None
    names = PageNames(NAMING, hashes, request.root_hash, NUM_FULL, tail)
    expected += [] if tail is None else [tail]
    assert list(names) == expected
    assert [names[index] for index in range(-len(expected), 0)] == expected
    assert names[2:] == expected[2:]
    with pytest.raises(IndexError):
        names[len(expected)]


def test_only_the_pages_that_are_read_are_named() -> None:
    loader = Loader(_Recorded.of(FINGERPRINT, LAYOUT), load_timeout_s=10.0, lookup=True)
    _Recorded.named.clear()
    request = make_request(PROMPT)
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=0.0)
    [first] = loader.take_ops()
    loader.op_ended(first, None, now=0.0)
    second, *_ = loader.take_ops()
    assert not _Recorded.named
    assert second.name == NAMING.full_block(NAMING.block_hashes(request), request.root_hash, 1)
    assert _Recorded.named == [1]
