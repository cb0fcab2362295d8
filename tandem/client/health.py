"""The state of a running stack as its processes report it: gRPC health, and the load reports of instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.tandem.v1 import instance_pb2, instance_pb2_grpc, pools_pb2, pools_pb2_grpc
from tandem.client.channel import open_blocking_channel
from tandem.client.credentials import PLAINTEXT, Credentials

READY, NOT_READY, SILENT = "ready", "not ready", "silent"
INSTANCE_SERVICE = "tandem.v1.InstanceService"
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_TIMEOUT_S, _LIST_TIMEOUT_S = 2.0, 10.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


@contextmanager
def _stub(kind: Callable[[Any], Any], address: str, credentials: Credentials) -> Iterator[Any]:
    """A stub of the generated class `kind`, whose calls block. Its channel is closed with the block."""
    with open_blocking_channel(address, _OPTIONS, credentials) as channel:
        yield kind(channel)


def health(address: str, service: str, *, credentials: Credentials = PLAINTEXT) -> str:
    """READY, NOT_READY, or SILENT followed by the gRPC status."""
    with _stub(health_pb2_grpc.HealthStub, address, credentials) as stub:
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return silent(error)
    return READY if answer.status == _SERVING else NOT_READY


def silent(error: grpc.RpcError) -> str:
    """SILENT with the status of the call that failed."""
    return f"{SILENT} ({error.code().name})"


def wait_serving(address: str, service: str, timeout_s: float, *, credentials: Credentials = PLAINTEXT) -> bool:
    """Waits until `service` is SERVING; False if it is not within `timeout_s`."""
    with _stub(health_pb2_grpc.HealthStub, address, credentials) as stub:
        call = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=True)
        try:
            return any(answer.status == _SERVING for answer in call)
        except grpc.RpcError:
            return False
        finally:
            call.cancel()


def instances_out(admin_address: str, *, credentials: Credentials = PLAINTEXT) -> dict[str, str]:
    """The addresses of the instances that the router does not pick, with why; raises grpc.RpcError."""
    with _stub(pools_pb2_grpc.PoolsServiceStub, admin_address, credentials) as stub:
        listed = stub.ListPools(
            pools_pb2.ListPoolsRequest(), timeout=_LIST_TIMEOUT_S, metadata=credentials.metadata(), wait_for_ready=True
        )
    return {instance.address: instance.out for instance in listed.instances if instance.out}


def dtype(address: str, *, credentials: Credentials = PLAINTEXT) -> str:
    """Of the weights and KV of the instance at `address`, as bfloat16 or bfloat16+int8; raises grpc.RpcError."""
    with _stub(instance_pb2_grpc.InstanceServiceStub, address, credentials) as stub:
        answer = stub.GetInstanceInfo(instance_pb2.GetInstanceInfoRequest(), timeout=_TIMEOUT_S)
    return str(answer.identity.dtype)


def load(address: str, *, credentials: Credentials = PLAINTEXT) -> instance_pb2.WatchLoadResponse:
    """The next load report of the instance at `address`; raises grpc.RpcError."""
    with _stub(instance_pb2_grpc.InstanceServiceStub, address, credentials) as stub:
        call = stub.WatchLoad(instance_pb2.WatchLoadRequest(), timeout=_TIMEOUT_S)
        try:
            report: instance_pb2.WatchLoadResponse = next(iter(call))
        finally:
            call.cancel()
    return report
