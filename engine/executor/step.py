"""What the model needs of one step, as arrays: built once, in the core's process, and equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.attention import AttentionMetadata
from engine.models import LastTokens

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


MICRO_BATCH_TOKENS = 64
"""At least, of a part of a step. With fewer a stage's time hardly depends on their number."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The fields are those of AttentionMetadata, and which requests' last tokens are needed."""

    token_ids: Int64
    positions: Int64
    slot_mapping: Int64
    query_start_loc: Int32
    seq_lens: Int32
    block_tables: Int32
    max_query_len: int
    max_seq_len: int
    needed: Int64 | None = None
    """Requests whose last token's hidden state is needed; None: the hidden states of all tokens are."""
    adapters: Int64 | None = None
    """Each request's adapter, as in `Decoder.forward`; None: no request has one."""

    @classmethod
    def of(
        cls,
        token_ids: Int64,
        starts: Int64,
        lens: Int64,
        block_tables: Int32,
        block_size: int,
        needed: Int64 | None = None,
        adapters: Int64 | None = None,
    ) -> StepInputs:
        """A step of the tokens [start, start + length) of each request; `token_ids` are theirs, request after request,
        `block_tables` [num_requests, max_blocks]."""
        query_start_loc = np.zeros(len(lens) + 1, np.int64)
        np.cumsum(lens, out=query_start_loc[1:])
        seq_lens = starts + lens
        positions = np.repeat(starts - query_start_loc[:-1], lens) + np.arange(len(token_ids))
        owners = np.repeat(np.arange(len(lens)), lens)
        blocks = block_tables[owners, positions // block_size].astype(np.int64)
        return cls(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            query_start_loc=query_start_loc.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=block_tables,
            max_query_len=int(lens.max()),
            max_seq_len=int(seq_lens.max()),
            needed=needed,
            adapters=adapters,
        )

    def micro_batches(self, num_stages: int) -> list[StepInputs]:
        """Parts of the step, one after the other, so that stages compute at the same time: for `num_stages` stages at
        most twice as many. Small steps are one part: their time is that of reading the weights."""
        num_tokens = len(self.token_ids)
        num_parts = max(1, min(2 * num_stages, num_tokens // MICRO_BATCH_TOKENS)) if num_stages > 1 else 1
        if num_parts == 1:
            return [self]
        return [self._tokens(num_tokens * i // num_parts, num_tokens * (i + 1) // num_parts) for i in range(num_parts)]

    def _tokens(self, start: int, stop: int) -> StepInputs:
        """Tokens [start, stop): a later step than that of the tokens before them."""
        first = int(np.searchsorted(self.query_start_loc, start, side="right")) - 1
        last = int(np.searchsorted(self.query_start_loc, stop, side="left"))
        bounds = self.query_start_loc[first : last + 1].clip(start, stop)
        seq_lens = (self.positions[bounds[1:] - 1] + 1).astype(np.int32)
        needed = self.needed
        if needed is not None:
            ends = self.query_start_loc[1:][needed]
            needed = needed[(start < ends) & (ends <= stop)] - first
        return StepInputs(
            self.token_ids[start:stop],
            self.positions[start:stop],
            self.slot_mapping[start:stop],
            bounds - np.int32(start),
            seq_lens,
            self.block_tables[first:last],
            int(np.diff(bounds).max()),
            int(seq_lens.max()),
            needed,
            None if self.adapters is None else self.adapters[first:last],
        )

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Token ids, positions and metadata on the device. On CPU they share the arrays' memory."""
        by_token = (self.token_ids, self.positions, self.slot_mapping)
        by_request = (self.query_start_loc, self.seq_lens, self.block_tables)
        token_ids, positions, slot_mapping, query_start_loc, seq_lens, block_tables = _on(
            device, *by_token, *by_request
        )
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )
        return token_ids, positions, metadata

    def last_tokens(self, metadata: AttentionMetadata) -> LastTokens | None:
        """Those that are needed, where that are not all. Without any it is one: a model has no rows of no token."""
        if self.needed is None or len(self.needed) == len(self.token_ids):
            return None
        requests = self.needed if len(self.needed) else np.zeros(1, np.int64)
        rows = self.query_start_loc[1:][requests].astype(np.int64) - 1
        device, chosen = metadata.seq_lens.device, torch.from_numpy(requests).to(metadata.seq_lens.device)
        alone = AttentionMetadata(
            query_start_loc=torch.arange(len(requests) + 1, dtype=torch.int32, device=device),
            seq_lens=metadata.seq_lens[chosen],
            block_tables=metadata.block_tables[chosen],
            slot_mapping=metadata.slot_mapping,
            max_query_len=1,
            max_seq_len=int(self.seq_lens[requests].max()),
        )
        return LastTokens(torch.from_numpy(rows).to(device), alone)

    def token_adapters(self, device: torch.device) -> torch.Tensor | None:
        """The adapter of each token."""
        if self.adapters is None:
            return None
        return torch.from_numpy(np.repeat(self.adapters, np.diff(self.query_start_loc))).to(device)


def _on(device: torch.device, *arrays: Int32 | Int64) -> list[torch.Tensor]:
    """Arrays, those of larger elements first, on the device. On CPU they share memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return in_one_copy(device, *arrays)


def in_one_copy(device: torch.device, *arrays: Int32 | Int64) -> list[torch.Tensor]:
    """To a GPU, where each copy takes 10 us."""
    tensors = [torch.from_numpy(array) for array in arrays]
    together = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
    parts = torch.from_numpy(together).to(device).split([array.nbytes for array in arrays])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


# Messages of the core's process to the other ranks


class AllocateKV(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The KV memory has this many blocks."""

    num_blocks: int


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute the hidden states of these inputs and keep them. All but `block_tables` are int64."""

    token_ids: bytes
    starts: bytes
    lens: bytes
    block_tables: bytes
    """int32 [num_requests, max_blocks]."""
    needed: bytes | None
    """See `StepInputs`; so is the next one."""
    adapters: bytes | None = None

    @classmethod
    def of(cls, inputs: StepInputs) -> Step:
        lens = np.diff(inputs.query_start_loc).astype(np.int64)
        needed = None if inputs.needed is None else inputs.needed.tobytes()
        adapters = None if inputs.adapters is None else inputs.adapters.tobytes()
        starts, tables = inputs.seq_lens - lens, inputs.block_tables.tobytes()
        return cls(inputs.token_ids.tobytes(), starts.tobytes(), lens.tobytes(), tables, needed, adapters)

    def inputs(self, block_size: int) -> StepInputs:
        """As they were given."""
        token_ids, starts, lens = (_int64(part) for part in (self.token_ids, self.starts, self.lens))
        block_tables = np.frombuffer(bytearray(self.block_tables), np.int32).reshape(len(lens), -1)
        needed = None if self.needed is None else _int64(self.needed)
        adapters = None if self.adapters is None else _int64(self.adapters)
        return StepInputs.of(token_ids, starts, lens, block_tables, block_size, needed, adapters)


def _int64(numbers: bytes) -> Int64:
    """As an array that torch may write to."""
    return np.frombuffer(bytearray(numbers), np.int64)


class Logits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute this rank's part of the logits of these rows of the last step. Of the last stage."""

    rows: bytes
    """int64 [num_rows]."""


Message = AllocateKV | Step | Logits
