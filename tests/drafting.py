"""Drafts whatever they cost: which step has some must not depend on this machine's speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from engine.scheduling import drafts


def _all_of_them(
    times: Sequence[float], _streams: int, candidates: Sequence[tuple[float, int]], _itl_s: float
) -> list[int]:
    lengths, num_left = [], len(times) - 1
    for _, length in candidates:
        lengths.append(min(length, num_left))
        num_left -= lengths[-1]
    return lengths


@pytest.fixture
def all_is_drafted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "draft_lengths", _all_of_them)
        yield
