"""Where prompts and sessions ran is remembered, bounded, and only a preference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from engine.sampling.params import SamplingParams
from router.picking.affinity import Affinity, PrefixIndex, RequestAffinity, Sessions
from router.picking.settings import PickingSettings
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport
from router.request.generation_request import GenerationRequest
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import PROMPT, SHORT
from tests.waiting import until

A, B = InstanceKey("a", "1"), InstanceKey("b", "1")


def view(key: InstanceKey) -> InstanceView:
    info = InstanceInfo(key.address, key.epoch, "decode", key.address, Identity(block_size=16))
    return InstanceView(key, info, LoadReport(key.epoch))


def request(prompt: list[int], *, salt: str = "", lora: str = "", session: str = "") -> GenerationRequest:
    params = SamplingParams(max_tokens=1)
    return GenerationRequest("l", "r", "m", tuple(prompt), params, cache_salt=salt, lora=lora, session=session)


def affinity(**settings: object) -> Affinity:
    return Affinity(PickingSettings.model_validate({"decode_scorers": "queue=1,prefix=1,session=1", **settings}))


def test_a_prompt_is_believed_to_be_cached_where_it_ran() -> None:
    memory, prompt = affinity(), list(range(100))
    RequestAffinity(memory, request(prompt)).record_cached(view(A))
    longer = RequestAffinity(memory, request([*prompt, *range(50)]))
    assert (longer.num_cached_tokens(view(A)), longer.num_cached_tokens(view(B))) == (96, 0)
    assert RequestAffinity(memory, request(prompt, salt="another tenant")).num_cached_tokens(view(A)) == 0


def test_an_answer_is_cached_with_its_prompt() -> None:
    memory, prompt = affinity(), list(range(40))
    RequestAffinity(memory, request(prompt)).record_cached(view(A), [7] * 60)
    assert RequestAffinity(memory, request([*prompt, *[7] * 60, 1, 2])).num_cached_tokens(view(A)) == 96


def test_an_answer_to_a_prompt_of_no_full_block_is_that_of_its_tenant_too() -> None:
    memory, prompt = affinity(), list(range(10))
    RequestAffinity(memory, request(prompt, salt="one")).record_cached(view(A), [7] * 60)
    cached = [RequestAffinity(memory, request([*prompt, *[7] * 60], salt=salt)) for salt in ("one", "two", "")]
    assert [one.num_cached_tokens(view(A)) for one in cached] == [64, 0, 0]


def test_what_an_adapter_has_computed_is_cached_for_it_alone() -> None:
    memory, prompt = affinity(), list(range(40))
    RequestAffinity(memory, request(prompt, lora="poet")).record_cached(view(A), [7] * 60)
    cached = [RequestAffinity(memory, request([*prompt, *[7] * 60], lora=lora)) for lora in ("poet", "clerk", "")]
    assert [one.num_cached_tokens(view(A)) for one in cached] == [96, 0, 0]


def test_processes_that_are_gone_are_forgotten_and_those_that_are_lost_for_a_moment_are_not() -> None:
    memory, prompt = affinity(), list(range(64))
    memory.index.retain([A, B])
    known = RequestAffinity(memory, request(prompt))
    known.record_cached(view(A))
    known.record_cached(view(B))
    memory.index.retain([A, InstanceKey("b", "2")])
    assert (known.num_cached_tokens(view(A)), known.num_cached_tokens(view(B))) == (64, 0)
    assert len(memory.index) == 4


def test_a_session_is_remembered_per_pool_and_the_oldest_goes_first() -> None:
    sessions = Sessions(max_sessions=2)
    sessions.record("one", "decode", A)
    sessions.record("one", "prefill", B)
    sessions.record("two", "decode", B)
    assert (sessions.instance("one", "decode"), sessions.instance("one", "prefill")) == (A, B)
    sessions.record("one", "decode", B)
    sessions.record("three", "decode", A)
    assert [sessions.instance(name, "decode") for name in ("one", "two", "three")] == [B, None, A]
    sessions.record("", "decode", A)
    assert len(sessions) == 2
    assert sessions.instance("", "decode") is None


def test_a_session_that_a_prefill_instance_served_alone_is_remembered_for_its_pool() -> None:
    memory = affinity()
    alone = replace(view(B), info=replace(view(B).info, role="prefill"))
    RequestAffinity(memory, request([1], session="s")).record_placement(view(A), None)
    RequestAffinity(memory, request([1], session="s")).record_placement(alone, None)
    assert (memory.sessions.instance("s", "decode"), memory.sessions.instance("s", "prefill")) == (A, B)


def test_a_session_whose_request_was_split_is_remembered_for_both_pools() -> None:
    memory = affinity()
    RequestAffinity(memory, request([1], session="s")).record_placement(view(A), view(B))
    assert (memory.sessions.instance("s", "decode"), memory.sessions.instance("s", "prefill")) == (A, B)


def test_sessions_of_two_tenants_with_one_name_are_two() -> None:
    memory = affinity()
    first, second = (replace(request([1], session="s"), tenant=tenant) for tenant in ("a", "b"))
    RequestAffinity(memory, first).record_placement(view(A), None)
    RequestAffinity(memory, second).record_placement(view(B), None)
    places = [RequestAffinity(memory, one).facts("decode", 1).session_at for one in (first, second, request([1]))]
    assert places == [A, B, None]
    assert RequestAffinity(memory, request([1], session="s")).facts("decode", 1).session_at is None


async def test_a_session_stays_where_it_ran_until_that_instance_has_more_to_do(run: Run) -> None:
    async with run(prefill=0, decode=4, picking={"decode_scorers": "queue=1,session=2"}) as rig:
        first = (await rig.generate(prompt=SHORT, session="s")).trailers["tandem-decode"]
        again = {(await rig.generate(prompt=SHORT, session="s")).trailers["tandem-decode"] for _ in range(8)}
        assert again == {first}
        others = {(await rig.generate(prompt=SHORT)).trailers["tandem-decode"] for _ in range(40)}
        assert len(others) > 1, "without a session any instance does"
        busy = next(fake for fake in rig.decode if fake.name == first)
        busy.behaviour.num_waiting = 3
        await _until_reported(rig.app.pools.decode.views, busy, num_waiting=3)
        assert (await rig.generate(prompt=SHORT, session="s")).trailers["tandem-decode"] != first


async def test_a_prompt_goes_where_its_beginning_is_cached(run: Run) -> None:
    scorers = "queue=1,prefix=3"
    picking = {"decode_scorers": scorers, "prefill_scorers": scorers}
    async with run(prefill=3, decode=3, picking=picking, disaggregation={"mode": "always"}) as rig:
        where = ("tandem-prefill", "tandem-decode")
        first = (await rig.generate()).trailers
        assert all(first[name] for name in where)
        for _ in range(6):
            again = (await rig.generate(prompt=[*PROMPT, *range(5)])).trailers
            assert [again[name] for name in where] == [first[name] for name in where]
        others = [(await rig.generate(prompt=[number, *PROMPT])).trailers for number in range(20)]
        for name in where:
            assert len({other[name] for other in others}) == 3, "another beginning is cached nowhere"


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
async def test_of_idle_instances_a_prompt_goes_where_its_beginning_is_cached(run: Run, mode: str) -> None:
    """By the default scorers, which count requests alone: a cache decides between equals."""
    async with run(prefill=3, decode=3, disaggregation={"mode": mode}) as rig:
        where = ("tandem-prefill", "tandem-decode")[mode != "always" :]
        first = (await rig.generate()).trailers
        for _ in range(6):
            again = (await rig.generate(prompt=[*PROMPT, *range(5)])).trailers
            assert [again[name] for name in where] == [first[name] for name in where]
        busy = next(fake for fake in rig.decode if fake.name == first["tandem-decode"])
        busy.behaviour.num_waiting = 1
        await _until_reported(rig.app.pools.decode.views, busy, num_waiting=1)
        assert (await rig.generate()).trailers["tandem-decode"] != first["tandem-decode"]


async def test_what_an_instance_had_goes_with_its_process(run: Run) -> None:
    async with run(prefill=0, decode=1) as rig:
        await rig.generate()
        assert len(rig.app.affinity.index) > 0
        await rig.decode[0].kill()
        await rig.until_ready(num_decode=0)
        assert len(rig.app.affinity.index) > 0, "it may be back"
        await rig.decode[0].restart()
        await until(lambda: not len(rig.app.affinity.index))


async def _until_reported(views: Callable[[], Sequence[InstanceView]], fake: FakeInstance, *, num_waiting: int) -> None:
    await until(lambda: any(one.instance_id == fake.name and one.load.num_waiting == num_waiting for one in views()))


# The index, against a linear scan over everything that was recorded


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
