"""What the front and the engine core say to each other: commands down, events up.

Everything here is data, encoded with msgpack, free of torch. The front owns text; the core owns tokens and blocks.

    AddRequest ─▶  TokensEvent …  TokensEvent(finish_reason)
    AddRequest(remote_kv) ─▶ ReservedEvent | FinishedEvent(error);  KVProgress … ─▶ LoadedEvent;  Seed ─▶ TokensEvent …
    AddRequest(hold_kv) ─▶ TransferEvent(num_ready_blocks) …, TokensEvent(finish_reason="hand_over"),
    TransferEvent(complete) LeaseCommand(attach | renew | release) ─▶ TransferEvent(ended=released | expired | failed)
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "hand_over", "error"]
ErrorKind = Literal["no_room", "too_large", "timeout", "nothing_allowed"]
"""No blocks came free in time; more blocks needed than there are in all; KV or seed did not come in time; the request's
own wishes leave no token to draw."""


class HoldKV(msgspec.Struct, frozen=True, kw_only=True):
    """This request's KV is for somebody else: stop after the first token and hold it under `transfer_id`."""

    transfer_id: str
    lease_s: float


class RemoteKV(msgspec.Struct, frozen=True, kw_only=True):
    """This request's KV comes from another instance: reserve, load what is missing here, wait for the seed."""

    transfer_id: str
    reservation_s: float
    """How long blocks stay reserved without KV or seed before the request is given up."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one request, every default resolved.

    `output_token_ids` were emitted by another instance (or before a restart): the engine continues after them and never
    samples their positions. Position p of a draw is its index in prompt + output.
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
    hold_kv: HoldKV | None = None
    remote_kv: RemoteKV | None = None


# Commands: front → core


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: EngineRequest


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """End requests and free what they hold. Unknown ids are ignored. No event answers it."""

    request_ids: list[str]


class Seed(msgspec.Struct, frozen=True, tag=True):
    """Output ids that follow EngineRequest.output_token_ids, for a request with remote_kv."""

    request_id: str
    token_ids: list[int]


class KVProgress(msgspec.Struct, frozen=True, tag=True):
    """What the attach stream of a request with remote_kv said last."""

    request_id: str
    num_ready_blocks: int
    """Full blocks from the beginning of the prompt that can be read."""
    digests: list[bytes] = []
    """Of the newly ready blocks, for connectors whose pages have no header."""
    connector_metadata: bytes = b""
    """From the holder's half of the connector; on the first message only."""
    num_tokens: int | None = None
    """Set at the production's good end: tokens that there are, the tail included."""
    failed: str | None = None
    """Set at the bad end, or when the stream broke: nothing more will come."""


class LeaseCommand(msgspec.Struct, frozen=True, tag=True):
    """A reader's sign of life, or its good-bye."""

    transfer_id: str
    action: Literal["attach", "renew", "release"]
    lease_s: float = 0.0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the core."""


Command = AddRequest | AbortRequests | Seed | KVProgress | LeaseCommand | Shutdown


# Events: core → front


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate at one position of the output."""

    token_id: int
    logprob: float
    """Natural logarithm, of the raw logits: before biases, penalties and temperature."""
    rank: int
    """1 for the most likely token; of equals the lower id comes first."""


class TokensEvent(msgspec.Struct, frozen=True, tag=True):
    """New tokens of a request, or its end, or both."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    """With finish_reason "error": what a person should read."""
    error_kind: ErrorKind | None = None
    """With finish_reason "error": what a program should do; None: an error of our own."""
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_recomputed_tokens: int = 0
    queue_s: float = 0.0
    """Seconds that the request waited for room, KV or seed before it first ran."""
    logprobs: list[list[TokenLogprob]] = []
    """Parallel to `token_ids` if the request asked: the token itself, then the best others."""
    prompt_logprobs: list[list[TokenLogprob]] = []
    """With the first token if the request asked: the same of each prompt token, an empty list for the first."""


class ReservedEvent(msgspec.Struct, frozen=True, tag=True):
    """Blocks for the prompt of a request with remote_kv are reserved."""

    request_id: str
    num_cached_tokens: int
    num_local_blocks: int
    """Full blocks at the beginning that are here already and need not be fetched."""


class LoadedEvent(msgspec.Struct, frozen=True, tag=True):
    """Everything that will come for a request with remote_kv has come and was verified."""

    request_id: str
    num_external_tokens: int
    num_recomputed_blocks: int
    reason: str | None = None


class TransferEvent(msgspec.Struct, frozen=True, tag=True):
    """A transfer that this core produces has moved on. `ended` is its last."""

    transfer_id: str
    num_ready_blocks: int
    digests: list[bytes] = []
    connector_metadata: bytes = b""
    num_tokens: int | None = None
    tail_digest: bytes = b""
    ended: Literal["released", "expired", "failed"] | None = None
    reason: str | None = None


class KVMoved(msgspec.Struct, frozen=True, array_like=True):
    """What a connector has moved in one direction since the start."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """Summed over its I/O threads."""
    failures: dict[str, int] = {}
    """Operations by what ended them; the words are few, and the connector's own."""


class KVReads(msgspec.Struct, frozen=True, array_like=True):
    """How a connector that reads several blocks in one go has read, since the start. Each list counts reads by the
    connector's bounds (kv_transfer/counters.py), those above the last bound at its end."""

    by_seconds: list[int] = []
    by_post_seconds: list[int] = []
    by_bytes: list[int] = []
    by_descriptors: list[int] = []
    seconds: float = 0.0
    post_seconds: float = 0.0
    """Of them, to hand the reads to the library."""
    num_bytes: int = 0
    num_descriptors: int = 0
    """One for each block."""
    num_failed: int = 0


class KVTotals(msgspec.Struct, frozen=True, array_like=True):
    """What a connector has done since the start."""

    connector: str = ""
    saved: KVMoved = KVMoved()
    loaded: KVMoved = KVMoved()
    num_shared_blocks: int = 0
    """Blocks that were to be saved and were in the store already."""
    reads: KVReads | None = None
    """None: it moves each block by itself."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""By which EngineLoad.steps_by_tokens counts; vLLM's bounds."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How busy the core is; with every batch of events, and at least every 250 ms."""

    num_waiting: int = 0
    num_running: int = 0
    num_loading: int = 0
    num_waiting_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    running_blocks: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0
    num_transfers: int = 0
    num_steps: int = 0
    steps_by_tokens: list[int] = []
    """Steps by how many tokens they computed: at most STEP_TOKENS[0], more but at most STEP_TOKENS[1], …, more."""
    num_step_tokens: int = 0
    """Computed in all steps, preempted requests' second time included."""
    step_s: float = 0.0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_external_tokens: int = 0
    num_recomputed_blocks: int = 0
    num_expired_leases: int = 0
    num_preemptions: int = 0
    kv_totals: list[KVTotals] = []
    """Of every connector that counts, in their order."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the core turned out to be; its first event."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    dtype: str
    layout_version: int
    layout_digest: str
    weights_digest: str
    config_digest: str
    tokenizer_digest: str
    fingerprint: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_connector: str
    attention_backend: str
    pid: int


Event = TokensEvent | ReservedEvent | LoadedEvent | TransferEvent
RequestEvent = TokensEvent | ReservedEvent | LoadedEvent


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """One batch from the core."""

    events: list[Event]
    load: EngineLoad


CoreMessage = EngineInfo | Outputs
