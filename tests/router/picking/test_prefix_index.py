"""What the index believes, against a linear scan over everything that was recorded; bounded; forgetful."""

from __future__ import annotations

import random

import pytest

from router.picking.affinity import PrefixIndex
from router.pools.instance_info import InstanceKey

A, B = InstanceKey("a", "1"), InstanceKey("b", "1")


def hashes(token_ids: list[int], salt: str = "") -> tuple[bytes, ...]:
    return PrefixIndex.hashes(token_ids, 4, salt)


def test_prompts_share_the_hashes_of_their_common_full_blocks() -> None:
    first, second = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9]), hashes([1, 2, 3, 4, 5, 6, 7, 9])
    assert len(first) == len(second) == 2
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert hashes([1, 2, 3]) == ()


def test_another_salt_shares_nothing() -> None:
    assert not set(hashes([1] * 8, "tenant a")) & set(hashes([1] * 8, "tenant b"))


def test_a_block_is_another_one_after_another_beginning() -> None:
    assert hashes([1] * 4 + [2] * 4)[1] != hashes([3] * 4 + [2] * 4)[1]


def test_hashes_go_on_where_they_ended() -> None:
    token_ids = list(range(19))
    assert PrefixIndex.hashes(token_ids, 4, "", hashes(token_ids[:9])) == hashes(token_ids)


def test_only_the_instance_that_has_it_is_believed_to_have_it() -> None:
    index, prompt = PrefixIndex(100), hashes(list(range(40)))
    index.record(A, prompt[:6])
    assert (index.num_blocks(A, prompt), index.num_blocks(B, prompt)) == (6, 0)
    assert index.num_blocks(A, prompt[:3]) == 3
    assert index.num_blocks(A, ()) == 0


def test_a_process_that_is_gone_takes_its_blocks_with_it() -> None:
    index, prompt = PrefixIndex(100), hashes(list(range(40)))
    index.record(A, prompt)
    index.record(B, prompt)
    index.retain([B])
    index.retain([B])
    assert (index.num_blocks(A, prompt), index.num_blocks(B, prompt), len(index)) == (0, 10, 10)
    assert index.num_blocks(InstanceKey("b", "2"), prompt) == 0, "a new epoch has nothing of the old one"


def test_the_least_recently_used_go_first_and_their_ends_before_their_beginnings() -> None:
    index = PrefixIndex(10)
    old, new, newest = (hashes([number] * 16) for number in (1, 2, 3))
    index.record(A, old)
    index.record(A, new)
    index.record(A, old)  # used again
    index.record(A, newest)
    assert len(index) == 10
    assert [index.num_blocks(A, prompt) for prompt in (old, new, newest)] == [4, 2, 4]


def test_one_busy_instance_does_not_push_the_others_out() -> None:
    index, kept = PrefixIndex(12), hashes([1] * 16)
    index.record(B, kept)
    for number in range(2, 50):
        index.record(A, hashes([number] * 16))
    assert index.num_blocks(B, kept) == 4
    assert len(index) == 12


def test_a_prompt_longer_than_the_index_keeps_its_beginning() -> None:
    index, prompt = PrefixIndex(5), hashes(list(range(80)))
    index.record(A, prompt)
    assert index.num_blocks(A, prompt) == len(index) == 5


@pytest.mark.parametrize("seed", range(5))
def test_bisection_finds_what_a_scan_finds_whatever_was_recorded_and_evicted(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(60)
    keys = [A, B, InstanceKey("c", "1")]
    prompts = [hashes([rng.randrange(2) for _ in range(4 * rng.randrange(1, 12))]) for _ in range(60)]
    for _ in range(400):
        prompt = rng.choice(prompts)
        index.record(rng.choice(keys), prompt[: rng.randrange(len(prompt) + 1)])
        if rng.random() < 0.02:
            index.retain(rng.sample(keys, 2))
        assert len(index) <= 60
        for key in keys:
            wanted = rng.choice(prompts)
            scanned = 0
            while scanned < len(wanted) and index.num_blocks(key, wanted[: scanned + 1]) == scanned + 1:
                scanned += 1
            assert index.num_blocks(key, wanted) == scanned
            last_known = max(
                (place + 1 for place in range(len(wanted)) if wanted[place] in index._blocks.get(key, ())), default=0
            )
            assert last_known == scanned, "no block without the blocks before it"


class CountedIndex(PrefixIndex):
    """With the number of sizes that evictions have compared."""

    num_compared = 0

    def _evict(self, num_surplus: int) -> None:
        self.num_compared += len(self._blocks)
        super()._evict(num_surplus)


def test_a_long_prompt_compares_the_instances_of_a_full_index_once() -> None:
    keys = [InstanceKey(str(number), "1") for number in range(200)]
    index, prompt = CountedIndex(2000), hashes(list(range(4 * 1000)))
    for key in keys:
        index.record(key, hashes([int(key.address)] * 40))
    assert len(index) == 2000
    index.record(keys[0], prompt)
    assert len(index) == 2000
    assert index.num_compared == len(keys)


@pytest.mark.parametrize("seed", range(5))
def test_those_with_most_blocks_lose_as_many_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    index, sizes = PrefixIndex(60), dict.fromkeys(range(8), 0)
    for number in range(200):
        key, num_blocks = rng.randrange(8), rng.randrange(1, 25)
        index.record(InstanceKey(str(key), "1"), hashes([number] * 4 * num_blocks))
        sizes[key] += num_blocks
        while sum(sizes.values()) > 60:
            sizes[max(sizes, key=lambda one: sizes[one])] -= 1
        held = {key.address: len(blocks) for key, blocks in index._blocks.items()}
        assert sorted(held.values()) == sorted(size for size in sizes.values() if size)
