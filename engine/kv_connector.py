"""The interface through which KV enters and leaves an engine core. With `NullKVConnector` the engine is aggregated.

One object in the core's process decides on I/O and carries it out. Its methods run in the step loop and must not block:
I/O runs on threads of the connector, which calls `wake` when some has ended, so that the loop polls.

    blocks of a request ──request_finished() → True──▶ held by the connector ──poll().freed_request_ids──▶ free

A block that I/O may access is never free: `request_finished` returns True while a read or write is in flight, whether
the request finished or was aborted. Once the connector has abandoned that I/O, and cancelled what it had not begun, it
can name the blocks that the rest accesses (`KVConnectorOutput.needed`): a store that hangs keeps no others.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from engine.config import KVConnectorConfig
from engine.core.messages import Event, KVProgress, KVTotals, LeaseCommand
from engine.errors import EngineError
from engine.imports import named
from engine.kv_layout import PageLayout

if TYPE_CHECKING:
    import torch

    from engine.scheduling.request import Request

KVMemory: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""One array [num_blocks, ...], or one for each layer."""


@dataclass(frozen=True, slots=True)
class KVLoadResult:
    """The end of a request's load. `num_verified_tokens` counts from the beginning of the prompt, local prefix hits
    included; the engine computes the rest."""

    request_id: str
    num_verified_tokens: int
    num_external_tokens: int
    num_recomputed_blocks: int
    reason: str | None = None
    retained_id: str | None = None
    """Set if abandoned reads may still write: the blocks past the verified ones stay with the connector until poll()
    lists this id as freed, or names those that are needed, and the request computes into other blocks."""


@dataclass(slots=True)
class KVConnectorOutput:
    """Results since the last poll."""

    loaded: list[KVLoadResult] = field(default_factory=list)
    freed_request_ids: list[str] = field(default_factory=list)
    """Finished requests and retained ids whose blocks the connector no longer needs."""
    needed: dict[str, frozenset[int]] = field(default_factory=dict)
    """Of finished requests and retained ids whose I/O was abandoned: the only blocks that the connector needs from now
    on. Of an id that is never named it needs all, until it is freed."""
    events: list[Event] = field(default_factory=list)
    num_expired_leases: int = 0


class KVConnector(Protocol):
    """Requests are read only. The defaults transfer nothing."""

    name: str
    needs_all_blocks: bool = False
    """The first `request_progressed` must come with the blocks of the whole prompt."""

    # Decisions

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """How many prompt tokens past `num_computed_tokens` are loaded (remote_kv), or looked up in a store before they
        are computed; 0 once the request is `loaded`. No side effects."""
        return 0

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        """A request with external tokens has blocks for its whole prompt; those before num_local_blocks are filled.
        poll() will return a result for it, even if nothing is found."""

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The blocks of a request with hold_kv contain the KV of its first num_computed_tokens."""

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """A request is handed over, finished or aborted. True: its blocks stay until poll() lists it as freed."""
        return False

    def handle(self, command: KVProgress | LeaseCommand) -> None:
        """Progress from the attach stream, or a reader's lease command."""

    @property
    def num_transfers(self) -> int:
        """Leases not yet released or expired."""
        return 0

    @property
    def num_quarantined_blocks(self) -> int:
        """Held blocks that an abandoned read of a peer's memory may still write to. Those of a store are only held."""
        return 0

    @property
    def totals(self) -> list[KVTotals]:
        """The counters of each connector in this one, for EngineLoad."""
        return []

    # I/O

    def register_kv_cache(self, kv_cache: KVMemory, layout: PageLayout, fingerprint: bytes) -> None:
        """The KV memory, whose blocks are pages of this layout; called once, first."""

    def self_test(self) -> str | None:
        """Moves a block to itself, right after `register_kv_cache`; all blocks are free and zero, before and
        after. Returns None, or the reason, logged already, why the store is unavailable: requests compute meanwhile.
        Raises EngineError if it would transfer wrong KV."""
        return None

    def start_io(self) -> None:
        """Start the I/O decided since the last call, reads first. Returns at once."""

    def poll(self) -> KVConnectorOutput:
        """Collect finished I/O and apply deadlines."""
        return KVConnectorOutput()

    def next_deadline_s(self) -> float | None:
        """Seconds until poll() must be called even if nothing happens; None: never."""
        return None

    def shutdown(self) -> None:
        """Wait for I/O in flight and remove what is private to this process. A list of connectors of which a further
        one cannot be made calls it without `register_kv_cache`."""


class NullKVConnector(KVConnector):
    """Transfers nothing."""

    name = "null"

    def __init__(self, *, wake: Callable[[], None]) -> None:
        del wake


_MEMBERS = {"name", *(name for name in vars(KVConnector) if not name.startswith("_"))}


class WrongArguments(EngineError):
    """The class does not take the options that are given for it."""


def make_connector(config: KVConnectorConfig, wake: Callable[[], None]) -> KVConnector:
    """Import `module:Class` and build it with its options. Raises EngineError where it cannot be imported, does not
    take them or makes no connector; what its own code raises is not changed."""
    path, arguments = config.class_path, {"wake": wake, **config.options}
    try:
        connector_class = named(path)
    except (ImportError, AttributeError) as error:
        raise EngineError(f"kv_connector: cannot import {path!r}: {error}") from error
    try:
        inspect.signature(connector_class).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise WrongArguments(f"kv_connector: {path} must take {', '.join(arguments)}: {error}") from error
    connector: KVConnector = connector_class(**arguments)
    if missing := sorted(_MEMBERS.difference(dir(connector))):
        hint = "derive the class from engine.kv_connector:KVConnector, and set its name"
        raise EngineError(f"kv_connector: {path} has no {', '.join(missing)}; {hint}")
    return connector


def self_test(connector: KVConnector) -> str | None:
    """Run the connector's `self_test`; a failure shuts it down. Raises EngineError."""
    try:
        return connector.self_test()
    except Exception as error:
        with contextlib.suppress(Exception):
            connector.shutdown()
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"self-test of the {connector.name} connector: {type(error).__name__}: {error}") from error
