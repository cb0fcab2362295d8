"""The start of vLLM, from the configuration of an engine core: its arguments and environment, the process and its
connector, and what the engine reports of itself."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

from engine.config import EngineConfig, KVConnectorConfig
from engine.core.messages import EngineInfo, EngineRequest
from engine.errors import EngineDeadError, EngineError, suggestion
from engine.identity import compute_identity
from engine.machine import free_host_memory_for_kv
from engine.sampling.params import SamplingParams
from vllm_engine.adapters import adapter_arguments
from vllm_engine.failures import FOLDER
from vllm_engine.kv_messages import MAX_HELD_FRACTION, KVSetup
from vllm_engine.load import LoadMeter
from vllm_engine.requests import vllm_input, vllm_params
from vllm_engine.supported import OWN_SETTINGS, REFUSED, WITHOUT_EFFECT, WORKER_COUNTS, require_vllm

_SOCKET_NAME_LEN = 36
"""vLLM's names are UUIDs."""
_MAX_SOCKET_PATH_LEN = 107
"""Of Linux."""
_KILLED = re.compile(r"Failed core proc\(s\): \{.*: -\d")
"""vLLM's words at its start for a process that a signal has ended: its status is negative."""
_UNTESTED = ("kv_transfer.stores.lmcache", "kv_transfer.multi_connector")
"""Connectors that have not been run with vLLM."""


def engine_arguments(config: EngineConfig) -> AsyncEngineArgs:
    """Raises EngineError for an argument that vLLM or Tandem does not take."""
    _check(config.vllm_args)
    is_cpu = current_platform.is_cpu()
    # On a CPU vLLM would take nearly all memory, or fail if some of it is in use; on a GPU it chooses well.
    kv_cache_bytes = config.kv_cache_bytes or (free_host_memory_for_kv() if is_cpu else None)
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "max_model_len": -1 if config.max_model_len is None else config.max_model_len,
        "seed": config.seed,
        "block_size": config.block_size,
        "num_gpu_blocks_override": config.num_blocks,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_prefix_caching": config.enable_prefix_caching,
        "attention_backend": None if config.attention_backend == "auto" else config.attention_backend,
        "async_scheduling": False,  # the sampling needs a token before it samples the next one
        "scheduling_policy": "priority",
        "max_logprobs": 20,
        "logits_processors": ["vllm_engine.worker:PositionSampling"],
        "worker_extension_cls": "vllm_engine.worker.WorkerFacts",
        "disable_log_stats": True,
        "generation_config": "vllm",  # the model's defaults are the router's matter
        "enforce_eager": is_cpu,  # compiling takes a minute there
        "kv_transfer_config": _kv_transfer_config(config),
        **adapter_arguments(config.lora_adapters),
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


def start(config: EngineConfig, meter: LoadMeter) -> AsyncLLM:
    """Blocks for seconds to minutes. On the main thread: with the thread that starts them vLLM's processes end."""
    try:
        return AsyncLLM.from_engine_args(engine_arguments(config), stat_loggers=[lambda *_: meter])
    except (RuntimeError, ValueError, OSError) as error:
        raise start_error(error) from error


async def warm_up(engine: AsyncLLM, info: EngineInfo) -> None:
    """On a GPU vLLM compiles its log-probabilities when they are first used, for one row and for several: for seconds,
    in which a core that has requests would seem to hang."""
    params = SamplingParams(max_tokens=1, logprobs=1, ignore_eos=True)
    for num_rows in (1, 2):
        requests = [EngineRequest(request_id=f"warm-up-{num_rows}-{row}", prompt_token_ids=[info.vocab_size - 1],
                                  params=params) for row in range(num_rows)]  # fmt: skip
        await asyncio.gather(*(_generated(engine, request) for request in requests))


async def _generated(engine: AsyncLLM, request: EngineRequest) -> None:
    async for _ in engine.generate(vllm_input(request), vllm_params(request), request.request_id):
        pass


@dataclass(frozen=True, slots=True)
class _Layout:
    """Implements engine.kv_layout.PageLayout."""

    block_size: int
    bytes_per_block: int
    digest: bytes


async def engine_info(config: EngineConfig, engine: AsyncLLM) -> EngineInfo:
    vllm_config = engine.vllm_config
    cache, model, scheduler = vllm_config.cache_config, vllm_config.model_config, vllm_config.scheduler_config
    facts = (await engine.collective_rpc("tandem_facts"))[0]
    shape = json.dumps([facts["kv_shape"][0][1:], facts["kv_dtype"], len(facts["kv_shape"]), cache.block_size])
    bytes_per_block = facts["kv_bytes"] // cache.num_gpu_blocks
    layout = _Layout(cache.block_size, bytes_per_block, hashlib.sha256(shape.encode()).digest())
    attention, kv_dtype = "+".join(facts["attention"]), "+".join(facts["kv_dtype"])
    text = f"vllm {require_vllm()}, {facts['runner']}, {attention}, KV {kv_dtype}"
    if given := {name: value for name, value in config.vllm_args.items() if name not in WITHOUT_EFFECT}:
        text += f", {json.dumps(given, sort_keys=True)}"
    identity = await asyncio.to_thread(
        compute_identity,
        config.model,
        dtype=str(model.dtype).removeprefix("torch."),
        layout=layout,
        load_format=config.load_format,
        seed=config.seed,
        engine=text,
    )
    return EngineInfo(
        model_identity=identity,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        num_blocks=cache.num_gpu_blocks - 1,  # vLLM keeps one for itself
        bytes_per_block=bytes_per_block,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_connector="null",
        attention_backend=attention,
        pid=os.getpid(),
    )


async def connect(config: EngineConfig, engine: AsyncLLM, info: EngineInfo, address: str) -> EngineInfo:
    """Begin the connector in the worker; `address`: the host's for it. Raises EngineError."""
    identity = info.model_identity
    setup = KVSetup(
        config=config,
        address=address,
        fingerprint=identity.fingerprint,
        block_size=identity.block_size,
        bytes_per_block=info.bytes_per_block,
        digest=bytes.fromhex(identity.layout_digest),
    )
    try:
        [name] = await engine.collective_rpc("tandem_connect", args=(msgspec.msgpack.encode(setup),))
    except VllmDeadError as error:
        raise end_error(error) from error
    except Exception as error:  # vLLM's own, with the worker's as text
        raise EngineError(f"the KV connector cannot be used: {error}") from error
    return msgspec.structs.replace(info, kv_connector=name)


def start_error(error: Exception) -> EngineError:
    """That of vLLM's start, which raised `error`: of its settings or its model, unless a signal has ended a process."""
    kind = EngineDeadError if _KILLED.search(str(error)) else EngineError
    return kind(f"vLLM does not start: {error}")


def end_error(error: Exception) -> EngineError:
    """That of a vLLM that has ended by itself."""
    return EngineDeadError(f"vLLM has ended: {error}")


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


def _check(given: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in given:
        if (setting := OWN_SETTINGS.get(name)) is not None:
            raise EngineError(f"engine.vllm_args.{name} has a setting of its own: {setting}")
        if (reason := REFUSED.get(name)) is not None:
            raise EngineError(f"engine.vllm_args.{name} is not supported: {reason}")
        if name not in known:
            raise EngineError(f"engine.vllm_args.{name}: vLLM has no such argument{suggestion(name, known)}")
