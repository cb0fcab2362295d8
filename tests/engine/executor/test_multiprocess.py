"""An engine of several ranks answers as one of a single rank does, and a rank that ends or stops ends the engine."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from engine import LLM, AsyncEngine, SamplingParams
from engine.config import EngineConfig, KVConnectorConfig
from engine.core.messages import EngineRequest
from engine.errors import CapacityError, EngineDeadError, EngineError, UnsupportedModel, may_pass
from engine.executor.multiprocess import MultiprocessExecutor, _start_worker, make_executor
from engine.executor.process import Start
from engine.executor.step import MICRO_BATCH_TOKENS
from engine.executor.worker import load_part
from engine.machine import usable_cores
from engine.models import Decoder
from engine.models.config import ModelConfig
from engine.ranks import RankLost, SharedMemoryRanks
from tests.builders import lively_checkpoint
from tests.waiting import Stopwatch, wait_until

PROMPTS = [[(index * 7 + token * token) % 1000 + 3 for token in range(size)] for index, size in enumerate((5, 37, 150))]
ALIKE = [[*range(3, 99), *range(500 + 30 * number, 516 + 30 * number)] for number in range(3)]
"""One beginning; in a step of two micro-batches it is in both, and read by the second."""
GREEDY, SEEDED = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), SamplingParams(max_tokens=30, seed=7)
PENALISED = SamplingParams(
    n=2, seed=3, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
)
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, logprobs=2)

Scored = list[dict[int, Any]]
"""Of a prompt's tokens and of the answer's, by token id."""
Answers = tuple[list[list[int]], Scored]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Callable[[str], Answers]:
    """The answers of one rank, by element type."""

    @functools.cache
    def of_one_rank(dtype: str) -> Answers:
        llm = engine_of(checkpoint, dtype=dtype)
        found = answers(llm)
        llm.core.shutdown()
        assert len({tuple(tokens) for tokens in found[0][:6]}) == 6
        return found

    return of_one_rank


def engine_of(checkpoint: Path, tensor: int = 1, pipeline: int = 1, dtype: str = "float32") -> LLM:
    """With room for little more than the longest prompt, so that requests are preempted, and prompts in chunks; those
    of an engine with stages are large enough for micro-batches."""
    return LLM(
        checkpoint,
        dtype=dtype,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        num_threads=1,
        num_gpu_blocks_override=14,
        max_num_batched_tokens=32 if pipeline == 1 else 2 * MICRO_BATCH_TOKENS,
        skip_tokenizer_init=True,
    )


@pytest.fixture
def two_ranks(checkpoint: Path) -> Iterator[LLM]:
    llm = engine_of(checkpoint, tensor=2)
    yield llm
    llm.core.shutdown()


def rank_processes() -> list[psutil.Process]:
    ranks = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "engine.executor.process" in child.cmdline():
                ranks.append(child)
    return ranks


def answers(llm: LLM) -> Answers:
    found = []
    for params in (GREEDY, SEEDED, PENALISED, GREEDY):  # the last time from the prefix cache
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            found += [choice.token_ids for choice in output.outputs]
    found += [output.outputs[0].token_ids for output in llm.generate(ALIKE, GREEDY, use_tqdm=False)]
    assert llm.core.load.num_preemptions > 0
    (scored,) = llm.generate([PROMPTS[1]], WITH_LOGPROBS, use_tqdm=False)
    assert scored.prompt_logprobs is not None
    assert scored.outputs[0].logprobs is not None
    return found, [entries or {} for entries in (*scored.prompt_logprobs, *scored.outputs[0].logprobs)]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "dtype", "shut_down"),
    [
        (2, 1, "float32", False),
        (1, 2, "bfloat16", True),
        pytest.param(1, 2, "float32", True, marks=pytest.mark.slow),
        pytest.param(1, 3, "float16", True, marks=pytest.mark.slow),
        pytest.param(2, 2, "float32", False, marks=pytest.mark.slow),
    ],
)
def test_several_ranks_answer_as_one_does_and_leave_nothing(
    checkpoint: Path, expected: Callable[[str], Answers], tensor: int, pipeline: int, dtype: str, shut_down: bool
) -> None:
    """The tokens; stages alone have the bits of one stage, and so the log-probabilities."""
    tokens, scored = expected(dtype)
    llm = engine_of(checkpoint, tensor, pipeline, dtype)
    found, found_scored = answers(llm)
    assert found == tokens
    assert [list(entries) for entries in found_scored] == [list(entries) for entries in scored]
    assert tensor > 1 or found_scored == scored
    if shut_down:
        llm.core.shutdown()
        assert rank_processes() == []
    else:  # as in a notebook, where another `LLM` takes the place of this one
        ranks = rank_processes()
        assert len(ranks) == tensor * pipeline - 1
        del llm
        gc.collect()
        wait_until(lambda: not any(psutil.pid_exists(rank.pid) for rank in ranks), within_s=20)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline", "dtype"), [(2, 1, "float32"), (1, 2, "bfloat16"), (2, 2, "float32")])
def test_ranks_with_a_memory_each_answer_as_one_does_until_one_is_killed(
    checkpoint: Path,
    expected: Callable[[str], Answers],
    monkeypatch: pytest.MonkeyPatch,
    tensor: int,
    pipeline: int,
    dtype: str,
) -> None:
    """As on GPUs, but by gloo, each with the KV of its own layers and heads."""
    monkeypatch.setattr("engine.executor.multiprocess.shares_memory", lambda config: False)
    llm = engine_of(checkpoint, tensor, pipeline, dtype)
    assert answers(llm)[0] == expected(dtype)[0]
    rank_processes()[0].kill()
    with pytest.raises(RankLost):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.core.shutdown()
    assert rank_processes() == []


@pytest.mark.slow
def test_a_rank_without_room_for_its_kv_ends_the_start_with_its_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own memory, as another GPU's: the core's rank has room. The first exchange would wait for it for ever."""
    monkeypatch.setattr("engine.executor.multiprocess.shares_memory", lambda config: False)
    monkeypatch.setattr("engine.executor.multiprocess.own_kv", lambda *args: torch.zeros(0))
    config = ModelConfig.from_folder(checkpoint)
    engine_config = EngineConfig(model=str(checkpoint), dtype="float32", tensor_parallel_size=2)
    executor = make_executor(engine_config, config, lambda: None)
    with pytest.raises(EngineError, match=r"rank 1: cannot allocate [\d.]+ GiB of KV memory"):
        executor.allocate_kv(config.kv_layout(dtype="float32", block_size=16), 1 << 40)
    executor.shutdown()


