"""What vllm_engine uses of vLLM, checked by name: fails first when a new version changes it. One process for all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """
import dataclasses, inspect, json
import torch
from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorTransferResults, KVConnectorWorkerMetadata
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, PromptTokenStats, RequestStateStats, SchedulerStats
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from engine.config import EngineConfig, KVConnectorConfig
from engine.errors import EngineError
from vllm_engine import start, supported
from vllm_engine.connector import VllmKVConnector
from vllm_engine.kv_worker import whole_blocks

def refused(**given):
    try:
        start.engine_arguments(EngineConfig(model="m", vllm_args=given))
    except EngineError as error:
        return str(error)

def refused_connector(class_path, **given):
    config = EngineConfig(model="m", kv_connector=KVConnectorConfig(class_path=class_path), vllm_args=given)
    try:
        start.engine_arguments(config)
    except EngineError as error:
        return str(error)

def signature(function):
    return list(inspect.signature(function).parameters)

def fields(kind):
    return [field.name for field in dataclasses.fields(kind)]

def overridden(ours, theirs):
    "By name: the parameters of each method that our class has from vLLM's, there and here."
    names = [name for name in vars(ours) if name in vars(theirs) and callable(vars(theirs)[name])]
    return {name: [signature(getattr(theirs, name)), signature(getattr(ours, name))] for name in names}

def pages(kernel_block_size, num_blocks=3):
    "Whether each layer's are vLLM's blocks, of 32 tokens, and how many blocks the kernel has."
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
    layer_bytes = 3 * spec.page_size_bytes
    place = KVCacheTensor(
        size=2 * layer_bytes, layers=["a", "b"], layer_stride=layer_bytes, block_stride=spec.page_size_bytes
    )
    raw = torch.randint(-128, 128, (place.size,), dtype=torch.int8)
    layout = KVCacheLayout[VllmKVConnector.get_required_kvcache_layout(None)]
    layers = create_kv_cache_views(raw, spec, 3, layout, place, kernel_block_size=kernel_block_size)
    try:
        moved = torch.stack([whole_blocks(layer, num_blocks, 32) for layer in layers])
    except EngineError as error:
        return str(error)
    return [torch.equal(moved.view(torch.int8), raw.view(2, 3, -1)), len(layers[0])]

