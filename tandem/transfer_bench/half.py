"""One end of a hand-over: KV memory and a connector, without an engine. A Half plays the step loop and the front."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import KVConnectorConfig
from engine.kv_connector import KVLoadResult, make_connector
from engine.kv_layout import KVLayout
from engine.messages import EngineRequest, HoldKV, RemoteKV, TransferEvent
from engine.request import Request
from engine.sampling_params import SamplingParams
from kv_transfer.self_test import progress_of

BLOCK_TOKENS = 16
BYTES_STEP = 2 * BLOCK_TOKENS * 2
"""A block's size is a multiple of this: keys and values of so many tokens in bfloat16."""
_LEASE_S = 300.0
_TOO_LATE_S = 30.0


class TransferFailed(Exception):
    """Blocks did not arrive; the message is the connector's word for why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is moved: so many blocks of so many bytes."""

    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def layout(self) -> KVLayout:
        """A layout whose page has that size."""
        return KVLayout(
            num_layers=1,
            num_kv_heads=1,
            head_dim=self.block_bytes // BYTES_STEP,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
        )

    def memory(self) -> torch.Tensor:
        """KV memory [num_blocks, *page_shape], touched, so that reading into it meets no cold page."""
        return torch.empty((self.num_blocks, *self.layout.page_shape), dtype=torch.bfloat16).zero_()

    def content(self, seed: int) -> torch.Tensor:
        """Random bytes [num_bytes], the same in every process."""
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, self.num_bytes, dtype=np.uint8))


def as_bytes(kv: torch.Tensor) -> torch.Tensor:
    """The same memory, [num_bytes]."""
    return kv.view(-1).view(torch.uint8)


def prompt(run: int, num_blocks: int) -> list[int]:
    """Tokens whose blocks no other run has. A shorter prompt is the beginning of a longer one."""
    return [run, *range(1, num_blocks * BLOCK_TOKENS)]


def make_request(name: str, token_ids: list[int], fingerprint: bytes, **fields: HoldKV | RemoteKV) -> Request:
    """A request whose prompt fills its blocks."""
    spec = EngineRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        params=SamplingParams(),
        **fields,  # type: ignore[arg-type]
    )
    return Request.from_spec(spec, arrival=0, fingerprint=fingerprint.hex())


class Half:
    """Raises EngineError where the connector cannot be made, TransferFailed where blocks do not arrive."""

    def __init__(self, shape: Shape, config: KVConnectorConfig, fingerprint: bytes, kv: torch.Tensor) -> None:
        self._fingerprint = fingerprint
        self._woken = threading.Event()
        self._connector = make_connector(config, self._woken.set)
        self._connector.register_kv_cache(kv, shape.layout, fingerprint)

    def lend(self, run: int, num_blocks: int) -> tuple[list[TransferEvent], float]:
        """Offer the first blocks; returns what a reader must hear, and the seconds until all could be read."""
        transfer_id = f"{run}-{num_blocks}"
        hold = HoldKV(transfer_id=transfer_id, lease_s=_LEASE_S)
        request = make_request(transfer_id, prompt(run, num_blocks), self._fingerprint, hold_kv=hold)
        request.finish_reason = "hand_over"
        started = time.perf_counter()
        self._connector.request_finished(request, list(range(num_blocks)))
        events: list[TransferEvent] = []
        while not any(event.num_tokens for event in events):
            self._woken.clear()
            self._connector.save_kv(self._connector.build_connector_meta())
            new = [event for event in self._connector.poll().events if isinstance(event, TransferEvent)]
            events += [event for event in new if event.transfer_id == transfer_id]
            for event in events:
                if event.ended is not None:
                    raise TransferFailed(event.reason or event.ended)
            self._wait(started, is_over=bool(new))
        return events, time.perf_counter() - started

    def load(self, run: int, num_blocks: int, events: list[TransferEvent]) -> float:
        """Read what was lent into the first blocks; returns the seconds from the last word to "may run"."""
        name = f"{run}-{num_blocks}"
        remote = RemoteKV(transfer_id=name, reservation_s=_LEASE_S)
        request = make_request(name, prompt(run, num_blocks), self._fingerprint, remote_kv=remote)
        self._connector.update_state_after_alloc(request, list(range(num_blocks)), 0)
        started = time.perf_counter()
        for event in events:
            self._connector.handle(progress_of(event, name))
        loaded: list[KVLoadResult] = []
        while not loaded:
            self._woken.clear()
            self._connector.start_load_kv(self._connector.build_connector_meta())
            loaded = self._connector.poll().loaded
            self._wait(started, is_over=bool(loaded))
        duration_s = time.perf_counter() - started
        self._connector.request_finished(request, [])
        if loaded[0].num_recomputed_blocks:
            raise TransferFailed(loaded[0].reason or "the blocks were not there")
        return duration_s

    def shutdown(self) -> None:
        self._connector.shutdown()

    def _wait(self, started: float, *, is_over: bool) -> None:
        if is_over:
            return
        if time.perf_counter() - started > _TOO_LATE_S:
            raise TransferFailed("timeout")
        self._woken.wait(0.5)
