"""Messages between `AsyncEngine` and the engine core: commands down, events up.

Plain data, encoded with msgpack, free of torch. The server owns text; the core owns tokens and blocks.

    AddRequest ─▶  TokensEvent …  TokensEvent(finish_reason)
    AddRequest(remote_kv) ─▶ ReservedEvent | TokensEvent(error);  KVProgress … ─▶ LoadedEvent;  Seed ─▶ TokensEvent …
    AddRequest(hold_kv) ─▶ TransferEvent(num_ready_blocks) …, TokensEvent("hand_over"), TransferEvent(num_tokens)
    LeaseCommand(attach | renew | release) ─▶ TransferEvent(ended=released | expired | failed)
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.identity import ModelIdentity
from engine.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "hand_over", "error"]
ErrorKind = Literal["no_room", "too_large", "timeout", "id_in_use", "nothing_allowed", "invalid_constraint"]
"""No blocks were freed, no constraint compiled, or no step began the prompt, in time, or the machine lacks what
compiling takes; more blocks needed than exist; KV or seed did not arrive in time; KV of an earlier request with this id
is still transferred; the request's own parameters exclude every token; its constraint cannot be compiled."""


class HoldKV(msgspec.Struct, frozen=True, kw_only=True):
    """Another instance will read this request's KV: stop after the first token and hold it under `transfer_id`."""

    transfer_id: str
    lease_s: float


class RemoteKV(msgspec.Struct, frozen=True, kw_only=True):
    """This request's KV comes from another instance: reserve, load what is missing here, wait for the seed."""

    transfer_id: str
    reservation_s: float
    """How long the request may wait for room, and then how long its blocks stay reserved without KV or seed."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one request, every default resolved.

    `output_token_ids` were emitted by another instance or before a restart: the engine continues after them and never
    samples their positions. The position of a sampled token is its index in prompt + output.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int] = []
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0
    priority: int = 0
    cache_salt: str = ""
    lora: str = ""
    """Name of an adapter; empty: none."""
    hold_kv: HoldKV | None = None
    remote_kv: RemoteKV | None = None
    ttft_s: float | None = None
    """Objective: seconds from now to the first token."""
    begin_s: float | None = None
    """Seconds from now within which a step begins to compute it, or it ends with an error; None: no limit."""
    itl_s: float | None = None
    """Objective: mean seconds between two tokens."""
    step_stretch: float | None = None
    """At least 1: prompts lengthen a step beside it to at most so many times one of the streams alone, or further while
    prompts wait behind others (step_budget.py)."""

    @property
    def returns_prompt_logprobs(self) -> bool:
        """If they are requested: once, by the first choice, and not after output that another instance emitted."""
        return self.choice == 0 and not self.output_token_ids and self.remote_kv is None

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the output, once it has `min_tokens`."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return (*eos, *self.params.stop_token_ids)


# Commands


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """End requests and free their blocks, without an event. Unknown ids are ignored."""

    request_ids: list[str]


class Seed(msgspec.Struct, frozen=True, tag=True):
    """Output ids that follow EngineRequest.output_token_ids, for a request with remote_kv."""

    request_id: str
    token_ids: list[int]


class KVProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the transfer that a request with remote_kv reads, from its attach stream."""

    request_id: str
    num_ready_blocks: int
    """Full blocks, from the beginning of the prompt, that can be read."""
    digests: list[bytes] = []
    """Of the newly ready blocks, for connectors whose pages have no header."""
    connector_metadata: bytes = b""
    """From the connector of the prefill instance; in the first message only."""
    num_tokens: int | None = None
    """Set when all KV is produced: its number of tokens, the tail included."""
    failed: str | None = None
    """Set when production failed or the stream broke: there is no further progress."""


class LeaseCommand(msgspec.Struct, frozen=True, tag=True):
    """A reader attaches to, renews or releases the lease of a transfer."""

    transfer_id: str
    action: Literal["attach", "renew", "release"]
    lease_s: float = 0.0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the core."""


Command = AddRequest | AbortRequests | Seed | KVProgress | LeaseCommand | Shutdown


# Events


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate at one position of the output."""

    token_id: int
    logprob: float
    """Natural logarithm, from the raw logits: before biases, penalties and temperature."""
    rank: int
    """1 for the most likely token; among equals the lower id comes first."""


