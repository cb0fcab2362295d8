"""KV handed over between two vLLMs. The oracle is vLLM itself without a hand-over: the same engine, asked plainly, with
a salt that keeps it from the prefix cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine.config import EngineConfig, KVConnectorConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineRequest, TokensEvent
from engine.sampling.params import SamplingParams
from kv_transfer.secret import ensure_secret
from tests.vllm.engine_pair import Answer, EnginePair
from tests.vllm.test_engine import SAMPLINGS, tokens
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

BLOCK_SIZE = 32
CHUNK = 64
LENGTHS = (20, 31, 32, 33, 64, 100, 1500)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "store"


@pytest.fixture(scope="module")
def pair_config(vllm_config: EngineConfig, store: Path) -> EngineConfig:
    secret = store.with_name("secret")
    ensure_secret(secret)
    connector = KVConnectorConfig(
        class_path="kv_transfer.stores.files:SharedStorageConnector",
        options={"path": str(store), "kv_secret_file": str(secret), "load_timeout_s": 60.0},
    )
    assert (vllm_config.block_size, vllm_config.max_num_batched_tokens) == (BLOCK_SIZE, CHUNK)
    return msgspec.structs.replace(vllm_config, kv_connector=connector)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(pair_config: EngineConfig) -> AsyncIterator[EnginePair]:
    prefill, decode = await asyncio.gather(AsyncEngine.start(pair_config), AsyncEngine.start(pair_config))
    yield EnginePair(prefill, decode)
    await asyncio.gather(prefill.shutdown(), decode.shutdown())


_ids = iter(range(10**6))


def request(prompt: list[int], emitted: list[int] | None = None, **fields: Any) -> EngineRequest:
    params = {"max_tokens": 24, "ignore_eos": True, **fields.pop("params", {})}
    return EngineRequest(
        request_id=f"r{next(_ids)}",
        prompt_token_ids=prompt,
        output_token_ids=emitted or [],
        params=SamplingParams(**params),
        eos_token_ids=(2,),
        **{"seed": 77, **fields},
    )


def prompt_of(num_tokens: int) -> list[int]:
    """Another one at each call, so that no block of it is cached."""
    draw = random.Random(next(_ids))
    return [draw.randrange(3, 2000) for _ in range(num_tokens)]


async def plain(pair: EnginePair, asked: EngineRequest) -> list[TokensEvent]:
    salted = msgspec.structs.replace(asked, request_id=f"{asked.request_id}-plain", cache_salt="plain")
    return [event async for event in pair.prefill.add_request(salted) if isinstance(event, TokensEvent)]


async def assert_handed_over(pair: EnginePair, asked: EngineRequest) -> Answer:
    """As plain; and all of its KV moved, and nothing but the seed was computed again."""
    expected = tokens(await plain(pair, asked))
    before = pair.totals()
    answer = await pair.answer(asked)
    assert answer.token_ids == expected
    assert answer.loaded is not None
    await until(lambda: pair.decode.load.num_running == 0, 60)
    num_tokens = len(asked.prompt_token_ids) + len(asked.output_token_ids)
    moved = {name: number - before[name] for name, number in pair.totals().items()}
    num_pages = -(-num_tokens // BLOCK_SIZE)
    assert moved == {"saved": num_pages, "loaded": num_pages, "external": num_tokens, "recomputed": 0, "prefilled": 1}
    last = answer.events[-1]
    assert (last.num_cached_tokens, last.num_external_tokens, last.num_recomputed_tokens) == (0, num_tokens, 0)
    return answer


@pytest.mark.parametrize("num_tokens", LENGTHS)
async def test_greedy_tokens_are_those_without_a_hand_over(pair: EnginePair, num_tokens: int) -> None:
    await assert_handed_over(pair, request(prompt_of(num_tokens), params={"temperature": 0.0}))


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_sampling_goes_on_as_it_began(pair: EnginePair, sampling: str) -> None:
    await assert_handed_over(pair, request(prompt_of(90), params=SAMPLINGS[sampling], choice=1))


async def test_a_resumed_stream_is_handed_over_with_what_was_emitted(pair: EnginePair) -> None:
    params = {**SAMPLINGS["penalties"], "max_tokens": 40}
    whole = request(prompt_of(70), params=params)
    emitted = tokens(await plain(pair, whole))[:25]
    answer = await assert_handed_over(pair, request(whole.prompt_token_ids, emitted, params=params))
    assert emitted + answer.token_ids == tokens(await plain(pair, whole))


async def test_logprobs_come_from_both_instances(pair: EnginePair) -> None:
    asked = request(prompt_of(50), params={"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 6})
    expected, answer = await plain(pair, asked), await assert_handed_over(pair, asked)
    for name in ("logprobs", "prompt_logprobs"):
        theirs, ours = [[entry for event in events for entries in getattr(event, name) for entry in entries]
                        for events in (answer.events, expected)]  # fmt: skip
        assert [entry.token_id for entry in theirs] == [entry.token_id for entry in ours]
        for mine, other in zip(theirs, ours, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)


async def test_a_prompt_that_is_cached_here_waits_for_the_seed_alone(pair: EnginePair) -> None:
    asked = request(prompt_of(3 * BLOCK_SIZE))
    first = await assert_handed_over(pair, asked)
    again = await pair.answer(msgspec.structs.replace(asked, request_id="again"))
    assert again.token_ids == first.token_ids
    assert again.reserved is not None
    assert again.reserved.num_local_blocks == 3
    assert again.events[-1].num_cached_tokens == 3 * BLOCK_SIZE
    longer = msgspec.structs.replace(
        asked, request_id="longer", prompt_token_ids=[*asked.prompt_token_ids, *prompt_of(10)]
    )
    answer = await pair.answer(longer)
    assert answer.token_ids == tokens(await plain(pair, longer))
    assert answer.events[-1].num_external_tokens == 10


async def test_requests_that_end_with_their_first_token_are_not_handed_over(pair: EnginePair) -> None:
    prompt = prompt_of(40)
    [first] = await plain(pair, request(prompt, params={"max_tokens": 1}))
    for params, reason in (
        ({"max_tokens": 1}, "length"),
        ({"stop_token_ids": tuple(first.token_ids)}, "stop"),
    ):
        answer = await pair.answer(request(prompt, params=params))
        assert answer.token_ids == first.token_ids
        assert answer.events[-1].finish_reason == reason
    await assert_nothing_is_left(pair)


async def test_many_at_once(pair: EnginePair) -> None:
    asked = [request(prompt_of(30 + 17 * index), seed=index) for index in range(20)]
    expected = [tokens(await plain(pair, one)) for one in asked]
    answers = await asyncio.gather(*(pair.answer(one) for one in asked))
    assert [answer.token_ids for answer in answers] == expected
    assert sum(answer.events[-1].num_recomputed_tokens for answer in answers) == 0
    await assert_nothing_is_left(pair)


async def assert_nothing_is_left(pair: EnginePair) -> None:
    for engine in (pair.prefill, pair.decode):
        await until(lambda engine=engine: engine.load.free_blocks == engine.info.num_blocks, 60)  # type: ignore[misc]
        load = engine.load
        left = (load.num_running, load.num_waiting, load.num_loading, load.num_transfers, load.held_blocks)
        assert left == (0, 0, 0, 0, 0)
