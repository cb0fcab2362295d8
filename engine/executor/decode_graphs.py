"""CUDA graphs of decode steps: a step of single tokens is replayed with one launch instead of some hundreds.

    step of b single tokens ─▶ the least captured size n >= b ─▶ inputs copied to n fixed rows ─▶ replay ─▶ first b rows
                                    (captured at its first use)    (the last token repeated)

A repeated token computes and writes what the token itself does, so no block is reserved for it. Other steps run as they
are. No GPU has run this (docs/gpu.md); tests run it with a capture that calls the step again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionMetadata
from engine.models.decoder import Decoder, LastTokens

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], tuple[Callable[[], None], torch.Tensor]]
"""Records a step: what replays it, and the tensor that has its result after each replay."""


def capture_cuda_graph(step: Step) -> tuple[Callable[[], None], torch.Tensor]:
    """The step first runs once: what it compiles and allocates at its first call is no part of the graph."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        step()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph.replay, result


@dataclass(frozen=True, slots=True)
class _Graph:
    """One size: its inputs at fixed addresses, and what replays them."""

    inputs: tuple[torch.Tensor, ...]
    """Token ids, positions, slots, lengths, block tables."""
    replay: Callable[[], None]
    hidden: torch.Tensor


class GraphedDecoder:
    """A decoder whose steps of single tokens are captured. For models that read nothing on the host in a forward."""

    def __init__(self, model: Decoder, capture: Capture, *, max_num_seqs: int, max_blocks: int) -> None:
        """`max_blocks`: of one request."""
        self._model = model
        self._capture = capture
        self._sizes = [*(1 << power for power in range((max_num_seqs - 1).bit_length())), max_num_seqs]
        self._max_blocks = max_blocks
        self._graphs: dict[int, _Graph] = {}

    @property
    def attention_name(self) -> str:
        """See `Decoder`."""
        return self._model.attention_name

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        needed: LastTokens | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`. `kv_cache` is the same in every call; a step of single tokens is computed whole."""
        num_tokens = len(token_ids)
        if metadata.max_query_len > 1 or num_tokens > self._sizes[-1]:
            return self._model.forward(token_ids, positions, kv_cache, metadata, needed)
        size = next(size for size in self._sizes if size >= num_tokens)
        given = (token_ids, positions, metadata.slot_mapping, metadata.seq_lens, metadata.block_tables)
        graph = self._graphs.get(size)
        if graph is None:
            inputs = tuple(one.new_zeros((size, *one.shape[1:])) for one in given[:-1])
            tables = metadata.block_tables.new_zeros((size, self._max_blocks))
            graph = self._graphs[size] = self._captured((*inputs, tables), given, kv_cache)
        else:
            _fill(graph.inputs, given)
        graph.replay()
        return graph.hidden[:num_tokens].clone()  # the next replay overwrites it

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.compute_logits`."""
        return self._model.compute_logits(hidden)

    def _captured(
        self, inputs: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...], kv_cache: torch.Tensor
    ) -> _Graph:
        _fill(inputs, given)
        token_ids, positions, slots, seq_lens, tables = inputs
        starts = torch.arange(len(token_ids) + 1, dtype=torch.int32, device=token_ids.device)
        max_seq_len = self._max_blocks * kv_cache.shape[4]

        def step() -> torch.Tensor:
            # New for each call: a backend keeps what it has made of an object that it knows.
            metadata = AttentionMetadata(starts, seq_lens, tables, slots, 1, max_seq_len)
            return self._model.forward(token_ids, positions, kv_cache, metadata)

        replay, hidden = self._capture(step)
        return _Graph(inputs, replay, hidden)


def _fill(inputs: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> None:
    """The given rows, and the last one again in the rows that are left. Block tables may be narrower."""
    for target, source in zip(inputs, given, strict=True):
        rows = target[:, : source.shape[1]] if source.dim() > 1 else target
        rows[: len(source)] = source
        rows[len(source) :] = source[-1]
