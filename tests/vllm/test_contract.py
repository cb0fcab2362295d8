"""What vllm_engine uses of vLLM, checked by name: fails first when a new version changes it. One process for all."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

_SCRIPT = """
import dataclasses, inspect, json
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, PromptTokenStats, RequestStateStats, SchedulerStats
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from engine.config import EngineConfig
from engine.errors import EngineError
from vllm_engine import arguments

def refused(**given):
    try:
        arguments.engine_arguments(EngineConfig(model="m", vllm_args=given))
    except EngineError as error:
        return str(error)

def signature(function):
    return list(inspect.signature(function).parameters)

def fields(kind):
    return [field.name for field in dataclasses.fields(kind)]

arguments.engine_arguments(EngineConfig(model="m", vllm_args={"tensor_parallel_size": 2}))
print(json.dumps({
    "arguments": fields(AsyncEngineArgs),
    "handled": [*arguments._SETTINGS, *arguments._REFUSED],
    "generate": signature(AsyncLLM.generate),
    "from_engine_args": signature(AsyncLLM.from_engine_args),
    "shutdown": signature(AsyncLLM.shutdown),
    "collective_rpc": signature(AsyncLLM.collective_rpc),
    "is_paused": signature(AsyncLLM.is_paused),
    "record": signature(StatLoggerBase.record),
    "tokens_input": signature(tokens_input),
    "output": signature(RequestOutput.__init__),
    "completion": fields(CompletionOutput),
    "scheduler_stats": fields(SchedulerStats),
    "request_stats": fields(RequestStateStats),
    "iteration_stats": [*vars(IterationStats())],
    "prompt_stats": fields(PromptTokenStats),
    "params": [*SamplingParams.__struct_fields__],
    "batch_update": fields(BatchUpdate),
    "processor": sorted(LogitsProcessor.__abstractmethods__),
    "refused": [refused(speculative_config={}), refused(block_size=16), refused(tensor_paralel_size=2)],
}))
"""
_USED: dict[str, list[str]] = {
    "generate": ["prompt", "sampling_params", "request_id", "priority"],
    "from_engine_args": ["engine_args", "stat_loggers"],
    "shutdown": ["timeout"],
    "collective_rpc": ["method"],
    "is_paused": ["self"],
    "record": ["scheduler_stats", "iteration_stats"],
    "tokens_input": ["prompt_token_ids", "cache_salt"],
    "output": ["outputs", "finished", "metrics", "num_cached_tokens", "prompt_logprobs"],
    "completion": ["token_ids", "logprobs", "finish_reason"],
    "scheduler_stats": ["num_running_reqs", "kv_cache_usage"],
    "request_stats": ["queued_ts", "scheduled_ts"],
    "iteration_stats": ["num_generation_tokens", "num_preempted_reqs", "prompt_token_stats"],
    "prompt_stats": ["computed"],
    "params": ["detokenize", "extra_args", "ignore_eos", "logprobs", "output_kind", "prompt_logprobs", "skip_clone"],
    "batch_update": ["batch_size", "removed", "added", "moved"],
}


@pytest.fixture(scope="module")
def contract(vllm_python: str) -> dict[str, Any]:
    ran = subprocess.run([vllm_python, "-c", _SCRIPT], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _USED)
def test_vllm_has_what_is_used_of_it(contract: dict[str, Any], name: str) -> None:
    assert set(_USED[name]) <= set(contract[name])


def test_a_logits_processor_must_implement_these_methods_and_no_others(contract: dict[str, Any]) -> None:
    assert contract["processor"] == ["__init__", "apply", "is_argmax_invariant", "update_state"]


def test_every_argument_that_is_set_or_refused_exists(contract: dict[str, Any]) -> None:
    assert set(contract["handled"]) <= set(contract["arguments"])


def test_arguments_are_refused_with_the_reason(contract: dict[str, Any]) -> None:
    speculation, block_size, misspelt = contract["refused"]
    assert "does not continue sampled streams exactly" in speculation
    assert block_size == "engine.vllm_args.block_size has a setting of its own: engine.block_size"
    assert misspelt.endswith("vLLM has no such argument; did you mean tensor_parallel_size?")
