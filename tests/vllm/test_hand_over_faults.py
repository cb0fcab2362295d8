"""Faults of a hand-over between two vLLMs: the tokens stay the same, and what happened is counted.

The order of the tests matters: the first one uses the first pages that the decode instance reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import RemoteKV, Seed, TokensEvent
from tests.files_below import files_below
from tests.vllm.engine_pair import BLOCK_SIZE, EnginePair, prompt_of, request, with_connector
from tests.vllm.test_engine import events, tokens
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

NUM_FULL_BLOCKS = 4
PARKED_PAGE = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(vllm_config: EngineConfig, folder: Path) -> AsyncIterator[EnginePair]:
    config = with_connector(vllm_config, "shared_storage", folder, load_timeout_s=4.0)
    starting = asyncio.create_task(AsyncEngine.start(config))
    await asyncio.sleep(1.0)  # it has taken the environment
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TANDEM_ENABLE_FAILPOINTS", "1")
        # Reports of what was loaded come after the tokens that are computed with it.
        environment.setenv("TANDEM_FAILPOINTS", f"kv.store.get=park@{PARKED_PAGE};kv.report=sleep:0.2")
        environment.setenv("TANDEM_FAILPOINT_FILE", str(folder / "failpoint"))
        decode = await AsyncEngine.start(config)
    async with EnginePair(await starting, decode) as running:
        yield running


async def test_a_page_that_never_comes_is_computed_in_other_blocks(pair: EnginePair, folder: Path) -> None:
    asked = request(prompt_of(NUM_FULL_BLOCKS * BLOCK_SIZE + 5))
    expected = tokens(await pair.plain(asked))
    answer = await pair.answer(asked)
    assert answer.token_ids == expected
    assert answer.loaded is not None
    assert answer.loaded.reason == "only 4 of 5 pages came in time"
    assert answer.events[-1].num_recomputed_tokens == len(asked.prompt_token_ids)
    # Its blocks are the hanging read's until that ends.
    assert pair.decode.load.free_blocks < pair.decode.info.num_blocks
    (folder / "failpoint.kv.store.get.go").touch()
    await pair.assert_nothing_is_left()


def flipped(page: Path) -> None:
    content = bytearray(page.read_bytes())
    content[-7] ^= 16
    page.write_bytes(content)


@pytest.mark.parametrize("index", [0, 2, NUM_FULL_BLOCKS], ids=["first page", "third page", "tail"])
@pytest.mark.parametrize(("damage", "failure"), [(flipped, "page_digest"), (Path.unlink, "missing")])
async def test_a_damaged_page_and_those_after_it_are_computed(
    pair: EnginePair, folder: Path, damage: Callable[[Path], None], failure: str, index: int
) -> None:
    asked = request(prompt_of(NUM_FULL_BLOCKS * BLOCK_SIZE + 5), params={"presence_penalty": 1.0})
    expected = tokens(await pair.plain(asked))
    known = set(files_below(folder / "store"))

    async def damage_one() -> None:
        pages = list(set(files_below(folder / "store")) - known)
        # Written in order, and the tail, in a folder of its own, last.
        pages.sort(key=lambda page: (page.parent.parent.name == "transfers", page.stat().st_mtime_ns))
        assert len(pages) == NUM_FULL_BLOCKS + 1
        damage(pages[index])

    pair.before_loading = damage_one
    before = pair.decode.load
    answer = await pair.answer(asked)
    assert answer.token_ids == expected
    assert answer.loaded is not None
    assert answer.loaded.reason == failure
    last = answer.events[-1]
    assert last.num_external_tokens + last.num_recomputed_tokens == len(asked.prompt_token_ids)
    assert last.num_recomputed_tokens >= 5
    if index == NUM_FULL_BLOCKS:
        assert last.num_external_tokens == NUM_FULL_BLOCKS * BLOCK_SIZE
    await pair.assert_nothing_is_left()
    after = pair.decode.load
    assert after.num_recomputed_blocks - before.num_recomputed_blocks == answer.loaded.num_recomputed_blocks > 0
    failures = [load.kv_totals[0].loaded.failures.get(failure, 0) for load in (before, after)]
    assert failures[1] == failures[0] + 1


async def test_a_failed_transfer_is_computed(pair: EnginePair) -> None:
    """The request at the prefill instance is aborted after its first chunk."""
    asked = request(prompt_of(300))
    expected = tokens(await pair.plain(asked))
    before = pair.decode.load.num_recomputed_blocks
    answer = await pair.answer(asked, abort_prefill_with=expected[:1])
    assert expected[:1] + answer.token_ids == expected
    assert answer.events[-1].num_recomputed_tokens > 0
    await pair.assert_nothing_is_left()
    assert pair.decode.load.num_recomputed_blocks > before


async def test_a_request_without_room_or_seed_ends_in_time(pair: EnginePair) -> None:
    remote = RemoteKV(transfer_id="t", reservation_s=0.5)
    *_, last = await events(pair.decode, request(prompt_of(40), remote_kv=remote))
    assert (last.error_kind, last.error) == ("timeout", "no seed within the reservation time")
    most = pair.decode.info.num_blocks * BLOCK_SIZE // 2
    keeping = [pair.decode.add_request(request(prompt_of(most), remote_kv=RemoteKV(transfer_id=f"k{number}",
               reservation_s=60.0))) for number in range(2)]  # fmt: skip
    await anext(keeping[0])
    [last] = await events(pair.decode, request(prompt_of(most), remote_kv=remote))
    assert (last.error_kind, last.error) == ("no_room", "no room within the reservation time")
    for stream in keeping:
        await stream.aclose()
    await until(lambda: pair.decode.load.num_loading == 0, 60)
    await pair.assert_nothing_is_left()


async def test_a_seed_of_several_tokens_is_continued_without_kv_for_as_long_as_it_takes(pair: EnginePair) -> None:
    """It comes before the report of the reservation, which is slow here."""
    asked = request(prompt_of(40), params={"max_tokens": 200})
    expected = tokens(await pair.plain(asked))
    remote = RemoteKV(transfer_id="several", reservation_s=0.5)
    stream = pair.decode.add_request(msgspec.structs.replace(asked, remote_kv=remote))
    await asyncio.sleep(0.1)
    pair.decode.send(Seed(asked.request_id, expected[:3]))
    assert tokens([event async for event in stream if isinstance(event, TokensEvent)]) == expected[3:]
    await pair.assert_nothing_is_left()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nixl_pair(vllm_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnginePair]:
    config = with_connector(vllm_config, "nixl", tmp_path_factory.mktemp("nixl"), load_timeout_s=3.0)
    async with EnginePair(*await asyncio.gather(AsyncEngine.start(config), AsyncEngine.start(config))) as running:
        yield running


async def test_pages_of_a_frozen_instance_are_computed(nixl_pair: EnginePair) -> None:
    asked = request(prompt_of(NUM_FULL_BLOCKS * BLOCK_SIZE + 5))
    expected = tokens(await nixl_pair.plain(asked))
    children = psutil.Process(nixl_pair.prefill.info.pid).children(recursive=True)
    [worker] = [child for child in children if "Worker" in child.name() + " ".join(child.cmdline())]

    async def freeze() -> None:
        worker.suspend()

    nixl_pair.before_loading = freeze
    try:
        answer = await nixl_pair.answer(asked)
    finally:
        worker.resume()
    assert answer.token_ids == expected
    assert answer.loaded is not None
    assert "pages did not come" in (answer.loaded.reason or "")
    assert answer.events[-1].num_recomputed_tokens == len(asked.prompt_token_ids)
    await nixl_pair.assert_nothing_is_left()
    again = request(prompt_of(100))
    expected = tokens(await nixl_pair.plain(again))
    assert (await nixl_pair.answer(again)).token_ids == expected
