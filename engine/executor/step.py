"""What the model needs of one step, as arrays: built once, by rank 0, and equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionMetadata

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The fields are those of AttentionMetadata."""

    token_ids: Int64
    positions: Int64
    slot_mapping: Int64
    query_start_loc: Int32
    seq_lens: Int32
    block_tables: Int32
    max_query_len: int
    max_seq_len: int

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Token ids, positions and metadata on the device. On CPU they share the arrays' memory."""
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(self.query_start_loc).to(device),
            seq_lens=torch.from_numpy(self.seq_lens).to(device),
            block_tables=torch.from_numpy(self.block_tables).to(device),
            slot_mapping=torch.from_numpy(self.slot_mapping).to(device),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )
        return torch.from_numpy(self.token_ids).to(device), torch.from_numpy(self.positions).to(device), metadata


# Messages of rank 0 to the other ranks


class AllocateKV(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The KV memory has this many blocks."""

    num_blocks: int


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute the final hidden states of these inputs and keep them."""

    by_token: bytes
    """int64 [3, num_tokens]: token ids, positions, slots."""
    by_request: bytes
    """int32 [2, num_requests]: query lengths, sequence lengths."""
    block_tables: bytes
    """int32 [num_requests, max_blocks]."""
    num_requests: int
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, inputs: StepInputs) -> Step:
        return cls(
            np.stack((inputs.token_ids, inputs.positions, inputs.slot_mapping)).tobytes(),
            np.stack((np.diff(inputs.query_start_loc), inputs.seq_lens)).tobytes(),
            inputs.block_tables.tobytes(),
            len(inputs.seq_lens),
            inputs.max_query_len,
            inputs.max_seq_len,
        )

    def inputs(self) -> StepInputs:
        token_ids, positions, slot_mapping = np.frombuffer(bytearray(self.by_token), np.int64).reshape(3, -1)
        query_lens, seq_lens = np.frombuffer(bytearray(self.by_request), np.int32).reshape(2, -1)
        return StepInputs(
            token_ids,
            positions,
            slot_mapping,
            np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
            seq_lens,
            np.frombuffer(bytearray(self.block_tables), np.int32).reshape(self.num_requests, -1),
            self.max_query_len,
            self.max_seq_len,
        )


class Logits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute this rank's part of the logits of these rows of the last step."""

    rows: bytes
    """int64 [num_rows]."""


Message = AllocateKV | Step | Logits
