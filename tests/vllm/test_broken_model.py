"""A model whose logits are not finite is the instance's fault, not the request's: the router continues elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from tests.builders import lively_model
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder
from tests.vllm.test_engine import events, request

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

BROKEN_ID = 999


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broken(vllm_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    folder: Path = tmp_path_factory.mktemp("broken")
    model = lively_model("llama", vocab_size=2048, head_dim=32, tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[BROKEN_ID] = torch.nan
    model.save_pretrained(folder)
    write_folder(folder, byte_level_backend(), BYTE_LEVEL_CONFIG)
    engine = await AsyncEngine.start(msgspec.structs.replace(vllm_config, model=str(folder)))
    yield engine
    await engine.shutdown()


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"repetition_penalty": 1.5, "logit_bias": {7: 1.0}}, {"allowed_token_ids": (7, 8)}],
    ids=["greedy", "changed", "allowed"],
)
async def test_logits_that_are_not_finite_are_an_error_of_the_instance(
    broken: AsyncEngine, params: dict[str, Any]
) -> None:
    [failed] = await events(broken, request([BROKEN_ID, 5], params=params))
    assert (failed.finish_reason, failed.error_kind) == ("error", None)
    assert failed.error == "the model's logits are not finite: no token can be sampled"
