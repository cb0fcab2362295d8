"""vLLM behind the engine's messages. The oracle is the built-in engine: the same weights in float32, the same sampling.

The two compute attention differently, so their logits differ in the last bits; the demo model's best tokens are far
enough apart that the tokens agree.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineRequest, HoldKV, TokensEvent
from engine.text.tokenizer import Tokenizer
from tandem.demo import MODEL_DIR as DEMO
from tests.vllm import engine_pair
from tests.waiting import Stopwatch, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

NUM_TOKENS = 48
TEXT = (
    "Once upon a time there was a penguin called Penny who had a tandem, but nobody to sit on the back of it. "
    "Then Dex the dachshund came by. They wanted to ride to the sea, but in between stood a hill. "
) * 3
PROMPT = Tokenizer.from_folder(DEMO).encode(TEXT)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
    "penalties": {"presence_penalty": 1.2, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {17: 4.0, 99: -50.0}, "bad_word_ids": ((5,), (7, 8))},
    "allowed": {"allowed_token_ids": tuple(range(100, 160))},
    "length": {"min_tokens": 40, "stop_token_ids": (12, 13, 14, 15, 16), "ignore_eos": False},
    "regex": {"regex": "(Penny|Dex|tandem| |,){60,}", "ignore_eos": False},
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "ignore_eos": False},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(vllm_config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(vllm_config)
    yield engine
    await engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle(vllm_config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(msgspec.structs.replace(vllm_config, kind="tandem", python=""))
    yield engine
    await engine.shutdown()


def request(prompt: list[int] = PROMPT, emitted: list[int] | None = None, **fields: Any) -> EngineRequest:
    params = {"max_tokens": NUM_TOKENS, **fields.pop("params", {})}
    return engine_pair.request(prompt, emitted, params=params, **{"seed": 2**63 + 5, **fields})


async def events(engine: AsyncEngine, asked: EngineRequest) -> list[TokensEvent]:
    return [event async for event in engine.add_request(asked) if isinstance(event, TokensEvent)]


def tokens(found: list[TokensEvent]) -> list[int]:
    assert found[-1].error is None, found[-1]
    return [token_id for event in found for token_id in event.token_ids]


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_tokens_are_those_of_the_built_in_engine(vllm: AsyncEngine, oracle: AsyncEngine, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    ours, theirs = await asyncio.gather(
        *(events(engine, request(params=params, choice=1)) for engine in (oracle, vllm))
    )
    assert tokens(theirs) == tokens(ours)
    assert len(set(tokens(theirs))) > 3, "without variety equal outputs prove nothing"
    assert theirs[-1].finish_reason == ours[-1].finish_reason
    assert theirs[-1].stop_token_id == ours[-1].stop_token_id


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_resumed_stream_is_the_uninterrupted_one(vllm: AsyncEngine, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    whole = await events(vllm, request(params=params))
    for num_emitted in (1, len(tokens(whole)) // 2, len(tokens(whole)) - 1):
        emitted = tokens(whole)[:num_emitted]
        rest = await events(vllm, request(emitted=emitted, params=params))
        assert emitted + tokens(rest) == tokens(whole)
        assert rest[-1].finish_reason == whole[-1].finish_reason


async def test_a_token_does_not_depend_on_the_batch(vllm: AsyncEngine) -> None:
    alone = [tokens(await events(vllm, request(choice=choice))) for choice in range(3)]
    together = await asyncio.gather(
        *(events(vllm, request(choice=choice, params=SAMPLINGS[name]))
          for name in ("greedy", "penalties", "regex") for choice in range(3)),
        *(events(vllm, request(choice=choice)) for choice in range(3)),
    )  # fmt: skip
    assert [tokens(found) for found in together[-3:]] == alone
    assert alone[0] != alone[1]


async def test_logprobs_are_those_of_the_raw_logits(vllm: AsyncEngine, oracle: AsyncEngine) -> None:
    params = {"logprobs": 4, "prompt_logprobs": 2, "presence_penalty": 1.5, "max_tokens": 8}
    ours = await events(oracle, request(params=params))
    watch = Stopwatch()
    theirs = await events(vllm, request(params=params))
    assert watch.s < 5, "vLLM has compiled something, and a core that is silent for so long counts as hanging"
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            for position, found in zip(getattr(mine, name), getattr(other, name), strict=True):
                assert [entry.token_id for entry in found] == [entry.token_id for entry in position]
                for entry, expected in zip(found, position, strict=True):
                    assert entry.rank == expected.rank
                    assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert len(theirs[0].prompt_logprobs) == len(PROMPT)


async def test_a_repeated_prompt_comes_from_the_prefix_cache_and_a_salt_keeps_it_apart(vllm: AsyncEngine) -> None:
    prompt = PROMPT[5:]
    first, again, salted = [
        await events(vllm, request(prompt, cache_salt=salt, params={"temperature": 0.0})) for salt in ("", "", "tenant")
    ]
    assert again[0].num_cached_tokens >= len(prompt) // 32 * 32 - 32 > 0
    assert first[0].num_cached_tokens == salted[0].num_cached_tokens == 0
    assert tokens(first) == tokens(again) == tokens(salted)


async def test_what_cannot_be_sampled_ends_its_own_request_alone(vllm: AsyncEngine) -> None:
    impossible = {"allowed_token_ids": (7,), "bad_word_ids": ((7,),)}
    expected = tokens(await events(vllm, request()))
    failed, other = await asyncio.gather(events(vllm, request(params=impossible)), events(vllm, request()))
    assert failed[-1].error_kind == "nothing_allowed"
    assert [event.token_ids for event in failed] == [[]]
    assert tokens(other) == expected


async def test_a_constraint_that_cannot_be_compiled_is_refused(vllm: AsyncEngine) -> None:
    [failed] = await events(vllm, request(params={"regex": "(", "ignore_eos": False}))
    assert failed.error_kind == "invalid_constraint"
    assert "regex" in (failed.error or "")


async def test_a_transfer_is_refused_by_name(vllm: AsyncEngine) -> None:
    [failed] = await events(vllm, request(hold_kv=HoldKV(transfer_id="t", lease_s=1.0)))
    assert "no KV connector" in (failed.error or "")


async def test_aborted_requests_hold_no_block(vllm: AsyncEngine) -> None:
    draw = random.Random(3)
    for _ in range(20):
        streams = [vllm.add_request(request(PROMPT[draw.randrange(99) :], seed=number)) for number in range(10)]
        for stream in streams:
            for _ in range(draw.randrange(3)):
                await anext(stream)
        for stream in streams:
            await stream.aclose()
    await until(lambda: vllm.load.num_running + vllm.load.num_waiting == 0, 60)
    await until(lambda: vllm.load.running_blocks == 0, 60)
    assert vllm.load.free_blocks == vllm.info.num_blocks
    assert len(tokens(await events(vllm, request()))) == NUM_TOKENS


async def test_a_request_that_is_aborted_before_it_begins_is_forgotten(vllm: AsyncEngine) -> None:
    for _ in range(50):
        await vllm.add_request(request()).aclose()
    await until(lambda: vllm.load.num_running + vllm.load.num_waiting == 0, 60)


async def test_load_counts_waiting_requests_and_their_tokens(vllm: AsyncEngine) -> None:
    streams = [vllm.add_request(request(seed=number)) for number in range(vllm.info.max_num_seqs + 4)]
    await until(lambda: vllm.load.num_running == vllm.info.max_num_seqs and vllm.load.num_waiting == 4, 60)
    assert vllm.load.num_waiting_tokens >= 4 * len(PROMPT)
    assert vllm.load.running_blocks > 0
    for stream in streams:
        await stream.aclose()
    await until(lambda: vllm.load.running_blocks == 0, 60)


async def test_the_identity_names_version_runner_attention_and_kv(vllm: AsyncEngine, oracle: AsyncEngine) -> None:
    assert vllm.info.model_identity.engine.startswith("vllm 0.32.")
    for part in ("CPUModelRunner", "CPU_ATTN", "KV float32"):
        assert part in vllm.info.model_identity.engine
    differing = [name for name, *_ in vllm.info.model_identity.mismatches(oracle.info.model_identity)]
    assert differing == ["engine", "layout_digest", "fingerprint"]
