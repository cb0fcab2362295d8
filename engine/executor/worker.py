"""One rank: its part of the model and of the KV memory, and, other than in the core's process, its steps."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import assert_never

import numpy as np
import torch

from engine.config import EngineConfig
from engine.executor.executor import explained_out_of_memory, zeroed_memory
from engine.executor.process import Start
from engine.executor.step import AllocateKV, Logits, Message, Step, StepInputs
from engine.kv_layout import KVLayout
from engine.models import Decoder, load_model
from engine.models.config import ModelConfig
from engine.partition import Part
from engine.ranks import (
    DistributedRanks,
    DistributedStages,
    Ends,
    OneRank,
    ProcessGroup,
    RankLost,
    SharedMemoryRanks,
    SocketStages,
)


def load_part(config: EngineConfig, model_config: ModelConfig, part: Part, ends: Ends, slots_fd: int) -> Decoder:
    """The rank's part of the model, where ranks share memory. `slots_fd`: memory for the exchanges of every stage.
    Raises InvalidCheckpoint, UnsupportedModel."""
    num_bytes = SharedMemoryRanks.memory_bytes(len(ends.peers) + 1)
    memory = mmap.mmap(slots_fd, num_bytes, offset=part.stage * num_bytes)
    ranks = SharedMemoryRanks(part.tensor_rank, ends.peers, memory) if ends.peers else OneRank()
    return load_model(model_config, config, part=part, ranks=ranks, stages=SocketStages(ends.before, ends.after))


def load_distributed_part(
    config: EngineConfig, model_config: ModelConfig, part: Part, groups_fd: int, check: Callable[[], None]
) -> Decoder:
    """The same where each rank has memory of its own. The ranks meet in the file `groups_fd`. `check` raises RankLost
    once another rank has ended."""
    size, device = part.parallelism.tensor_parallel_size, torch.device(config.device)
    every = ProcessGroup("all", groups_fd, part.rank, part.parallelism.num_ranks, device, check)
    stage = ProcessGroup(f"stage {part.stage}", groups_fd, part.tensor_rank, size, device, check)
    ranks = DistributedRanks(stage) if size > 1 else OneRank()
    return load_model(model_config, config, part=part, ranks=ranks, stages=DistributedStages(every, size))


def use_own_gpu(config: EngineConfig, rank: int) -> None:
    """In this thread `cuda` means the rank's own device. That of the core's rank is the first."""
    if config.device == "cuda":
        parallelism = config.parallelism
        torch.cuda.set_device((rank - parallelism.core_rank) % parallelism.num_ranks)


def rank_view(kv_cache: torch.Tensor, part: Part) -> torch.Tensor:
    """The layers and heads of one rank in the KV memory of all."""
    layers, heads = part.layers, part.kv_heads
    return kv_cache[:, layers.start : layers.stop, :, heads.start : heads.stop]


def map_kv(kv_fd: int, layout: KVLayout, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """The KV memory of all ranks [num_blocks, *layout.page_shape]."""
    pages = mmap.mmap(kv_fd, num_blocks * layout.bytes_per_block)
    return torch.frombuffer(pages, dtype=dtype).view(num_blocks, *layout.page_shape)


def own_kv(part: Part, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The rank's layers and heads of the KV memory, where each rank has memory of its own. Raises CapacityError."""
    own = replace(layout, num_layers=len(part.layers), num_kv_heads=len(part.kv_heads))
    return zeroed_memory((num_blocks, *own.page_shape), dtype, device)


def forward_part(
    model: Decoder, inputs: StepInputs, kv_cache: torch.Tensor, part: Part, device: torch.device
) -> torch.Tensor:
    """One step of one rank: `Decoder.forward` on each micro-batch. A stage computes one while the next stage computes
    the one before; the bits of a row do not depend on the rows beside it."""
    hidden = []
    for batch in inputs.micro_batches(part.parallelism.pipeline_parallel_size):
        token_ids, positions, metadata = batch.tensors(device)
        needed, adapters = batch.last_tokens(metadata), batch.token_adapters(device)
        hidden.append(model.forward(token_ids, positions, kv_cache, metadata, needed, adapters))
    return torch.cat(hidden) if len(hidden) > 1 else hidden[0]


def _check_core(pid: int) -> None:
    """Of a rank that the core's process `pid` has started, and kills if another one is lost."""
    if os.getppid() != pid:
        raise RankLost(f"the core's process {pid} has ended")


class Worker:
    """A rank in a process of its own: computes what the core's process sends. Keeps the last step's hidden states."""

    @explained_out_of_memory()
    def __init__(self, start: Start) -> None:
        """Loads the model. Raises InvalidCheckpoint, UnsupportedModel, CapacityError."""
        config = self._config = start.config
        model_config = self._model_config = ModelConfig.from_folder(Path(config.model))
        self._part = config.parallelism.part(start.rank, model_config)
        self._device = torch.device(config.device)
        self._groups_fd = start.groups_fd
        self._kv_fd = start.kv_fd
        self._kv_cache: torch.Tensor
        self._hidden: torch.Tensor
        if start.groups_fd is not None:
            use_own_gpu(config, start.rank)
            check = partial(_check_core, os.getppid())
            self._model = load_distributed_part(config, model_config, self._part, start.groups_fd, check)
            return
        ends = Ends(
            {rank: socket.socket(fileno=fd) for rank, fd in start.peer_fds.items()},
            None if start.before_fd is None else socket.socket(fileno=start.before_fd),
            None if start.after_fd is None else socket.socket(fileno=start.after_fd),
        )
        self._model = load_part(config, model_config, self._part, ends, start.slots_fd)

    def handle(self, message: Message) -> None:
        """Raises RankLost."""
        match message:
            case AllocateKV(num_blocks):
                dtype = self._model_config.resolve_dtype(self._config.dtype)
                layout = self._model_config.kv_layout(dtype=dtype, block_size=self._config.block_size)
                if self._groups_fd is not None:
                    self._kv_cache = own_kv(self._part, layout, num_blocks, getattr(torch, dtype), self._device)
                else:
                    whole = map_kv(self._kv_fd, layout, num_blocks, getattr(torch, dtype))
                    self._kv_cache = rank_view(whole, self._part)
            case Step():
                inputs = message.inputs(self._config.block_size)
                self._hidden = forward_part(self._model, inputs, self._kv_cache, self._part, self._device)
            case Logits(rows):
                indices = torch.from_numpy(np.frombuffer(bytearray(rows), np.int64))
                self._model.compute_logits(self._hidden[indices.to(self._device)])
            case _:
                assert_never(message)
