"""Instances with different numbers of ranks and stages exchange KV in both directions: their pages are the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine import SamplingParams
from engine.config import EngineConfig, KVConnectorConfig
from tests.kv_transfer.core_pair import CorePair, aggregated, nixl_config, store_config
from tests.kv_transfer.stores.redis.redis_server import PATIENT, redis_server
from tests.oracle import random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, max_tokens=16, ignore_eos=True, seed=11)
PARTITIONS = pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])


def check_both_directions(checkpoint: Path, config: EngineConfig, tensor: int, pipeline: int) -> None:
    """Several ranks hand over to one, then one to them: no page is computed twice, and the tokens are one engine's."""
    config = msgspec.structs.replace(config, num_threads=1)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    pair = CorePair(msgspec.structs.replace(config, **sizes), config)
    assert pair.prefill.info.model_identity == pair.decode.info.model_identity
    for seed, params in enumerate((GREEDY, SEEDED)):
        prompts = [*random_prompts(4, longest=200, vocab_size=1024, seed=seed), [7 + seed] * 64]
        names = [f"{seed}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            pair.start(name, prompt, params)
        pair.run()
        outcomes = [pair.outcomes[name] for name in names]
        assert [outcome.token_ids for outcome in outcomes] == aggregated(checkpoint, prompts, params)
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.loaded is not None
            assert outcome.loaded.num_recomputed_blocks == 0, outcome.loaded.reason
            assert outcome.loaded.num_external_tokens == len(prompt) - 16 * outcome.num_local_blocks > 0
        pair.swap()
    pair.close()


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (2, 2)))]
)
def test_over_shared_storage(checkpoint: Path, tmp_path: Path, tensor: int, pipeline: int) -> None:
    check_both_directions(checkpoint, store_config(checkpoint, tmp_path), tensor, pipeline)


@pytest.mark.slow
@PARTITIONS
def test_over_redis(checkpoint: Path, tmp_path: Path, tensor: int, pipeline: int) -> None:
    with redis_server(tmp_path) as server:
        options = {"url": server.url, "kv_secret_file": str(tmp_path / "secret"), **PATIENT}
        connector = KVConnectorConfig(class_path="kv_transfer.stores.redis.connector:RedisConnector", options=options)
        config = store_config(checkpoint, tmp_path, kv_connector=connector)
        check_both_directions(checkpoint, config, tensor, pipeline)
        assert server.names(), "nothing went through Redis"


@pytest.mark.slow
@PARTITIONS
def test_over_nixl(checkpoint: Path, tmp_path: Path, tensor: int, pipeline: int) -> None:
    """Straight out of the memory that the ranks share."""
    check_both_directions(checkpoint, nixl_config(checkpoint, tmp_path), tensor, pipeline)
