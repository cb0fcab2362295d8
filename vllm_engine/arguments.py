"""vLLM's arguments and environment, from the configuration of an engine core."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from engine.config import EngineConfig, KVConnectorConfig
from engine.errors import EngineError
from engine.machine import free_host_memory_for_kv
from vllm_engine.supported import OWN_SETTINGS, REFUSED, WORKER_COUNTS

FOLDER = "TANDEM_VLLM_FOLDER"
"""Environment variable: the private folder that the processes of one vLLM share."""
MAX_HELD_FRACTION = "max_held_fraction"
"""Option of vllm_engine/connector.py: fraction of the blocks that transfers may hold."""

_SOCKET_NAME_LEN = 36
"""vLLM's names are UUIDs."""
_MAX_SOCKET_PATH_LEN = 107
"""Of Linux."""
_UNTESTED = ("kv_transfer.stores.lmcache", "kv_transfer.multi_connector")
"""Connectors that have not been run with vLLM."""


def engine_arguments(config: EngineConfig) -> AsyncEngineArgs:
    """Raises EngineError for an argument that vLLM or Tandem does not take."""
    _check(config.vllm_args)
    backend = None if config.attention_backend == "auto" else config.attention_backend
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "max_model_len": -1 if config.max_model_len is None else config.max_model_len,
        "seed": config.seed,
        "block_size": config.block_size,
        "num_gpu_blocks_override": config.num_blocks,
        "kv_cache_memory_bytes": config.kv_cache_bytes or _kv_cache_bytes(),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_prefix_caching": config.enable_prefix_caching,
        "attention_backend": backend,
        "async_scheduling": False,  # the sampling needs a token before it samples the next one
        "scheduling_policy": "priority",
        "max_logprobs": 20,
        "logits_processors": ["vllm_engine.sampling:PositionSampling"],
        "worker_extension_cls": "vllm_engine.worker.WorkerFacts",
        "disable_log_stats": True,
        "generation_config": "vllm",  # the model's defaults are the router's matter
        "enforce_eager": current_platform.is_cpu(),  # compiling takes a minute there
        "kv_transfer_config": _kv_transfer_config(config),
        **config.vllm_args,
    }
    try:
        return AsyncEngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise EngineError(f"engine.vllm_args: {error}") from error


def has_connector(config: EngineConfig) -> bool:
    return config.kv_connector != KVConnectorConfig()


def set_environment(config: EngineConfig, folder: Path) -> None:
    """For this process and those that vLLM starts. What the user has set stays."""
    cores = ",".join(map(str, config.cpu_cores)) or "nobind"
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if current_platform.is_cpu() and config.vllm_args.get("enforce_eager", True):
        defaults["TORCH_COMPILE_DISABLE"] = "1"  # it would compile its log-probabilities all the same
    if config.num_threads is not None:
        defaults["OMP_NUM_THREADS"] = str(config.num_threads)
    os.environ.update({name: value for name, value in defaults.items() if name not in os.environ})
    os.environ |= {
        FOLDER: str(folder),
        "VLLM_RPC_BASE_PATH": _for_sockets(folder),
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has no logits processors
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # see process.py
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }


def _for_sockets(folder: Path) -> str:
    """The folder by a path that leaves room for the names of vLLM's sockets, as long as this process lives."""
    if len(os.fsencode(folder)) + 1 + _SOCKET_NAME_LEN <= _MAX_SOCKET_PATH_LEN:
        return str(folder)
    return f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"


def _kv_transfer_config(config: EngineConfig) -> KVTransferConfig | None:
    """vLLM's own connector class is the adapter to Tandem's. Raises EngineError."""
    if not has_connector(config):
        return None
    if config.kv_connector.class_path.startswith(_UNTESTED):
        raise EngineError(
            f"engine.kind is vllm: {config.kv_connector.class_path} is not supported; set transfer.connector to one of"
            " shared_storage, redis and nixl, or to null"
        )
    for name in WORKER_COUNTS:
        if config.vllm_args.get(name, 1) != 1:
            raise EngineError(
                f"engine.vllm_args.{name}: KV of several workers is not handed over yet: --kv-connector null"
            )
    return KVTransferConfig(
        kv_connector="VllmKVConnector",
        kv_connector_module_path="vllm_engine.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={MAX_HELD_FRACTION: config.max_held_fraction},
    )


def _kv_cache_bytes() -> int | None:
    """On a CPU vLLM would take nearly all memory, or fail if some of it is in use; on a GPU it chooses well."""
    return free_host_memory_for_kv() if current_platform.is_cpu() else None


def _check(given: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in given:
        if (setting := OWN_SETTINGS.get(name)) is not None:
            raise EngineError(f"engine.vllm_args.{name} has a setting of its own: {setting}")
        if (reason := REFUSED.get(name)) is not None:
            raise EngineError(f"engine.vllm_args.{name} is not supported: {reason}")
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise EngineError(f"engine.vllm_args.{name}: vLLM has no such argument{hint}")
