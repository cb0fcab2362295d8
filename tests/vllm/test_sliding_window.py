"""Models with a sliding window in some layers are handed over, since vLLM keeps their whole KV. With a window in every
layer it does not, and the start fails with what to type."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.errors import EngineStartError
from tests.builders import lively_checkpoint
from tests.files_below import files_below
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder
from tests.vllm.engine_pair import BLOCK_SIZE, EnginePair, prompt_of, request, with_connector
from tests.vllm.test_engine import tokens

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

WINDOW = 2 * BLOCK_SIZE
NUM_FULL_BLOCKS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


def config_of(vllm_config: EngineConfig, folder: Path, kind: str) -> EngineConfig:
    model = lively_checkpoint(
        folder / kind,
        kind,
        vocab_size=2048,
        sliding_window=WINDOW,
        head_dim=32,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    write_folder(model, byte_level_backend(), BYTE_LEVEL_CONFIG)
    return with_connector(msgspec.structs.replace(vllm_config, model=str(model)), "shared_storage", folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(vllm_config: EngineConfig, folder: Path) -> AsyncIterator[EnginePair]:
    config = config_of(vllm_config, folder, "gemma2")
    prefill, decode = await asyncio.gather(AsyncEngine.start(config), AsyncEngine.start(config))
    async with EnginePair(prefill, decode) as running:
        yield running


@pytest.mark.parametrize("num_good", [None, 1, 2, 3])
async def test_a_prompt_longer_than_the_window_goes_on_as_without_a_hand_over(
    pair: EnginePair, folder: Path, num_good: int | None
) -> None:
    """Also where the pages behind the first `num_good` are missing and have to be computed."""
    asked = request(prompt_of(NUM_FULL_BLOCKS * BLOCK_SIZE + 5))
    expected = tokens(await pair.plain(asked))
    known = set(files_below(folder / "store"))

    async def lose_some() -> None:
        pages = set(files_below(folder / "store")) - known
        for page in sorted(pages, key=lambda page: page.stat().st_mtime_ns)[num_good:]:
            page.unlink()

    if num_good is not None:
        pair.before_loading = lose_some
    answer = await pair.answer(asked)
    assert answer.token_ids == expected
    num_external = answer.events[-1].num_external_tokens
    if num_good is None:
        assert num_external == len(asked.prompt_token_ids)
    else:
        assert num_external <= num_good * BLOCK_SIZE
    await pair.assert_nothing_is_left()


async def test_a_window_in_every_layer_is_rejected_by_name(
    vllm_config: EngineConfig, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineStartError):
        await AsyncEngine.start(config_of(vllm_config, folder, "mistral"))
    assert "a sliding window in every layer, are not handed over yet: --kv-connector null" in capfd.readouterr().err
