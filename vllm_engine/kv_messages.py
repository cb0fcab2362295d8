"""What the three processes of one vLLM tell each other about KV that is handed over.

    scheduler half ──KVStep, with each step──▶ worker half ──KVSeeds, with a step's result──▶ scheduler half
    host ──KVSetup, once; Seed, KVProgress, LeaseCommand, Interrupt──▶ worker half ──KVReport──▶ host

The host's messages take a ZeroMQ socket in the folder that the processes share, because vLLM has no channel for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from engine.config import EngineConfig
from engine.core.messages import Event, FinishReason, KVProgress, KVTotals, LeaseCommand, Seed
from vllm_engine.requests import SampledRequest

MAX_HELD_FRACTION = "max_held_fraction"
"""Option of vllm_engine/connector.py: fraction of the blocks that transfers may hold."""
_SOCKET = "kv"
"""File name of the host's socket."""


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """vLLM gets a request or an abort, which it reads between two steps: a step that waits for KV ends now."""


HostCommand = Seed | KVProgress | LeaseCommand | Interrupt


@dataclass(slots=True)
class NewTransfer:
    """A request that moves the KV of these tokens."""

    request_id: str
    sampled: SampledRequest
    token_ids: list[int]


@dataclass(slots=True)
class Reservation:
    """A request has blocks for the KV that it gets from elsewhere. Without block ids vLLM's prefix cache has all of
    it."""

    request_id: str
    block_ids: list[int]
    num_local_tokens: int


@dataclass(slots=True)
class Progress:
    """KV of a hand-over's first tokens is in these blocks once the step has ended."""

    request_id: str
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class Finished:
    """A request has ended; unless `reason` is hand_over its KV is not needed."""

    request_id: str
    block_ids: list[int]
    reason: FinishReason
    keeps_blocks: bool
    """Until the worker half names it as sent or received."""


@dataclass(slots=True)
class KVStep(KVConnectorMetadata):
    """One step of vLLM. Ids are vLLM's own, which are never used twice."""

    new: list[NewTransfer] = field(default_factory=list)
    reserved: list[Reservation] = field(default_factory=list)
    progressed: list[Progress] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Hand-overs whose blocks are about to be overwritten."""
    finished: list[Finished] = field(default_factory=list)
    is_empty: bool = False
    """The model computes nothing."""


@dataclass(slots=True)
class KVSeeds(KVConnectorWorkerMetadata):
    """First tokens that other instances sampled, by request: the last token of its prompt here."""

    token_ids: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVSeeds)
        return KVSeeds(self.token_ids | other.token_ids)


class KVSetup(msgspec.Struct, frozen=True, kw_only=True):
    """With what the worker half begins; the fields from block_size on are a PageLayout's."""

    config: EngineConfig
    address: str
    fingerprint: str
    block_size: int
    bytes_per_block: int
    digest: bytes


class KVLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The worker half's part of EngineLoad, by the same names."""

    held_blocks: int = 0
    quarantined_blocks: int = 0
    num_transfers: int = 0
    num_external_tokens: int = 0
    num_recomputed_blocks: int = 0
    num_expired_leases: int = 0
    kv_totals: list[KVTotals] = []


class KVReport(msgspec.Struct, frozen=True, kw_only=True):
    events: list[Event]
    given_up: list[str]
    """Requests with reads that may never end: to be computed in other blocks."""
    load: KVLoad


class KVLink:
    """The host's end of the socket. Belongs to its event loop; without a worker at the other end nothing is ever
    received."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder / _SOCKET}"
        self.load = KVLoad()
        """As last reported."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(KVReport)

    def send(self, command: HostCommand) -> None:
        """Queue a command. Does not block."""
        self._socket.send(self._encoder.encode(command))

    async def receive(self) -> KVReport:
        report = self._decoder.decode(await self._socket.recv())
        self.load = report.load
        return report

    def close(self) -> None:
        self._socket.close()
