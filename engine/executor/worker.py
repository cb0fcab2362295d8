"""One rank other than the first: its part of the model, computing what rank 0 sends."""

from __future__ import annotations

import mmap
import socket
from pathlib import Path
from typing import assert_never

import numpy as np
import torch

from engine.executor.process import Start
from engine.executor.step import AllocateKV, Logits, Message, Step
from engine.kv_layout import KVLayout
from engine.models import load_model
from engine.models.config import ModelConfig
from engine.partition import Part
from engine.ranks import SharedMemoryRanks


def rank_view(kv_cache: torch.Tensor, part: Part) -> torch.Tensor:
    """The layers and heads of one rank in the KV memory of all."""
    layers, heads = part.layers, part.kv_heads
    return kv_cache[:, layers.start : layers.stop, :, heads.start : heads.stop]


def map_kv(kv_fd: int, layout: KVLayout, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """The KV memory of all ranks [num_blocks, *layout.page_shape]."""
    pages = mmap.mmap(kv_fd, num_blocks * layout.bytes_per_block)
    return torch.frombuffer(pages, dtype=dtype).view(num_blocks, *layout.page_shape)


class Worker:
    """One rank: its part of the model, and the hidden states of its last step."""

    def __init__(self, start: Start) -> None:
        """Loads the model. Raises InvalidCheckpoint, UnsupportedModel."""
        config = self._config = start.config
        model_config = self._model_config = ModelConfig.from_folder(Path(config.model))
        self._part = config.parallelism.part(start.rank, model_config)
        peers = {rank: socket.socket(fileno=fd) for rank, fd in start.peer_fds.items()}
        ranks = SharedMemoryRanks(self._part.tensor_rank, peers, mmap.mmap(start.slots_fd, 0))
        self._model = load_model(model_config, config, part=self._part, ranks=ranks)
        self._kv_fd = start.kv_fd
        self._kv_cache: torch.Tensor
        self._hidden: torch.Tensor

    def handle(self, message: Message) -> None:
        """Raises RankLost."""
        match message:
            case AllocateKV(num_blocks):
                dtype = self._model_config.resolve_dtype(self._config.dtype)
                layout = self._model_config.kv_layout(dtype=dtype, block_size=self._config.block_size)
                whole = map_kv(self._kv_fd, layout, num_blocks, getattr(torch, dtype))
                self._kv_cache = rank_view(whole, self._part)
            case Step():
                token_ids, positions, metadata = message.inputs().tensors(torch.device("cpu"))
                self._hidden = self._model.forward(token_ids, positions, self._kv_cache, metadata)
            case Logits(rows):
                indices = torch.from_numpy(np.frombuffer(bytearray(rows), np.int64))
                self._model.compute_logits(self._hidden[indices])
            case _:
                assert_never(message)
