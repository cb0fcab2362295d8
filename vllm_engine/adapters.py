"""LoRA adapters in vLLM: loaded by all workers before the first request, each into a slot of its own.

vLLM cuts tensors that do not fit to what does, and ignores those of layers that the model does not have: here they are
refused, as by the built-in engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from engine.adapter_config import AdapterConfig
from engine.core.messages import EngineInfo
from engine.errors import EngineError, InvalidCheckpoint, UnsupportedModel, shown
from engine.identity import CheckpointState


def adapter_arguments(folders: Mapping[str, str]) -> dict[str, Any]:
    """Of AsyncEngineArgs. Raises EngineError where an adapter's config says that it is not supported."""
    configs = [AdapterConfig.read(name, folder) for name, folder in folders.items()]
    if not configs:
        return {}
    largest = max(configs, key=lambda config: config.max_rank)
    allowed: tuple[int, ...] = get_args(MaxLoRARanks)
    if largest.max_rank > max(allowed):
        raise UnsupportedModel(f"{largest.title}: its rank is {largest.max_rank}; vLLM takes at most {max(allowed)}")
    max_rank = min(rank for rank in allowed if rank >= largest.max_rank)
    # On a CPU vLLM's kernels give tokens without an adapter the last slot (their index is -1): it stays empty.
    num_empty = 1 if current_platform.is_cpu() else 0
    return {"enable_lora": True, "max_loras": len(configs) + num_empty, "max_lora_rank": max_rank}


def lora_requests(folders: Mapping[str, str]) -> dict[str, LoRARequest]:
    """By name, as vLLM takes them with a request."""
    return {name: LoRARequest(name, number, folders[name]) for number, name in enumerate(sorted(folders), 1)}


async def load_adapters(folders: Mapping[str, str], engine: AsyncLLM, info: EngineInfo) -> EngineInfo:
    """What the engine reports with them. Raises EngineError, also where files change meanwhile."""
    checkpoints = [CheckpointState.of(folder) for folder in folders.values()]
    for name, adapter in lora_requests(folders).items():
        args = (name, adapter.lora_int_id, adapter.lora_path)
        answers = await engine.collective_rpc("tandem_add_adapter", args=args)
        absent = set.intersection(*(set(layers) for _, layers in answers))  # from all stages of a pipeline
        problems = [problem for problem, _ in answers if problem]
        problems += [f"the model has no layer {shown(layer)} that takes one" for layer in sorted(absent)]
        if problems:
            raise EngineError(f"adapter {shown(name)}: vLLM cannot use it: {problems[0]}")
    identity = await asyncio.to_thread(info.model_identity.with_adapters, folders)
    for files in checkpoints:
        files.check()
    return msgspec.structs.replace(info, model_identity=identity, lora_adapters=sorted(folders))


def add_adapter(runner: Any, adapter: LoRARequest) -> tuple[str, list[str]]:
    """In a worker, of which this is vLLM's model runner: what is wrong with the adapter, else it is loaded; and the
    layers that are not this worker's."""
    loader = runner.lora_manager
    try:
        absent = _check(loader._load_adapter(adapter).loras, loader._adapter_manager)
        runner.add_lora(adapter)
    except Exception as error:  # vLLM's are of any type, and would arrive with traces
        return str(error) or repr(error), []
    return "", absent


def _check(layers: Mapping[str, Any], manager: Any) -> list[str]:
    """`layers`: vLLM's LoRALayerWeights by name, before those of merged projections are put together. Returns the names
    of those that this worker does not have; raises InvalidCheckpoint."""
    if not layers:
        raise InvalidCheckpoint("it has no tensors")
    merged = {part: (name, parts) for name, parts in manager.packed_modules.items() for part in parts}
    absent = []
    for name, layer in layers.items():
        owner, parts = merged.get(name, (name, [name]))
        if owner not in manager.modules:
            absent.append(name)
        else:
            _check_layer(name, layer, _sizes(manager.modules[owner], parts.index(name), len(parts)))
    return absent


def _sizes(module: Any, place: int, num_parts: int) -> tuple[int | None, int | None]:
    """Inputs and outputs of a projection of this layer; None where vLLM has them otherwise: of experts and embeddings,
    and of ranks."""
    downs = getattr(module, "lora_a_stacked", None)
    if not isinstance(downs, tuple) or len(downs) != num_parts or module.tp_size > 1:
        return None, None
    return downs[place].shape[-1], module.lora_b_stacked[place].shape[-2]


def _check_layer(name: str, layer: Any, sizes: tuple[int | None, int | None]) -> None:
    down, up = layer.lora_a, layer.lora_b
    if down is None or up is None:
        raise InvalidCheckpoint(f"layer {shown(name)} has an A or a B alone")
    num_inputs, num_outputs = sizes
    required = [layer.rank, num_inputs or down.shape[-1]], [num_outputs or up.shape[0], layer.rank]
    if ([*down.shape], [*up.shape]) != required:
        raise InvalidCheckpoint(
            f"layer {shown(name)} has A of shape {[*down.shape]} and B of {[*up.shape]}; the model and the rank of the "
            f"adapter's config require {required[0]} and {required[1]}"
        )
    if not (down.isfinite().all() and (up * layer.scaling).isfinite().all()):  # vLLM scales B when it has loaded it
        raise InvalidCheckpoint(f"layer {shown(name)} has numbers that are not finite {down.dtype}")