def test_several_gpus_are_rejected_with_a_connector(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    connector = KVConnectorConfig(class_path="kv_transfer.nixl.connector:NixlConnector")
    config = EngineConfig(model=str(checkpoint), device="cuda", tensor_parallel_size=2, kv_connector=connector)
    with pytest.raises(UnsupportedModel, match="supported without a KV connector on cuda, not with kv_transfer"):
        make_executor(config, ModelConfig.from_folder(checkpoint), lambda: None)


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
@pytest.mark.parametrize(("tensor", "pipeline", "which"), [(2, 1, 0), (1, 2, 0), (1, 3, 1), (2, 2, 1)])
async def test_a_killed_rank_ends_the_core_within_two_seconds(
    checkpoint: Path, tensor: int, pipeline: int, which: int
) -> None:
    """In the middle of its steps. Until then each rank has its share of the cores, if there are enough."""
    config = EngineConfig(
        model=str(checkpoint),
        num_blocks=200,
        cpu_cores=tuple(usable_cores()),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
    )
    engine = await AsyncEngine.start(config)
    rank = rank_processes()[which]
    if len(config.cpu_cores) >= config.parallelism.num_ranks:
        assert not {*rank.cpu_affinity()} & {*psutil.Process(engine.info.pid).cpu_affinity()}
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, which cannot split 2 KV heads"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size is 4, but .* 3 layers .*: it must be at most 3"),
        (
            {"pipeline_parallel_size": 2, "model_impl": "transformers"},
            "pipeline_parallel_size above 1 is supported for native models; set it to 1 with the transformers backend",
        ),
        (
            {"pipeline_parallel_size": 2, "device": "cuda", "tensor_parallel_size": 2},
            "tensor_parallel_size above 1: 4 ranks need 4 GPUs, torch sees [0-3]$",
        ),
    ],
)
def test_what_cannot_be_divided_is_rejected_before_a_process_starts(
    checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        LLM(checkpoint, skip_tokenizer_init=True, **options)
    assert rank_processes() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_model_len": 10**6}, CapacityError),
        pytest.param(
            {"kv_connector": {"class_path": "engine.kv_connector:Missing"}}, EngineError, marks=pytest.mark.slow
        ),
    ],
)
def test_a_start_that_fails_leaves_no_rank(checkpoint: Path, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        LLM(checkpoint, skip_tokenizer_init=True, tensor_parallel_size=2, num_threads=1, num_blocks=64, **options)
    assert rank_processes() == []


@pytest.mark.parametrize(
    ("signal_number", "error"),
    [
        (signal.SIGSTOP, r"rank 1 \(process \d+\) is stopped"),
        pytest.param(signal.SIGKILL, "rank 1 .*ended", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stops_or_ends_while_it_starts_ends_the_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, signal_number: int, error: str
) -> None:
    """While the core's rank loads."""

    def load(*arguments: Any) -> Decoder:
        (process,) = rank_processes()
        process.send_signal(signal_number)
        return load_part(*arguments)

    monkeypatch.setattr("engine.executor.multiprocess.load_part", load)
    with pytest.raises(EngineError, match=error) as caught:
        engine_of(checkpoint, tensor=2)
    assert may_pass(caught.value)
    assert rank_processes() == []


def test_the_error_of_a_rank_that_cannot_load_is_not_hidden_by_the_end_of_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks, whose core's is the last."""

    def start_worker(start: Start, sockets: Any) -> Any:
        model = "missing" if start.rank == 1 else start.config.model
        config = msgspec.structs.replace(start.config, model=model)
        return _start_worker(msgspec.structs.replace(start, config=config), sockets)

    monkeypatch.setattr("engine.executor.multiprocess._start_worker", start_worker)
    with pytest.raises(EngineError, match="rank 1: cannot read config") as caught:
        engine_of(checkpoint, pipeline=3)
    assert not may_pass(caught.value)
    assert rank_processes() == []


@pytest.mark.parametrize(
    ("script", "error", "passes"),
    [
        ("NO_DESCRIPTOR", "rank 1: .* Too many open files", True),
        ("UNINSTALLED", "rank 1: torch cannot be imported: .*: pip install -c constraints", False),
    ],
)
def test_a_rank_whose_start_fails_may_start_later_if_only_the_machine_lacks_something(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: str, *, passes: bool
) -> None:
    popen = subprocess.Popen

    def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        python, _, _, fd = argv
        return popen((python, "-c", globals()[script], fd), **options)

    monkeypatch.setattr("engine.executor.multiprocess.subprocess.Popen", start)
    with pytest.raises(EngineError, match=error) as caught:
        engine_of(checkpoint, tensor=2)
    assert isinstance(caught.value, RankLost) == may_pass(caught.value) == passes
    assert rank_processes() == []


@pytest.mark.parametrize(
    "is_missing", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["loads", "cannot load"]
)
def test_a_rank_whose_core_ends_while_it_loads_prints_no_traceback(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], is_missing: bool
) -> None:
    config = EngineConfig(model="missing" if is_missing else str(checkpoint), num_threads=1)
    slots_fd, kv_fd = os.memfd_create("slots"), os.memfd_create("kv")
    os.ftruncate(slots_fd, SharedMemoryRanks.memory_bytes(1))
    start = Start(
        config=config, rank=0, peer_fds={}, before_fd=None, after_fd=None, slots_fd=slots_fd, kv_fd=kv_fd,
        groups_fd=None, parent_pid=None,
    )  # fmt: skip
    worker = _start_worker(start, ())
    worker.pipe.close()
    assert (worker.process.wait(), capfd.readouterr().err) == (0, "")
    os.close(slots_fd)
    os.close(kv_fd)


NO_DESCRIPTOR = """
import errno, os, sys
from engine.executor import process

class Full:
    def find_spec(self, name, *_):
        if name == "torch":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

sys.meta_path.insert(0, Full())
process.main()
"""
"""A rank's process that cannot open another file."""


UNINSTALLED = """
import sys
from engine.executor import process

sys.modules["torch"] = None
process.main()
"""
"""One in whose environment torch is missing."""


FULL_GPU = """
import torch
from engine.executor import process, worker

def forward_part(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has ...")

worker.forward_part = forward_part
process.main()
"""
"""A rank's process whose first step finds no memory on its GPU."""


@pytest.mark.parametrize(
    "shares_memory", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a memory each", "shared"]
)
def test_a_rank_without_memory_for_its_first_step_ends_the_start_with_its_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, shares_memory: bool
) -> None:
    """With a memory each, the core's rank waits meanwhile for the connection, which the other one never makes."""
    popen = subprocess.Popen

    def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        python, _, _, fd = argv
        return popen((python, "-c", FULL_GPU, fd), **options)

    created, create = dict[str, int](), os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name, *flags: created.setdefault(name, create(name, *flags)))
    monkeypatch.setattr("engine.executor.multiprocess.shares_memory", lambda config: shares_memory)
    monkeypatch.setattr("engine.executor.multiprocess.subprocess.Popen", start)
    with pytest.raises(
        EngineError, match=r"rank 1: the GPU has no memory left: CUDA .* 2\.00 GiB; .* lower max_num_batched_tokens"
    ):
        engine_of(checkpoint, tensor=2)
    assert rank_processes() == []
    if not shares_memory:  # torch's store, which the garbage collector destroys later, writes to it then
        assert "tandem-groups" in os.readlink(f"/proc/self/fd/{created['tandem-groups']}")


def test_an_interrupted_step_is_the_last_one(two_ranks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is still in it: with the next step's tensors it would answer something else."""
    executor = two_ranks.core._executor
    assert isinstance(executor, MultiprocessExecutor)

    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(executor._model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two_ranks.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    with pytest.raises(RankLost, match=r"a step has ended with KeyboardInterrupt\(\); start the engine again"):
        two_ranks.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
