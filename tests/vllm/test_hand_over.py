"""KV handed over between two vLLMs. The oracle is vLLM itself without a hand-over: the same engine, asked plainly, with
a salt that keeps it from the prefix cache."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import psutil
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineRequest, RemoteKV, ReservedEvent, TokensEvent
from tests.kv_transfer.stores.redis.redis_server import redis_server
from tests.vllm.engine_pair import BLOCK_SIZE, Answer, EnginePair, prompt_of, request, with_connector
from tests.vllm.test_engine import SAMPLINGS, tokens
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

LENGTHS = (20, 31, 32, 33, 64, 100, 1500)


@pytest.fixture(scope="module", params=["shared_storage", "redis", "nixl"])
def pair_config(
    request: pytest.FixtureRequest, vllm_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineConfig]:
    folder = tmp_path_factory.mktemp("kv")
    with contextlib.ExitStack() as servers:
        options = {"url": servers.enter_context(redis_server(folder)).url} if request.param == "redis" else {}
        yield with_connector(vllm_config, request.param, folder, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(pair_config: EngineConfig) -> AsyncIterator[EnginePair]:
    prefill, decode = await asyncio.gather(AsyncEngine.start(pair_config), AsyncEngine.start(pair_config))
    async with EnginePair(prefill, decode) as running:
        yield running


async def assert_handed_over(pair: EnginePair, asked: EngineRequest) -> Answer:
    """As plain; and all of its KV moved, and nothing but the seed was computed again."""
    expected = tokens(await pair.plain(asked))
    before = pair.totals()
    answer = await pair.answer(asked)
    assert answer.token_ids == expected
    assert answer.loaded is not None
    await until(lambda: pair.decode.load.num_running == 0, 60)
    num_tokens = len(asked.prompt_token_ids) + len(asked.output_token_ids)
    moved = {name: number - before[name] for name, number in pair.totals().items()}
    num_pages = -(-num_tokens // BLOCK_SIZE)
    num_saved = 0 if pair.decode.info.kv_connector == "nixl" else num_pages  # its readers take them from memory
    assert moved == {"saved": num_saved, "loaded": num_pages, "external": num_tokens, "recomputed": 0, "prefilled": 1}
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
    emitted = tokens(await pair.plain(whole))[:25]
    answer = await assert_handed_over(pair, request(whole.prompt_token_ids, emitted, params=params))
    assert emitted + answer.token_ids == tokens(await pair.plain(whole))


async def test_logprobs_come_from_both_instances(pair: EnginePair) -> None:
    asked = request(prompt_of(50), params={"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 6})
    expected, answer = await pair.plain(asked), await assert_handed_over(pair, asked)
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
    assert answer.token_ids == tokens(await pair.plain(longer))
    assert answer.events[-1].num_external_tokens == 10


async def test_requests_that_end_with_their_first_token_are_not_handed_over(pair: EnginePair) -> None:
    prompt = prompt_of(40)
    [first] = await pair.plain(request(prompt, params={"max_tokens": 1}))
    for params, reason in (
        ({"max_tokens": 1}, "length"),
        ({"stop_token_ids": tuple(first.token_ids)}, "stop"),
    ):
        answer = await pair.answer(request(prompt, params=params))
        assert answer.token_ids == first.token_ids
        assert answer.events[-1].finish_reason == reason
    await pair.assert_nothing_is_left()


async def test_many_at_once(pair: EnginePair) -> None:
    asked = [request(prompt_of(30 + 17 * index), seed=index) for index in range(20)]
    expected = [tokens(await pair.plain(one)) for one in asked]
    answers = await asyncio.gather(*(pair.answer(one) for one in asked))
    assert [answer.token_ids for answer in answers] == expected
    assert sum(answer.events[-1].num_recomputed_tokens for answer in answers) == 0
    await pair.assert_nothing_is_left()


async def test_200_aborts_leave_no_block(pair: EnginePair) -> None:
    draw = random.Random(4)

    async def abort(number: int) -> None:
        asked = request(prompt_of(draw.choice((20, 64, 200))), params={"max_tokens": 60})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.random() * 0.8):
                await pair.answer(asked)

    for first in range(0, 200, 10):
        await asyncio.gather(*(abort(first + number) for number in range(10)))
    await pair.assert_nothing_is_left()
    await assert_handed_over(pair, request(prompt_of(100)))


async def test_waiting_for_kv_leaves_the_cores_to_others(pair: EnginePair) -> None:
    """vLLM steps for as long as it has a request."""

    def cpu_s() -> float:
        host = psutil.Process(pair.decode.info.pid)
        times = [process.cpu_times() for process in (host, *host.children(recursive=True))]
        return sum(taken.user + taken.system for taken in times)

    never = RemoteKV(transfer_id="never", reservation_s=60.0)
    waiting = pair.decode.add_request(msgspec.structs.replace(request(prompt_of(100)), remote_kv=never))
    assert isinstance(await anext(waiting), ReservedEvent)
    await asyncio.sleep(0.5)
    used_s, begun_s = cpu_s(), time.monotonic()
    await asyncio.sleep(3)
    assert cpu_s() - used_s < 0.25 * (time.monotonic() - begun_s)
    other = [event async for event in pair.decode.add_request(request(prompt_of(40))) if isinstance(event, TokensEvent)]
    assert len(tokens(other)) == 24
    await waiting.aclose()
    await pair.assert_nothing_is_left()
