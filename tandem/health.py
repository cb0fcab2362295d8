"""How a running stack is, as its members tell it: gRPC health of each, and the load report of each instance."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.tandem.v1 import instance_pb2, instance_pb2_grpc
from tandem.credentials import PLAINTEXT, Credentials
from tandem.redialled import open_blocking_channel

READY, NOT_READY, SILENT = "ready", "not ready", "silent"
ROUTER_SERVICE = "tandem.v1.GenerationService"
INSTANCE_SERVICE = "tandem.v1.InstanceService"
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


def health(address: str, service: str, timeout_s: float = 2.0, *, credentials: Credentials = PLAINTEXT) -> str:
    """READY, NOT_READY, or SILENT with gRPC's word for why."""
    with open_blocking_channel(address, _OPTIONS, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{SILENT} ({error.code().name})"
    return READY if answer.status == health_pb2.HealthCheckResponse.SERVING else NOT_READY


def wait_serving(address: str, service: str, timeout_s: float, *, credentials: Credentials = PLAINTEXT) -> bool:
    """Follows the health of `service` until it takes requests; False if it does not within `timeout_s`."""
    serving = health_pb2.HealthCheckResponse.SERVING
    with open_blocking_channel(address, _OPTIONS, credentials) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        call = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=timeout_s, wait_for_ready=True)
        try:
            return any(answer.status == serving for answer in call)
        except grpc.RpcError:
            return False
        finally:
            call.cancel()


def load(
    address: str, timeout_s: float = 2.0, *, credentials: Credentials = PLAINTEXT
) -> instance_pb2.WatchLoadResponse:
    """The next load report of the instance at `address`; raises grpc.RpcError."""
    with open_blocking_channel(address, _OPTIONS, credentials) as channel:
        stub: Any = instance_pb2_grpc.InstanceServiceStub(channel)  # type: ignore[arg-type]  # typed for asyncio alone
        call = stub.WatchLoad(instance_pb2.WatchLoadRequest(), timeout=timeout_s)
        try:
            report: instance_pb2.WatchLoadResponse = next(iter(call))
        finally:
            call.cancel()
    return report
