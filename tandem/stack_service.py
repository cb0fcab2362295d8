"""tandem.v1.StackService: the owner of a local stack's processes answers the stack's routers, on a socket of its own.

The socket lies in the stack's private folder, so that only this user reaches it. The calls run on threads and touch
nothing but the roster (roster.py) and the lead; the processes follow the roster on their owner's thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from protos.tandem.v1 import instance_pb2, stack_pb2
from serving.server_settings import ServerSettings, server_options
from tandem.roster import ROLES, Role, Roster, Seating, SizeRefused

_MAX_WATCHES = 24
_NUM_THREADS = _MAX_WATCHES + 8
"""A watch holds its thread; the other calls are over at once."""
_MAX_TTL_S = 3600.0
_MAX_HOLDER_LEN = 128
_WIRE_ROLES: dict[Role, instance_pb2.Role.ValueType] = {
    "prefill": instance_pb2.ROLE_PREFILL,
    "decode": instance_pb2.ROLE_DECODE,
}


class Resize(Protocol):
    """What LocalStack.resize is."""

    def __call__(self, role: Role, size: int, victims: Sequence[str] = ()) -> int: ...


class Lead:
    """Which router scales: the one that took the lead last, until its time is over. Safe to use from every thread.

    free ──take──▶ held ──take by its holder──▶ held for longer ──its time is over──▶ free
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._holder = ""
        self._until_s = -math.inf

    def take(self, holder: str, ttl_s: float) -> str:
        """Who leads now: `holder`, for `ttl_s` seconds, unless somebody else does."""
        with self._lock:
            now_s = self._clock()
            if holder == self._holder or now_s >= self._until_s:
                self._holder, self._until_s = holder, now_s + ttl_s
            return self._holder


class StackServer:
    """Serves from its making until `stop`. `address` is unix:PATH."""

    def __init__(self, address: str, roster: Roster, resize: Resize) -> None:
        self._roster = roster
        self._resize_pool = resize
        self._lead = Lead()
        self._stopping = threading.Event()
        self._watches = threading.BoundedSemaphore(_MAX_WATCHES)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="stack-service")
        self._server = grpc.server(self._threads, options=server_options(ServerSettings()))
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._server.add_insecure_port(address)
        self._server.start()

    def stop(self) -> None:
        """Ends every call; returns when no thread is left."""
        self._stopping.set()
        self._roster.wake()
        self._server.stop(grace=None).wait()
        self._threads.shutdown()

    def _handlers(self) -> grpc.GenericRpcHandler:
        watch: Any = grpc.unary_stream_rpc_method_handler(
            self._watch, stack_pb2.WatchStackRequest.FromString, stack_pb2.WatchStackResponse.SerializeToString
        )
        resize: Any = grpc.unary_unary_rpc_method_handler(
            self._resize, stack_pb2.ResizePoolRequest.FromString, stack_pb2.ResizePoolResponse.SerializeToString
        )
        take_lead: Any = grpc.unary_unary_rpc_method_handler(
            self._take_lead, stack_pb2.TakeLeadRequest.FromString, stack_pb2.TakeLeadResponse.SerializeToString
        )
        name = stack_pb2.DESCRIPTOR.services_by_name["StackService"].full_name
        handlers = {"WatchStack": watch, "ResizePool": resize, "TakeLead": take_lead}
        return grpc.method_handlers_generic_handler(name, handlers)

    def _watch(
        self, request: stack_pb2.WatchStackRequest, context: grpc.ServicerContext
    ) -> Iterator[stack_pb2.WatchStackResponse]:
        if not self._watches.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"this stack has {_MAX_WATCHES} watches, the most allowed"
            )
        try:
            context.add_callback(self._roster.wake)  # when the client has gone
            version = 0
            while seating := self._roster.wait(version, unless=lambda: self._is_over(context)):
                version = seating.version
                yield _response(seating)
        finally:
            self._watches.release()

    def _is_over(self, context: grpc.ServicerContext) -> bool:
        return self._stopping.is_set() or not context.is_active()

    def _resize(
        self, request: stack_pb2.ResizePoolRequest, context: grpc.ServicerContext
    ) -> stack_pb2.ResizePoolResponse:
        roles = [role for role in ROLES if _WIRE_ROLES[role] == request.role]
        if not roles:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "role is neither ROLE_PREFILL nor ROLE_DECODE")
        try:
            previous_size = self._resize_pool(roles[0], request.size, request.victims)
        except (SizeRefused, OSError) as error:  # OSError: no port is free
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return stack_pb2.ResizePoolResponse(previous_size=previous_size)

    def _take_lead(
        self, request: stack_pb2.TakeLeadRequest, context: grpc.ServicerContext
    ) -> stack_pb2.TakeLeadResponse:
        if not 0 < len(request.holder) <= _MAX_HOLDER_LEN:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"holder has 1..{_MAX_HOLDER_LEN} characters")
        if not 0 < request.ttl_s <= _MAX_TTL_S:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"ttl_s is {request.ttl_s:g}; allowed: above 0, at most {_MAX_TTL_S:g}",
            )
        holder = self._lead.take(request.holder, request.ttl_s)
        return stack_pb2.TakeLeadResponse(granted=holder == request.holder, holder=holder)


def _response(seating: Seating) -> stack_pb2.WatchStackResponse:
    pools = []
    for role in ROLES:
        addresses = [seat.address for seat in seating.pool(role)]
        pools.append(stack_pb2.StackPool(role=_WIRE_ROLES[role], size=len(addresses), addresses=addresses))
    return stack_pb2.WatchStackResponse(pools=pools)