class TokensEvent(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    """Message for finish_reason "error"."""
    error_kind: ErrorKind | None = None
    """Cause of finish_reason "error"; None: an internal error."""
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_recomputed_tokens: int = 0
    queue_s: float = 0.0
    """Seconds from the request's arrival to its first step: for blocks, KV, seed, its grammar, and look-ups."""
    logprobs: list[list[TokenLogprob]] = []
    """If requested, parallel to `token_ids`: the token itself, then the best others."""
    prompt_logprobs: list[list[TokenLogprob]] = []
    """If requested, with the first token: the same for each prompt token, an empty list for the first one."""


class ReservedEvent(msgspec.Struct, frozen=True, tag=True):
    """Blocks for the prompt of a request with remote_kv are reserved."""

    request_id: str
    num_cached_tokens: int
    num_local_blocks: int
    """Full blocks at the beginning that are cached here and not read."""


class LoadedEvent(msgspec.Struct, frozen=True, tag=True):
    """All KV that a request with remote_kv will get is loaded and verified."""

    request_id: str
    num_external_tokens: int
    num_recomputed_blocks: int
    reason: str | None = None


class TransferEvent(msgspec.Struct, frozen=True, tag=True):
    """Progress of a transfer that this core produces; the last event has `ended`."""

    transfer_id: str
    num_ready_blocks: int
    digests: list[bytes] = []
    connector_metadata: bytes = b""
    num_tokens: int | None = None
    tail_digest: bytes = b""
    ended: Literal["released", "expired", "failed"] | None = None
    reason: str | None = None


class KVMoved(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a connector in one direction since the start."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """Summed over its I/O threads."""
    failures: dict[str, int] = {}
    """Failed operations by reason, one of the connector's few."""


class KVReads(msgspec.Struct, frozen=True, array_like=True):
    """Reads of a connector that reads several blocks at a time, since the start. Each list counts reads by the bounds
    in kv_transfer/transfer/connector.py, those above the last bound at its end."""

    by_seconds: list[int] = []
    by_post_seconds: list[int] = []
    by_bytes: list[int] = []
    by_descriptors: list[int] = []
    seconds: float = 0.0
    post_seconds: float = 0.0
    """Part of `seconds`: posting the reads to the library."""
    num_bytes: int = 0
    num_descriptors: int = 0
    """One for each block, or for each layer of it where the memory has an array per layer."""
    num_failed: int = 0


class KVTotals(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a connector since the start."""

    connector: str = ""
    saved: KVMoved = KVMoved()
    loaded: KVMoved = KVMoved()
    num_shared_blocks: int = 0
    """Blocks to save that were in the store already."""
    reads: KVReads | None = None
    """None: the connector moves each block separately."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of EngineLoad.steps_by_tokens, as in vLLM."""


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a step, and of each stream and prompt token in it; a part that was not observed is 0."""

    base_s: float
    per_stream_s: float
    per_token_s: float

    def seconds(self, num_streams: int, num_prompt_tokens: int = 0) -> float:
        """Of a step of one token of each stream, and `num_prompt_tokens` others."""
        return self.base_s + self.per_stream_s * num_streams + self.per_token_s * num_prompt_tokens


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The core's load, sent with every batch of events and at least every 250 ms."""

    num_waiting: int = 0
    num_running: int = 0
    num_loading: int = 0
    num_waiting_tokens: int = 0
    num_uncomputed_tokens: int = 0
    """Prompt tokens to be computed before those of a prompt that arrives now: of all prompts that are not late."""
    num_prefilling: int = 0
    """Of num_running: prompts."""
    step_cost: StepCost | None = None
    num_without_room: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    running_blocks: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0
    num_transfers: int = 0
    num_steps: int = 0
    steps_by_tokens: list[int] = []
    """Steps by their number of tokens: up to STEP_TOKENS[0], up to STEP_TOKENS[1], …, more."""
    num_step_tokens: int = 0
    """Tokens computed in all steps, recomputation included."""
    step_s: float = 0.0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of num_draft_tokens: those that were right, so that the next one was sampled in the same step."""
    num_external_tokens: int = 0
    num_recomputed_blocks: int = 0
    num_expired_leases: int = 0
    num_preemptions: int = 0
    kv_totals: list[KVTotals] = []
    """Of every connector with totals, in order."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sizes and identity of the core; its first message."""

    model_identity: ModelIdentity
    vocab_size: int
    max_model_len: int
    num_blocks: int
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_connector: str
    attention_backend: str
    pid: int
    lora_adapters: list[str] = []
    """Names, sorted."""


Event = TokensEvent | ReservedEvent | LoadedEvent | TransferEvent
RequestOutput = TokensEvent | ReservedEvent | LoadedEvent


class Outputs(msgspec.Struct, frozen=True, tag=True):
    events: list[Event]
    load: EngineLoad
    answered: bool = True
    """False: sent while the model computes, so it does not say that the model is alive."""
    num_added: int = 0
    """Requests added before these events. An event belongs to the last of them that has its id."""


CoreMessage = EngineInfo | Outputs
