"""Recorded decode steps: a step of single tokens is replayed with one launch instead of some hundreds.

    step of b single tokens ─▶ the least size n >= b ─▶ inputs copied to n fixed rows ─▶ replay ─▶ first b rows
                              (recorded once it is often used)   (the last token repeated)

A repeated token computes and writes what the token itself does, so no block is reserved for it. Other steps run as they
are. On a GPU a recording is a CUDA graph, which no GPU has run yet (docs/gpu.md): tests run it with a capture that
calls the step again. On CPU it is `engine.executor.launch_recording`'s.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionMetadata
from engine.models.decoder import Decoder, LastTokens

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], tuple[Callable[[], object], torch.Tensor]]
"""Records a step: what replays it, and the tensor that has its result after each replay."""


def capture_cuda_graph(step: Step) -> tuple[Callable[[], object], torch.Tensor]:
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


_Inputs = tuple[torch.Tensor, ...]
"""Token ids, positions, slots, lengths, block tables: a row for each request."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """One size: its inputs at fixed addresses, and what replays them."""

    inputs: _Inputs
    replay: Callable[[], object]
    hidden: torch.Tensor


def powers_of_two(most: int) -> list[int]:
    """Up to `most`, and that itself: sizes of which few are captured, where a capture takes time and memory."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


class GraphedDecoder:
    """A decoder whose steps of single tokens are captured. For models that read nothing on the host in a forward."""

    def __init__(
        self, model: Decoder, capture: Capture, *, sizes: Sequence[int], max_blocks: int, num_uncaptured: int = 0
    ) -> None:
        """`sizes`: numbers of tokens, ascending; `max_blocks`: of one request; `num_uncaptured`: steps of each size
        before it is worth a capture."""
        self._model = model
        self._capture = capture
        self._sizes = sizes
        self._max_blocks = max_blocks
        self._num_uncaptured = dict.fromkeys(sizes, num_uncaptured)
        self._inputs: _Inputs | None = None
        self._graphs: dict[int, _Graph] = {}

    @property
    def attention_name(self) -> str:
        """See `Decoder`."""
        return self._model.attention_name

    @torch.inference_mode()
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
        size = self._sizes[bisect.bisect_left(self._sizes, num_tokens)]
        if self._num_uncaptured[size]:
            self._num_uncaptured[size] -= 1
            return self._model.forward(token_ids, positions, kv_cache, metadata, needed)
        given = (token_ids, positions, metadata.slot_mapping, metadata.seq_lens, metadata.block_tables)
        graph = self._graphs.get(size)
        if graph is None:
            inputs = tuple(rows[:size] for rows in self._rows(given))
            graph = self._graphs[size] = self._captured(inputs, given, kv_cache)
        else:
            _fill(graph.inputs, given)
        graph.replay()
        return graph.hidden[:num_tokens].clone()  # the next replay overwrites it

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.compute_logits`."""
        return self._model.compute_logits(hidden)

    def _rows(self, given: _Inputs) -> _Inputs:
        """The rows of the inputs of all graphs."""
        if self._inputs is None:
            largest = self._sizes[-1]
            tables = given[-1].new_zeros((largest, self._max_blocks))
            self._inputs = (*(one.new_zeros(largest) for one in given[:-1]), tables)
        return self._inputs

    def _captured(self, inputs: _Inputs, given: _Inputs, kv_cache: torch.Tensor) -> _Graph:
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


def _fill(inputs: _Inputs, given: _Inputs) -> None:
    """The given rows, and the last one again in the rows that are left. Block tables may be narrower."""
    for target, source in zip(inputs, given, strict=True):
        rows = target[:, : source.shape[1]] if source.dim() > 1 else target
        rows[: len(source)].copy_(source)
        if len(source) < len(rows):
            rows[len(source) :] = source[-1]
