"""What the router knows of an instance, as values that are made from the wire once.

An `InstanceView` is one instance at one moment. Pickers and other decisions get views alone, so that they stay pure.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
from google.protobuf.message import Message

from engine.core.messages import StepCost
from protos.tandem.v1 import common_pb2, instance_pb2
from router.pools.throughput import UNMEASURED, ThroughputEstimate
from serving.logging import escaped

Role = Literal["prefill", "decode"]

WIRE_ROLES: dict[Role, instance_pb2.Role.ValueType] = {
    "prefill": instance_pb2.ROLE_PREFILL,
    "decode": instance_pb2.ROLE_DECODE,
}
ROLES: dict[instance_pb2.Role.ValueType, Role] = {value: role for role, value in WIRE_ROLES.items()}

_MAX_ID_CHARS = 253
"""Of an instance's name, as of a pod's. Operators' terminals show it, and each answer's headers."""
_CONSTRAINTS_BEFORE_NAMES = ("json_object", "json_schema", "regex", "choice", "grammar")
"""What an instance supports that supports constraints and names none."""
_shared = lru_cache(maxsize=16)(frozenset[str])
"""Of equal names one set: to look through it for each instance would cost each request a millisecond and more."""


def _same_named(kind: type[InstanceInfo | LoadReport], message: Message) -> dict[str, Any]:
    """The fields of `kind` that the message has under the same name."""
    known = message.DESCRIPTOR.fields_by_name
    return {field.name: getattr(message, field.name) for field in fields(kind) if field.name in known}


class InstanceKey(NamedTuple):
    """One process: an address alone is not enough, since a restarted instance has none of the old one's KV."""

    address: str
    epoch: str


