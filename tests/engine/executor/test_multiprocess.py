"""An engine of two ranks answers as one of a single rank does, and a rank that ends or stops ends the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine import LLM, AsyncEngine, SamplingParams
from engine.config import EngineConfig
from engine.core.messages import EngineRequest
from engine.errors import EngineDeadError, UnsupportedModel
from engine.executor.multiprocess import MultiprocessExecutor
from engine.ranks import RankLost
from tests.builders import lively_checkpoint
from tests.waiting import Stopwatch, wait_until

PROMPTS = [[(index * 7 + token * token) % 1000 + 3 for token in range(size)] for index, size in enumerate((5, 37, 150))]
GREEDY, SEEDED = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), SamplingParams(max_tokens=30, seed=7)
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def engine_of(checkpoint: Path, size: int) -> LLM:
    """With room for little more than the longest prompt, so that requests are preempted, and prompts in chunks."""
    return LLM(
        checkpoint,
        dtype="float32",
        tensor_parallel_size=size,
        num_threads=1,
        num_gpu_blocks_override=14,
        max_num_batched_tokens=32,
        skip_tokenizer_init=True,
    )


@pytest.fixture
def two_ranks(checkpoint: Path) -> Iterator[LLM]:
    llm = engine_of(checkpoint, 2)
    yield llm
    llm.core.shutdown()


def rank_processes() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children(recursive=True) if "engine.executor.process" in child.cmdline()
    ]


def answers(llm: LLM) -> list[object]:
    found: list[object] = []
    for params in (GREEDY, SEEDED, GREEDY):  # the last time from the prefix cache
        found += [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert llm.core.load.num_preemptions > 0
    (scored,) = llm.generate([PROMPTS[1]], WITH_LOGPROBS, use_tqdm=False)
    assert scored.prompt_logprobs is not None
    found += [list(entries or ()) for entries in scored.prompt_logprobs]
    return found


def test_two_ranks_answer_as_one_does_and_leave_nothing(checkpoint: Path) -> None:
    one = engine_of(checkpoint, 1)
    expected = answers(one)
    one.core.shutdown()
    assert len({tuple(answer) for answer in expected[:6]}) == 6  # type: ignore[arg-type]
    two = engine_of(checkpoint, 2)
    assert answers(two) == expected
    two.core.shutdown()
    assert rank_processes() == []


@pytest.mark.slow
def test_a_stopped_rank_ends_the_engine(two_ranks: LLM) -> None:
    """Between steps. A waiting engine finds out as well."""
    (process,) = rank_processes()
    process.suspend()
    executor = two_ranks.core._executor
    assert isinstance(executor, MultiprocessExecutor)
    wait_until(lambda: executor._lost is not None)
    with pytest.raises(RankLost, match=r"rank 1 \(process \d+\) is stopped"):
        two_ranks.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert rank_processes() == []


@pytest.mark.slow
async def test_a_killed_rank_ends_the_core_within_two_seconds(checkpoint: Path) -> None:
    """In the middle of its steps."""
    config = EngineConfig(model=str(checkpoint), tensor_parallel_size=2, num_threads=1, num_blocks=200)
    engine = await AsyncEngine.start(config)
    (rank,) = rank_processes()
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    stream = engine.add_request(EngineRequest(request_id="r", prompt_token_ids=PROMPTS[1], params=params))
    await anext(stream)
    watch = Stopwatch()
    rank.kill()
    with pytest.raises(EngineDeadError, match="ended with status 1"):
        async for _ in stream:
            pass
    assert watch.s < 2.0
    assert engine.crashed
    await engine.shutdown()
    assert rank_processes() == []


def test_a_model_that_cannot_be_divided_is_rejected_before_a_process_starts(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size is 3, which cannot split 2 KV heads"):
        engine_of(checkpoint, 3)
    assert rank_processes() == []