one = Request("r", [1, 2, 3], SamplingParams(max_tokens=1), None, block_hasher=lambda request: [])
start.engine_arguments(EngineConfig(model="m", vllm_args={"tensor_parallel_size": 2}))
print(json.dumps({
    "arguments": fields(AsyncEngineArgs),
    "handled": [*supported.OWN_SETTINGS, *supported.REFUSED, *supported.WORKER_COUNTS],
    "generate": signature(AsyncLLM.generate),
    "from_engine_args": signature(AsyncLLM.from_engine_args),
    "shutdown": signature(AsyncLLM.shutdown),
    "collective_rpc": signature(AsyncLLM.collective_rpc),
    "is_paused": signature(AsyncLLM.is_paused),
    "lora_request": [*LoRARequest.__struct_fields__],
    "lora_loader": dir(LRUCacheWorkerLoRAManager),
    "lora_layer": signature(LoRALayerWeights.__init__),
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
    "connector": overridden(VllmKVConnector, KVConnectorBase_V1),
    "abstract": sorted(KVConnectorBase_V1.__abstractmethods__),
    "layout": KVCacheLayout[VllmKVConnector.get_required_kvcache_layout(None)].value,
    "transfer_config": fields(KVTransferConfig),
    "transfer_results": fields(KVConnectorTransferResults),
    "connector_output": fields(KVConnectorOutput),
    "scheduler_output": fields(SchedulerOutput),
    "block_state": signature(KVConnectorBlockState.get_block_ids),
    "blocks": signature(KVCacheBlocks.get_block_ids),
    "aggregate": signature(KVConnectorWorkerMetadata.aggregate),
    "request": [*vars(one), *dir(Request)],
    "token_lists": [type(one.prompt_token_ids).__name__, type(one._all_token_ids).__name__,
                    type(one.block_hashes).__name__],
    "waiting": [*signature(SpinCondition.wait), *SpinCondition.wait.__code__.co_names],
    "tokens": [one.prompt_token_ids is one._all_token_ids, list(one.all_token_ids)],
    "finish_reasons": [str(reason) for reason in FinishReason],
    "refused_connectors": [refused_connector("kv_transfer.stores.lmcache.connector:LMCacheConnector"),
                           refused_connector("x:Y", tensor_parallel_size=2)],
    "cuda": envs.VLLM_MAIN_CUDA_VERSION,
    "pages": [pages(None), pages(16), pages(16, num_blocks=4)],
    "gpus": [supported.gpus(), current_platform.is_cuda_alike(), current_platform.is_unspecified()],
    "refused": [refused(speculative_config={}), refused(block_size=16), refused(tensor_paralel_size=2)],
}))
"""
_USED: dict[str, list[str]] = {
    "generate": ["prompt", "sampling_params", "request_id", "lora_request", "priority"],
    "from_engine_args": ["engine_args", "stat_loggers"],
    "shutdown": ["timeout"],
    "collective_rpc": ["method"],
    "is_paused": ["self"],
    "lora_request": ["lora_name", "lora_int_id", "lora_path"],
    "lora_loader": ["_load_adapter"],
    "lora_layer": ["rank", "lora_a", "lora_b"],
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
    "transfer_config": [
        *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"),
        "kv_connector_extra_config",
    ],
    "transfer_results": ["finished_sending", "finished_recving"],
    "connector_output": ["kv_connector_worker_meta", "finished_sending", "finished_recving"],
    "scheduler_output": [
        *("num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids", "kv_connector_block_state"),
    ],
    "block_state": ["req_id"],
    "blocks": ["self"],
    "aggregate": ["other"],
    "request": [
        *("request_id", "sampling_params", "num_prompt_tokens", "num_tokens", "num_computed_tokens"),
        *("prompt_token_ids", "_all_token_ids", "block_hashes", "update_block_hashes", "get_finished_reason"),
    ],
    "finish_reasons": ["stop", "length", "abort"],
    "waiting": ["timeout_ms", "busy_loop_s", "last_read"],
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


def test_a_connector_must_implement_no_methods_but_ours(contract: dict[str, Any]) -> None:
    assert set(contract["abstract"]) <= set(contract["connector"])
    assert len(contract["connector"]) >= 18


def test_the_methods_of_the_connector_have_the_parameters_that_vllm_passes(contract: dict[str, Any]) -> None:
    for name, (theirs, ours) in contract["connector"].items():
        assert ours == theirs, name


def test_a_block_of_a_layer_is_contiguous_in_the_layout_that_the_connector_wants(contract: dict[str, Any]) -> None:
    """Its axes in memory: layers, blocks, heads, tokens, values."""
    assert contract["layout"] == [0, 1, 2, 3, 4]


def test_pages_are_whole_blocks_where_the_kernel_has_smaller_ones(contract: dict[str, Any]) -> None:
    undivided, divided, wrong = contract["pages"]
    assert undivided == [True, 3]
    assert divided == [True, 6]
    assert wrong.startswith("KV of vLLM's shape [6, 2, 16, 16], 4 blocks of 32 tokens, cannot be handed over: set eng")
    assert "(--block-size) to the size that the attention kernel takes" in wrong


def test_a_token_of_a_request_can_be_replaced_where_vllm_keeps_it(contract: dict[str, Any]) -> None:
    assert contract["token_lists"] == ["list", "list", "list"]
    assert contract["tokens"] == [False, [1, 2, 3]]


def test_a_vllm_for_cpus_is_recognised_without_its_import(contract: dict[str, Any]) -> None:
    assert contract["gpus"] == [None, False, False]


def test_the_image_has_nixl_for_the_cuda_version_of_vllms_releases(contract: dict[str, Any]) -> None:
    dockerfile = (Path(__file__).parents[2] / "vllm.Dockerfile").read_text()
    assert f"ARG NIXL=nixl-cu{contract['cuda'].split('.')[0]}\n" in dockerfile


def test_what_cannot_be_handed_over_is_refused_by_name(contract: dict[str, Any]) -> None:
    lmcache, parallel = contract["refused_connectors"]
    assert "lmcache.connector:LMCacheConnector is not supported; set transfer.connector to one of" in lmcache
    assert "engine.vllm_args.tensor_parallel_size: KV of several workers is not handed over yet" in parallel
