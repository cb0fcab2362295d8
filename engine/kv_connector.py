"""The seam through which KV enters and leaves an engine core. `NullKVConnector` is the aggregated engine.

One object in the core's process plays both halves. The scheduler half runs in the step loop and must not block; the
worker half hands I/O to threads of its own and calls `wake` when something has ended, so that the loop polls.

    blocks of a request ──request_finished() → True──▶ the connector's ──poll().freed_request_ids──▶ free

A block that I/O may touch is never free: `request_finished` returns True for as long as a read or write is in flight,
be the request finished or aborted.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_layout import KVLayout
from engine.messages import Event, KVProgress, LeaseCommand

if TYPE_CHECKING:
    import torch

    from engine.request import Request


@dataclass(frozen=True, slots=True)
class KVLoadResult:
    """A request's external KV is as complete as it will be.

    `num_verified_tokens` counts from the beginning of the prompt, local prefix hits included; the engine computes the
    rest.
    """

    request_id: str
    num_verified_tokens: int
    num_external_tokens: int
    num_recomputed_blocks: int
    reason: str | None = None
    retained_id: str | None = None
    """Set where reads were given up that may still write: blocks past the verified ones stay with the connector until
    poll() names this as freed, and the request computes into others."""


@dataclass(slots=True)
class KVConnectorOutput:
    """What has happened since the last poll."""

    loaded: list[KVLoadResult] = field(default_factory=list)
    freed_request_ids: list[str] = field(default_factory=list)
    """Finished requests, and retained ids, whose blocks the connector no longer needs."""
    events: list[Event] = field(default_factory=list)
    num_expired_leases: int = 0


@dataclass(frozen=True, slots=True)
class KVBlockOp:
    """One page to be written to, or read from, wherever the connector keeps pages."""

    request_id: str
    transfer_id: str
    block_index: int
    """Position in the request's block table."""
    block_id: int
    """Physical block."""
    num_tokens: int
    """block_size, or fewer for the tail."""
    block_hash: bytes | None
    """Chained content hash of a full block; None for the tail, which belongs to its transfer."""
    parent_hash: bytes


@dataclass(frozen=True, slots=True)
class KVConnectorMeta:
    """I/O that the scheduler half decided on and the worker half is to start."""

    saves: Sequence[KVBlockOp] = ()
    loads: Sequence[KVBlockOp] = ()


class KVConnector(Protocol):
    """Both halves. Request objects are only read."""

    name: str

    # Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """How many prompt tokens past `num_computed_tokens` will come from elsewhere (remote_kv), or are to be looked
        for there before they are computed; 0 once the request is `loaded`. No side effects."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        """A request with external tokens has its blocks (all of its prompt's); those before num_local_blocks are
        filled. Sooner or later poll() has a result for it, also if nothing was found."""
        ...

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """KV of the first num_computed_tokens of a request with hold_kv is in its blocks: found, loaded or computed."""
        ...

    def build_connector_meta(self) -> KVConnectorMeta:
        """I/O to start now; clears what it returns."""
        ...

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """A request ends (handed over, finished or aborted). True: its blocks stay until poll() names it as freed."""
        ...

    def handle(self, command: KVProgress | LeaseCommand) -> None:
        """Word from the attach stream or from a reader."""
        ...

    @property
    def num_transfers(self) -> int:
        """Leases not yet released or expired."""
        ...

    @property
    def num_quarantined_blocks(self) -> int:
        """Of the blocks that it holds, those that a given-up read may still write to."""
        return 0

    # Worker half

    def register_kv_cache(self, kv_cache: torch.Tensor, layout: KVLayout, fingerprint: bytes) -> None:
        """The KV memory [num_blocks, *layout.page_shape]; called once, before anything else."""
        ...

    def self_test(self) -> str | None:
        """Optional. Moves a block to itself, right after `register_kv_cache`, while all blocks are free and zeros, as
        they are again afterwards. None: well. A sentence, logged already: its store cannot be used now, and requests
        compute meanwhile. Raises EngineError where it would hand over wrong KV."""
        return None

    def start_load_kv(self, meta: KVConnectorMeta) -> None:
        """Start reading pages. Returns at once."""
        ...

    def save_kv(self, meta: KVConnectorMeta) -> None:
        """Start writing pages. Returns at once."""
        ...

    def poll(self) -> KVConnectorOutput:
        """Collect what has ended; also runs deadlines."""
        ...

    def next_deadline_s(self) -> float | None:
        """Seconds until poll() must be called even if nothing happens; None: never."""
        ...

    def shutdown(self) -> None:
        """Wait for I/O in flight, remove what is private to this process."""
        ...


class NullKVConnector:
    """Moves nothing."""

    name = "null"
    num_transfers = 0
    num_quarantined_blocks = 0

    def __init__(self, *, wake: Callable[[], None]) -> None:
        del wake

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        del request, num_computed_tokens
        return 0

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        del request, block_ids, num_local_blocks

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        del request, block_ids, num_computed_tokens

    def build_connector_meta(self) -> KVConnectorMeta:
        return KVConnectorMeta()

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        del request, block_ids
        return False

    def handle(self, command: KVProgress | LeaseCommand) -> None:
        del command

    def register_kv_cache(self, kv_cache: torch.Tensor, layout: KVLayout, fingerprint: bytes) -> None:
        del kv_cache, layout, fingerprint

    def start_load_kv(self, meta: KVConnectorMeta) -> None:
        del meta

    def save_kv(self, meta: KVConnectorMeta) -> None:
        del meta

    def poll(self) -> KVConnectorOutput:
        return KVConnectorOutput()

    def next_deadline_s(self) -> float | None:
        return None

    def shutdown(self) -> None:
        return None


def make_connector(config: KVConnectorConfig, wake: Callable[[], None]) -> KVConnector:
    """Import `module:Class` and build it with its options. `wake` may be called from any thread."""
    module_name, _, class_name = config.class_path.partition(":")
    try:
        connector_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise EngineError(f"kv_connector: cannot import {config.class_path!r}: {error}") from error
    connector: KVConnector = connector_class(wake=wake, **config.options)
    return connector


def self_test(connector: KVConnector) -> str | None:
    """The connector's `self_test`, if it has one. It is ended if it fails. Raises EngineError."""
    test: Callable[[], str | None] = getattr(connector, "self_test", lambda: None)
    try:
        return test()
    except Exception as error:
        with contextlib.suppress(Exception):
            connector.shutdown()
        if isinstance(error, EngineError):
            raise
        problem = f"{type(error).__name__}: {error}"
        raise EngineError(f"self-test of the {connector.name} connector: {problem}") from error
