"""What a role is, and what its service gets of the instance that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.descriptor import ServiceDescriptor

from instance.metrics import RequestMetrics
from instance.requests import ActiveChoices
from instance.transfers import TransferClients
from protos.tandem.v1 import instance_pb2


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """The parts of an instance that its servicers share."""

    choices: ActiveChoices
    transfers: TransferClients
    metrics: RequestMetrics
    instance_epoch: str


@dataclass(frozen=True, slots=True)
class Role:
    """A role as its package defines it."""

    name: str
    kind: instance_pb2.Role.ValueType
    service: ServiceDescriptor
    """Probes ask for its health."""
    make_servicer: Callable[[InstanceContext], object] | None = None
    """Of `service`, if that is not the one that every instance serves."""
