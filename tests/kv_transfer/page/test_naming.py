"""Names are made when a page is read, and are those that its writer computes."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kv_transfer.page.naming import PageName, PageNames, PageNaming
from kv_transfer.transfer.loader import Loader
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT, NUM_FULL, NUM_PAGES, PROMPT, make_request, reader_of

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
