"""What the router knows of an instance: values, made from the wire once, compared and scored without it.

An `InstanceView` is one instance at one moment. Pickers and deciders see views alone, so that they stay pure.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Literal, NamedTuple

from protos.tandem.v1 import common_pb2, instance_pb2
from router.picking.speeds import UNMEASURED, Pace

Role = Literal["prefill", "decode"]

_ROLES: dict[int, Role] = {instance_pb2.ROLE_PREFILL: "prefill", instance_pb2.ROLE_DECODE: "decode"}


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
    """Who an instance is. Constant while its process lives."""

    instance_id: str
    epoch: str
    role: Role | None
    address: str
    """host:port other instances reach it by; may differ from the one this router dials."""
    identity: Identity
    model: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    kv_connector: str = ""
    num_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0

    @classmethod
    def from_wire(cls, message: instance_pb2.GetInstanceInfoResponse) -> InstanceInfo:
        return cls(
            instance_id=message.instance_id,
            epoch=message.instance_epoch,
            role=_ROLES.get(message.role),
            address=message.address,
            identity=Identity.from_wire(message.identity),
            model=message.model,
            max_model_len=message.max_model_len,
            vocab_size=message.vocab_size,
            kv_connector=message.kv_connector,
            num_blocks=message.num_blocks,
            max_num_seqs=message.max_num_seqs,
            max_num_batched_tokens=message.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One beat of an instance."""

    epoch: str
    sequence: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_loading: int = 0
    num_waiting_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    step_s: float = 0.0
    core_silence_s: float = 0.0
    draining: bool = False
    moving_out: bool = False
    """What runs there should go on elsewhere."""
    num_prefilled_tokens: int = 0
    """Since its start, not from any cache."""
    held_blocks: int = 0
    """Of transfers whose reader is awaited."""
    quarantined_blocks: int = 0

    @classmethod
    def from_wire(cls, message: instance_pb2.WatchLoadResponse) -> LoadReport:
        return cls(
            epoch=message.instance_epoch,
            sequence=message.sequence,
            num_waiting=message.num_waiting,
            num_running=message.num_running,
            num_loading=message.num_loading,
            num_waiting_tokens=message.num_waiting_tokens,
            free_blocks=message.blocks.free,
            cached_blocks=message.blocks.cached,
            step_s=message.step_s,
            core_silence_s=message.core_silence_s,
            draining=message.draining,
            moving_out=message.moving_out,
            num_prefilled_tokens=message.num_prefilled_tokens,
            held_blocks=message.blocks.held,
            quarantined_blocks=message.blocks.quarantined,
        )


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as the router sees it now."""

    key: InstanceKey
    info: InstanceInfo
    load: LoadReport
    out: str | None = None
    """Why it may not be picked; None when it may."""
    num_unreported: int = 0
    """Requests that this router has sent it and that its last report cannot have counted."""
    num_ended: int = 0
    """Requests of this router that its last report counted and that have ended since."""
    num_unreported_tokens: int = 0
    """Tokens that the unreported requests bring."""
    pace: Pace = UNMEASURED
    """How fast it was seen to work."""
    up_s: float = math.inf
    """Since this router saw its process first."""

    @property
    def instance_id(self) -> str:
        return self.info.instance_id or self.key.address

    def pairing_mismatch(self, other: InstanceView) -> Mismatch | None:
        """Why these two cannot hand KV over; None when they can."""
        if mismatch := self.info.identity.mismatch(other.info.identity):
            return mismatch
        if self.info.kv_connector != other.info.kv_connector:
            return Mismatch("kv_connector", self.info.kv_connector, other.info.kv_connector)
        return None
