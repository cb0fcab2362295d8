"""Two engine cores in one process, of which one hands over to the other; the object plays both fronts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from engine.config import EngineConfig, KVConnectorConfig
from engine.core.core import EngineCore
from engine.core.messages import (
    AddRequest,
    EngineLoad,
    EngineRequest,
    HoldKV,
    LeaseCommand,
    LoadedEvent,
    RemoteKV,
    ReservedEvent,
    Seed,
    TokenLogprob,
    TokensEvent,
    TransferEvent,
)
from kv_transfer.secret import ensure_secret
from kv_transfer.transfer.connector import progress_of


@dataclass
class Outcome:
    """One request's way through both cores."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    num_local_blocks: int = 0
    loaded: LoadedEvent | None = None
    finished: bool = False

    def take(self, event: TokensEvent) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs


class CorePair:
    """A prefill and a decode core, with the same configuration unless another is given for decode."""

    def __init__(self, config: EngineConfig, decode_config: EngineConfig | None = None) -> None:
        self.prefill = EngineCore(config, wake=lambda: None)
        self.decode = EngineCore(decode_config or config, wake=lambda: None)
        self.outcomes: dict[str, Outcome] = {}
        self.num_moves_before_first_token = 0
        self.hold_back = False
        """While it is set, the decode core hears nothing of the KV."""
        self.held_back: list[TransferEvent] = []

    def start(self, name: str, prompt: list[int], params: SamplingParams, **more: object) -> None:
        """Reserve at decode, then prefill. `more`: further fields of the request."""
        self.outcomes[name] = Outcome()
        fields = {"request_id": name, "prompt_token_ids": prompt, "params": params, "seed": params.seed or 0, **more}
        remote = RemoteKV(transfer_id=name, reservation_s=60.0)
        self.decode.handle(AddRequest(EngineRequest(**fields, remote_kv=remote)))  # type: ignore[arg-type]
        hold = HoldKV(transfer_id=name, lease_s=60.0)
        self.prefill.handle(AddRequest(EngineRequest(**fields, hold_kv=hold)))  # type: ignore[arg-type]

    def run(self) -> None:
        """Until all is finished and released."""
        self.run_until(
            lambda: all(outcome.finished for outcome in self.outcomes.values()) and not self.prefill.load.num_transfers
        )

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
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
                time.sleep(1e-4)  # I/O threads need the interpreter, too

    def swap(self) -> None:
        """Hand over in the other direction from now on."""
        self.prefill, self.decode = self.decode, self.prefill

    def let_go(self) -> None:
        """Pass on what was held back."""
        self.hold_back = False
        for event in self.held_back:
            self.decode.handle(progress_of(event, event.transfer_id))

    def close(self) -> None:
        """End both cores; nothing is left."""
        for core in (self.prefill, self.decode):
            core.shutdown()
            load = core.load
            left = (load.running_blocks, load.held_blocks, load.quarantined_blocks, load.num_transfers)
            assert left == (0, 0, 0, 0)

    def _from_prefill(self, event: object) -> None:
        if isinstance(event, TokensEvent):
            self.outcomes[event.request_id].take(event)
            assert event.finish_reason == "hand_over"
            self.decode.handle(Seed(event.request_id, event.token_ids))
        elif isinstance(event, TransferEvent) and self.hold_back:
            self.held_back.append(event)
        elif isinstance(event, TransferEvent):
            has_begun = bool(self.outcomes[event.transfer_id].token_ids)
            self.num_moves_before_first_token += event.ended is None and not has_begun
            self.decode.handle(progress_of(event, event.transfer_id))

    def _from_decode(self, event: object) -> None:
        if isinstance(event, ReservedEvent):
            self.outcomes[event.request_id].num_local_blocks = event.num_local_blocks
        elif isinstance(event, LoadedEvent):
            self.outcomes[event.request_id].loaded = event
            self.prefill.handle(LeaseCommand(event.request_id, "release"))
        elif isinstance(event, TokensEvent):
            outcome = self.outcomes[event.request_id]
            outcome.take(event)
            outcome.finished = event.finish_reason is not None


def store_config(folder: Path, tmp_path: Path, **config: object) -> EngineConfig:
    """An engine over the shared_storage connector, in float32."""
    options = {"path": str(tmp_path / "store"), "kv_secret_file": str(tmp_path / "secret")}
    return _config("kv_transfer.stores.files:SharedStorageConnector", options, folder, tmp_path, config)


def nixl_config(
    folder: Path, tmp_path: Path, options: dict[str, object] | None = None, **config: object
) -> EngineConfig:
    """An engine over the nixl connector, in float32. On a busy machine a read over TCP may take more than 10 s."""
    all_options = {"kv_secret_file": str(tmp_path / "secret"), "load_timeout_s": 60.0, **(options or {})}
    return _config(
        "kv_transfer.nixl.connector:NixlConnector", all_options, folder, tmp_path, {"num_blocks": 512, **config}
    )


def _config(
    class_path: str, options: Mapping[str, Any], folder: Path, tmp_path: Path, config: dict[str, object]
) -> EngineConfig:
    ensure_secret(tmp_path / "secret")
    connector = KVConnectorConfig(class_path=class_path, options=options)  # type: ignore[arg-type]
    defaults: dict[str, Any] = {"dtype": "float32", "num_blocks": 1024, "kv_connector": connector}
    return EngineConfig(model=str(folder), **{**defaults, **config})


def num_classed_blocks(load: EngineLoad) -> int:
    """Every block is in exactly one class."""
    return load.free_blocks + load.cached_blocks + load.running_blocks + load.held_blocks + load.quarantined_blocks


def aggregated(checkpoint: Path, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """What one engine that hands nothing over answers."""
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=1024)
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]
