"""Two engine cores in one process that hand over by NIXL; the object plays both fronts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig, KVConnectorConfig
from engine.core import EngineCore
from engine.messages import (
    AddRequest,
    EngineLoad,
    EngineRequest,
    HoldKV,
    KVProgress,
    LeaseCommand,
    LoadedEvent,
    RemoteKV,
    ReservedEvent,
    Seed,
    TokensEvent,
    TransferEvent,
)
from engine.sampling_params import SamplingParams
from kv_transfer.nixl_metadata import TransferMetadata
from kv_transfer.secret import ensure_secret


@dataclass
class Outcome:
    """One request's way through both cores."""

    token_ids: list[int] = field(default_factory=list)
    num_local_blocks: int = 0
    loaded: LoadedEvent | None = None
    finished: bool = False


def nixl_config(
    folder: Path, tmp_path: Path, options: dict[str, object] | None = None, **config: object
) -> EngineConfig:
    """An engine over the nixl connector, in float32."""
    ensure_secret(tmp_path / "secret")
    connector = KVConnectorConfig(
        class_path="kv_transfer.nixl_connector:NixlConnector",
        options={"kv_secret_file": str(tmp_path / "secret"), **(options or {})},  # type: ignore[dict-item]
    )
    defaults = {"dtype": "float32", "num_blocks": 512, "kv_connector": connector}
    return EngineConfig(model=str(folder), **{**defaults, **config})  # type: ignore[arg-type]


def progress_of(event: TransferEvent) -> KVProgress:
    """What the reader's front makes of the holder's event."""
    digests = [*event.digests, *([event.tail_digest] if event.tail_digest else [])]
    return KVProgress(
        event.transfer_id,
        event.num_ready_blocks,
        digests=digests,
        connector_metadata=event.connector_metadata,
        num_tokens=event.num_tokens,
        failed=event.ended,
    )


def num_classed_blocks(load: EngineLoad) -> int:
    """Every block is in exactly one class."""
    return load.free_blocks + load.cached_blocks + load.running_blocks + load.held_blocks + load.quarantined_blocks


class NixlPair:
    """A prefill and a decode core."""

    def __init__(
        self, folder: Path, tmp_path: Path, options: dict[str, object] | None = None, **config: object
    ) -> None:
        engine_config = nixl_config(folder, tmp_path, options, **config)
        self.prefill = EngineCore(engine_config, wake=lambda: None)
        self.decode = EngineCore(engine_config, wake=lambda: None)
        self.outcomes: dict[str, Outcome] = {}
        self.num_moves_before_first_token = 0
        self.hold_back = False
        self.held_back: list[TransferEvent] = []

    def start(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """Reserve at decode, then prefill."""
        self.outcomes[name] = Outcome()
        fields = {"request_id": name, "prompt_token_ids": prompt, "params": params, "seed": params.seed or 0}
        remote = RemoteKV(transfer_id=name, reservation_s=60.0)
        self.decode.handle(AddRequest(EngineRequest(**fields, remote_kv=remote)))  # type: ignore[arg-type]
        hold = HoldKV(transfer_id=name, lease_s=60.0)
        self.prefill.handle(AddRequest(EngineRequest(**fields, hold_kv=hold)))  # type: ignore[arg-type]

    def run(self) -> None:
        """Until all is finished and released."""
        self.run_until(
            lambda: all(outcome.finished for outcome in self.outcomes.values()) and not self.prefill.load.num_transfers
        )

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Step both cores, carrying events to and fro."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            for event in self.prefill.step():
                self._from_prefill(event)
            for event in self.decode.step():
                self._from_decode(event)
            for core in (self.prefill, self.decode):
                assert num_classed_blocks(core.load) == core.info.num_blocks
            if self.prefill.idle and self.decode.idle:
                time.sleep(0.001)

    def let_go(self) -> None:
        """Pass on what was held back."""
        self.hold_back = False
        for event in self.held_back:
            if event.ended is None:
                self.decode.handle(progress_of(event))

    def prefill_kv(self) -> torch.Tensor:
        """The holder's KV memory."""
        return self.prefill._runner._kv_cache

    def metadata(self, encoded: bytes) -> TransferMetadata:
        """What a transfer's metadata says, unchecked."""
        return msgspec.msgpack.decode(encoded[32:], type=TransferMetadata)

    def close(self) -> None:
        """End both cores; nothing is left."""
        for core in (self.prefill, self.decode):
            core.shutdown()
            load = core.load
            left = (load.running_blocks, load.held_blocks, load.quarantined_blocks, load.num_transfers)
            assert left == (0, 0, 0, 0)

    def _from_prefill(self, event: object) -> None:
        if isinstance(event, TokensEvent):
            self.outcomes[event.request_id].token_ids += event.token_ids
            assert event.finish_reason == "hand_over"
            self.decode.handle(Seed(event.request_id, event.token_ids))
        elif isinstance(event, TransferEvent) and self.hold_back:
            self.held_back.append(event)
        elif isinstance(event, TransferEvent) and event.ended is None:
            self.num_moves_before_first_token += not self.outcomes[event.transfer_id].token_ids
            self.decode.handle(progress_of(event))

    def _from_decode(self, event: object) -> None:
        if isinstance(event, ReservedEvent):
            self.outcomes[event.request_id].num_local_blocks = event.num_local_blocks
        elif isinstance(event, LoadedEvent):
            self.outcomes[event.request_id].loaded = event
            self.prefill.handle(LeaseCommand(event.request_id, "release"))
        elif isinstance(event, TokensEvent):
            outcome = self.outcomes[event.request_id]
            outcome.token_ids += event.token_ids
            outcome.finished = event.finish_reason is not None
