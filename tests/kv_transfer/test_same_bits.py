"""A sampled request has the same tokens and logprobs, to the last bit, however an engine computes it.

The reference computes each request alone, without a cache. Each of a thousand requests is computed in two more ways:
from the prefix cache, in chunks of another size beside 27 others, after a preemption, by two threads, resumed after
tokens that another instance emitted, or handed over by one of the connectors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine import SamplingParams
from engine.config import EngineConfig, KVConnectorConfig
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, TokensEvent
from engine.machine import set_num_threads
from tandem.demo import MODEL_DIR
from tests.builders import lively_checkpoint
from tests.kv_transfer.core_pair import CorePair, Outcome, nixl_config, store_config
from tests.kv_transfer.stores.redis.redis_server import PATIENT, redis_server

NUM_PER_MODEL = 168
"""Requests of one model in one data type; there are six of these."""
LONGEST = 3000
MANY_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    name: str
    prompt: list[int]
    params: SamplingParams

    def request(self, emitted: Sequence[int] = ()) -> EngineRequest:
        fields = {"prompt_token_ids": self.prompt, "params": self.params, "seed": self.params.seed or 0}
        return EngineRequest(request_id=self.name, output_token_ids=[*emitted], **fields)  # type: ignore[arg-type]


Answers = dict[str, Outcome]
Way = Callable[[EngineConfig, Sequence[Case], Answers, Path], None]


def cases(vocab_size: int, seed: int) -> list[Case]:
    """Prompts of 1 to LONGEST tokens, short ones more often, with every kind of penalty."""
    rng = random.Random(seed)
    lengths = [1, LONGEST, *(int(LONGEST ** rng.random()) for _ in range(NUM_PER_MODEL - 2))]
    rng.shuffle(lengths)
    return [
        Case(
            f"r{index}",
            [rng.randrange(3, vocab_size) for _ in range(length)],
            SamplingParams(
                temperature=rng.uniform(0.7, 1.2), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 50]), seed=index,
                max_tokens=rng.randint(2, 24), ignore_eos=True, logprobs=rng.randint(1, 4),
                repetition_penalty=rng.choice([1.0, 1.2]), presence_penalty=rng.choice([0.0, 0.5]),
                frequency_penalty=rng.choice([0.0, -0.3]),
            ),
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip


def computed(core: EngineCore, requests: Sequence[EngineRequest]) -> Answers:
    """All of them together."""
    answers = {request.request_id: Outcome() for request in requests}
    for request in requests:
        core.handle(AddRequest(request))
    while not core.idle:
        for event in core.step():
            assert isinstance(event, TokensEvent)
            answers[event.request_id].take(event)
    return answers


@contextmanager
def engine(config: EngineConfig, **changes: Any) -> Iterator[EngineCore]:
    changes = {"kv_connector": KVConnectorConfig(), **changes}
    core = EngineCore(msgspec.structs.replace(config, **changes), wake=lambda: None)
    try:
        yield core
    finally:
        core.shutdown()


def alone(config: EngineConfig, some: Sequence[Case]) -> Answers:
    with engine(config, enable_prefix_caching=False) as core:
        return {case.name: computed(core, [case.request()])[case.name] for case in some}


def same(found: Outcome, expected: Outcome, first: int = 0) -> bool:
    """From the output token number `first` on."""
    return (found.token_ids, found.logprobs) == (expected.token_ids[first:], expected.logprobs[first:])


def check(found: Answers, expected: Answers) -> None:
    wrong = [name for name, outcome in found.items() if not same(outcome, expected[name])]
    assert wrong == []


def cached(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    with engine(config, num_blocks=MANY_BLOCKS) as core:
        requests = [case.request() for case in some]
        check(computed(core, requests), expected)
        computed_tokens = core.load.num_prefilled_tokens
        check(computed(core, requests), expected)
        again = core.load.num_prefilled_tokens - computed_tokens
        assert again < computed_tokens / 2 + 16 * len(requests), "the prefix cache was of little use"


def with_budget(num_tokens: int) -> Way:
    def way(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
        with engine(config, max_num_batched_tokens=num_tokens, num_blocks=MANY_BLOCKS) as core:
            check(computed(core, [case.request() for case in some]), expected)

    return way


def preempted(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    """All prompts in one step, in a pool that has room for them and not for what follows."""
    longest = max(len(case.prompt) + 24 for case in some)
    num_blocks = max(-(-longest // 16), sum(-(-len(case.prompt) // 16) for case in some))
    sizes = {"num_blocks": num_blocks, "max_model_len": longest, "max_num_batched_tokens": 16 * num_blocks}
    with engine(config, enable_prefix_caching=False, **sizes) as core:
        check(computed(core, [case.request() for case in some]), expected)
        assert core.load.num_preemptions > 0


def two_threads(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        set_num_threads(2)
        with engine(config) as core:
            check(computed(core, [case.request() for case in some]), expected)
    finally:
        torch.set_num_threads(before)


def resumed(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    emitted = {case.name: random.Random(case.name).randrange(case.params.max_tokens or 1) for case in some}
    with engine(config) as core:
        requests = [case.request(expected[case.name].token_ids[: emitted[case.name]]) for case in some]
        found = computed(core, requests)
    assert [name for name, first in emitted.items() if not same(found[name], expected[name], first)] == []


def handed_over(config: EngineConfig, some: Sequence[Case], expected: Answers) -> None:
    pair = CorePair(config)
    for case in some:
        pair.start(case.name, case.prompt, case.params)
        pair.run()
    pair.close()
    check(pair.outcomes, expected)
    loaded = [outcome.loaded for outcome in pair.outcomes.values()]
    assert all(one is not None and one.num_recomputed_blocks == 0 for one in loaded)


def over_files(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    handed_over(config, some, expected)


def over_nixl(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    nixl = nixl_config(Path(config.model), tmp_path).kv_connector
    handed_over(msgspec.structs.replace(config, kv_connector=nixl), some, expected)


def over_redis(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        options = {"url": server.url, "kv_secret_file": str(tmp_path / "secret"), **PATIENT}
        redis = KVConnectorConfig(class_path="kv_transfer.stores.redis.connector:RedisConnector", options=options)
        handed_over(msgspec.structs.replace(config, kv_connector=redis), some, expected)


def over_lmcache(config: EngineConfig, some: Sequence[Case], expected: Answers, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": str(tmp_path / "lmcache"), "kv_secret_file": str(tmp_path / "secret")}
    lmcache = KVConnectorConfig(class_path="kv_transfer.stores.lmcache.connector:LMCacheConnector", options=options)
    handed_over(msgspec.structs.replace(config, kv_connector=lmcache), some, expected)


WAYS: Sequence[Way] = (
    cached, with_budget(16), with_budget(33), with_budget(300), with_budget(2048), preempted,
    two_threads, resumed, over_files, over_nixl, over_redis, over_lmcache,
)  # fmt: skip
"""Each request goes through one of the first six and one of the others."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("model", ["demo", "qwen3", "qwen3_moe"])
def test_a_thousand_sampled_requests_have_the_same_bits_however_they_are_computed(
    tmp_path: Path, model: str, dtype: str
) -> None:
    if model == "demo":
        folder, vocab_size = MODEL_DIR, 500
    else:
        folder, vocab_size = lively_checkpoint(tmp_path / "model", model, max_position_embeddings=4096), 1024
    config = store_config(folder, tmp_path, dtype=dtype, num_blocks=1024, num_threads=1)
    all_cases = cases(vocab_size, seed=len(model))
    expected = alone(config, all_cases)
    assert len({tuple(outcome.token_ids) for outcome in expected.values()}) > NUM_PER_MODEL * 0.9
    for number, way in enumerate(WAYS):
        way(config, all_cases[number % 6 :: 6], expected, tmp_path)
