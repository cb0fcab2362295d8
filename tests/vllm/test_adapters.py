"""LoRA adapters in vLLM, handed over between two of them. The oracle is the built-in engine with the same adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from engine.adapter_config import WEIGHTS
from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.errors import EngineStartError
from tandem.demo import MODEL_DIR as DEMO
from tests.builders import write_adapter
from tests.vllm.engine_pair import BLOCK_SIZE, EnginePair, request, with_connector
from tests.vllm.test_engine import PROMPT, events, tokens
from tests.vllm.test_hand_over import assert_handed_over

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

NAMES = ("", "all", "attention")


@pytest.fixture(scope="module")
def config(vllm_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Adapters of different ranks, modules and scales."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        "all": write_adapter(folder / "all", DEMO, rank=12, lora_alpha=7),
        "attention": write_adapter(
            folder / "attention", DEMO, rank=2, modules=("q_proj", "v_proj"), seed=1, lora_alpha=5, use_rslora=True
        ),
    }
    return msgspec.structs.replace(vllm_config, lora_adapters={name: str(one) for name, one in adapters.items()})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnginePair]:
    connected = with_connector(config, "shared_storage", tmp_path_factory.mktemp("kv"))
    prefill, decode = await asyncio.gather(AsyncEngine.start(connected), AsyncEngine.start(connected))
    async with EnginePair(prefill, decode) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(msgspec.structs.replace(config, kind="tandem", python=""))
    yield engine
    await engine.shutdown()


@pytest.mark.parametrize("temperature", [0, 1])
async def test_one_batch_has_all_adapters_and_none(pair: EnginePair, oracle: AsyncEngine, temperature: int) -> None:
    """The first time, then from the prefix cache, which no adapter shares with another: the prompts are equal."""
    prompt, params = PROMPT[temperature:][: 3 * BLOCK_SIZE + 5], {"temperature": temperature}
    expected = [tokens(await events(oracle, request(prompt, params=params, lora=name))) for name in NAMES]
    assert len({tuple(one) for one in expected}) == len(NAMES)
    assert all(len(set(one)) > 3 for one in expected), "without variety equal outputs prove nothing"
    for num_cached_tokens in (0, 3 * BLOCK_SIZE):
        asked = [request(prompt, params=params, lora=name) for name in NAMES]
        found = await asyncio.gather(*(events(pair.prefill, one) for one in asked))
        assert [tokens(one) for one in found] == expected
        assert [one[0].num_cached_tokens for one in found] == [num_cached_tokens] * len(NAMES)


async def test_a_prompt_is_handed_over_for_each_adapter(pair: EnginePair, oracle: AsyncEngine) -> None:
    """Its pages are in one store, and nothing of them is another adapter's."""
    prompt = PROMPT[2:][: 2 * BLOCK_SIZE + 9]
    for name in NAMES:
        asked = request(prompt, params={"temperature": 0.0}, lora=name)
        answer = await assert_handed_over(pair, asked)
        assert answer.token_ids == tokens(await events(oracle, asked))
    await pair.assert_nothing_is_left()


async def test_adapters_are_part_of_the_identity(pair: EnginePair, oracle: AsyncEngine) -> None:
    for engine in (pair.prefill, pair.decode):
        assert engine.info.lora_adapters == ["all", "attention"]
        assert engine.info.model_identity.weights_digest == oracle.info.model_identity.weights_digest


async def test_an_adapter_of_another_model_ends_the_start_with_one_error(
    config: EngineConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM itself would compute with the half of it."""
    folder = write_adapter(tmp_path / "narrow", DEMO, modules=["q_proj"])
    halves = {name: tensor[:, :128].contiguous() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(halves, folder / WEIGHTS)
    with pytest.raises(EngineStartError, match="ended with status 2"):
        await AsyncEngine.start(msgspec.structs.replace(config, lora_adapters={"narrow": str(folder)}))
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("engine core: ")]
    assert line.startswith(
        "engine core: adapter 'narrow': vLLM cannot use it: layer 'model.layers.0.self_attn.q_proj' "
    )
    assert line.endswith("require [4, 256] and [256, 4]")