class Mismatch(NamedTuple):
    """The first field in which two instances differ, with both values."""

    field: str
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal before KV is exchanged or a stream is continued elsewhere."""

    engine: str = ""
    weights_digest: str = ""
    config_digest: str = ""
    tokenizer_digest: str = ""
    dtype: str = ""
    block_size: int = 0
    layout_version: int = 0
    layout_digest: str = ""
    fingerprint: str = ""

    @classmethod
    def from_wire(cls, message: common_pb2.Identity) -> Identity:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

    def to_wire(self) -> common_pb2.Identity:
        return common_pb2.Identity(**asdict(self))

    def mismatch(self, other: Identity) -> Mismatch | None:
        """The first field that differs; None when KV of one is KV of the other."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return Mismatch(field.name, str(ours), str(theirs))
        return None


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The identity of an instance. Constant while its process lives."""

    instance_id: str
    epoch: str
    role: Role | None
    address: str
    """host:port other instances reach it by; may differ from the one this router dials."""
    identity: Identity
    max_model_len: int = 0
    vocab_size: int = 0
    kv_connector: str = ""
    num_blocks: int = 0
    bytes_per_block: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    constraints: frozenset[str] = frozenset()
    """The members of SamplingParams.constraint that it follows; it would ignore others."""
    domain: str = ""
    """Its network domain; empty: unknown."""
    lora_adapters: frozenset[str] = frozenset()
    """Names of those that it has. Their weights are part of its identity."""

    @property
    def pairing(self) -> tuple[Identity, str]:
        """Instances hand KV over to each other when this is equal. One without a connector hands over to none."""
        return self.identity, f"null at {self.address}" if self.kv_connector == "null" else self.kv_connector

    @classmethod
    def from_wire(cls, message: instance_pb2.GetInstanceInfoResponse) -> InstanceInfo:
        values = _same_named(cls, message)
        values["instance_id"] = escaped(message.instance_id[:_MAX_ID_CHARS])
        values["role"] = ROLES.get(message.role)
        values["identity"] = Identity.from_wire(message.identity)
        named = message.constraints or _CONSTRAINTS_BEFORE_NAMES
        values["constraints"] = frozenset(named if message.supports_constraints else ())
        values["lora_adapters"] = _shared(tuple(message.lora_adapters))
        return cls(epoch=message.instance_epoch, **values)


@dataclass(frozen=True, slots=True)
class LoadReport:
    epoch: str
    sequence: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_loading: int = 0
    num_waiting_tokens: int = 0
    num_without_room: int = 0
    """Of the waiting ones: whose KV comes from another instance, and for which there is no room or no grammar yet."""
    free_blocks: int = 0
    cached_blocks: int = 0
    step_s: float = 0.0
    core_silence_s: float = 0.0
    load_age_s: float = 0.0
    """0: not reported."""
    draining: bool = False
    moving_out: bool = False
    """Its streams should continue at another instance."""
    num_prefilled_tokens: int = 0
    """Computed since its start, without what came from a cache."""
    num_generated_tokens: int = 0
    """Since its start."""
    held_blocks: int = 0
    """Of transfers that wait for their reader."""
    quarantined_blocks: int = 0
    num_uncomputed_tokens: int = 0
    """Of prompts, running ones too; num_waiting_tokens counts those that wait alone."""
    num_prefilling: int = 0
    """Of num_running: prompts."""
    step_cost: StepCost | None = None
    """None: not measured, or not reported."""

    @property
    def age_s(self) -> float:
        """Of the state that it describes, when it was sent."""
        return self.load_age_s or self.core_silence_s

    @property
    def usable_blocks(self) -> int:
        """Cached blocks count as free: they can be evicted at any time."""
        return self.free_blocks + self.cached_blocks

    @classmethod
    def from_wire(cls, message: instance_pb2.WatchLoadResponse) -> LoadReport:
        return cls(
            epoch=message.instance_epoch,
            free_blocks=message.blocks.free,
            cached_blocks=message.blocks.cached,
            held_blocks=message.blocks.held,
            quarantined_blocks=message.blocks.quarantined,
            **_same_named(cls, message) | {"step_cost": _step_cost(message)},
        )

    def to_wire(self, num_blocks: int) -> instance_pb2.WatchLoadResponse:
        """What is kept of a report. Blocks that are neither free nor cached count as running."""
        known = instance_pb2.WatchLoadResponse.DESCRIPTOR.fields_by_name
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name in known}
        cost, num_running = self.step_cost, max(num_blocks - self.usable_blocks, 0)
        values["step_cost"] = cost and instance_pb2.StepCost(**msgspec.structs.asdict(cost))
        blocks = instance_pb2.BlockUsage(free=self.free_blocks, cached=self.cached_blocks, running=num_running)
        return instance_pb2.WatchLoadResponse(instance_epoch=self.epoch, blocks=blocks, **values)


def _step_cost(message: instance_pb2.WatchLoadResponse) -> StepCost | None:
    cost = message.step_cost
    return StepCost(cost.base_s, cost.per_stream_s, cost.per_token_s) if message.HasField("step_cost") else None


@dataclass(frozen=True, slots=True)
class InstanceView:
    key: InstanceKey
    info: InstanceInfo
    load: LoadReport
    out: str | None = None
    """Why it may not be picked; None when it may."""
    num_unreported: int = 0
    """Requests of this router that its last report cannot have counted."""
    num_ended: int = 0
    """Requests of this router that its last report counted and that have ended since."""
    num_unreported_tokens: int = 0
    """Tokens of those, for which the instance needs blocks."""
    num_unreported_to_prefill: int = 0
    """Those of them that it has yet to compute: neither cached there nor handed over."""
    throughput: ThroughputEstimate = UNMEASURED
    up_s: float = math.inf
    """Since this router first saw its process."""

    @property
    def instance_id(self) -> str:
        return self.info.instance_id or self.key.address

    @property
    def num_requests(self) -> int:
        """There now: those of the last report, corrected by what this router has sent and seen end since."""
        load = self.load
        num_reported = load.num_waiting + load.num_running + load.num_loading
        return max(num_reported + self.num_unreported - self.num_ended, 0)

    @property
    def num_waiting_tokens(self) -> int:
        """To be prefilled there, those sent since the last report included."""
        return self.load.num_waiting_tokens + self.num_unreported_to_prefill

    @property
    def num_used_blocks(self) -> int:
        return self.info.num_blocks - self.load.usable_blocks

    def pairing_mismatch(self, other: InstanceView) -> Mismatch | None:
        """Why these two cannot hand KV over; None when they can."""
        if mismatch := self.info.identity.mismatch(other.info.identity):
            return mismatch
        (_, ours), (_, theirs) = self.info.pairing, other.info.pairing
        return Mismatch("kv_connector", ours, theirs) if ours != theirs else None
