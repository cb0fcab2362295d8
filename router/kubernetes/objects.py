"""What the router reads of Kubernetes' objects. Fields that it does not read are not looked at, whatever they are.

Go writes an empty list as null and leaves out a zero, so both are taken for what they mean.
"""

from __future__ import annotations

import msgspec


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of any object, and of a list."""

    name: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class ScaleSpec(msgspec.Struct, frozen=True):
    replicas: int = 0


class ScaleStatus(msgspec.Struct, frozen=True):
    selector: str = ""
    """Of the pods."""


class Scale(msgspec.Struct, frozen=True):
    """The subresource of a Deployment or StatefulSet."""

    metadata: Metadata
    spec: ScaleSpec = ScaleSpec()
    status: ScaleStatus = ScaleStatus()

    @property
    def size(self) -> int:
        """Pods that there are to be."""
        return self.spec.replicas


class PodIP(msgspec.Struct, frozen=True):
    ip: str


class PodStatus(msgspec.Struct, frozen=True, rename={"pod_ips": "podIPs"}):
    pod_ips: list[PodIP] | None = None


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: PodStatus = PodStatus()


class PodList(msgspec.Struct, frozen=True):
    items: list[Pod] | None = None


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Times are RFC 3339 with microseconds, by the clock of whoever wrote them."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


class Conditions(msgspec.Struct, frozen=True):
    terminating: bool | None = None


class Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    conditions: Conditions = Conditions()


class EndpointSlice(msgspec.Struct, frozen=True):
    """Some of the pods behind a Service."""

    metadata: Metadata
    endpoints: list[Endpoint] | None = None

    @property
    def staying(self) -> frozenset[str]:
        """IP addresses of the pods that have not been told to go, ready or not."""
        endpoints = self.endpoints or ()
        return frozenset(ip for one in endpoints if not one.conditions.terminating for ip in one.addresses)


class EndpointSliceList(msgspec.Struct, frozen=True):
    metadata: Metadata
    items: list[EndpointSlice] | None = None


class Event(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: msgspec.Raw


class Status(msgspec.Struct, frozen=True):
    """What comes in place of an object that cannot be had."""

    message: str = ""
    code: int = 0
