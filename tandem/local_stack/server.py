"""tandem.v1.StackService: serves the desired state of a local stack to its routers, on a Unix socket.

The socket lies in the stack's private folder, so that only this user can connect. The calls run on threads and access
only the desired state and the leader lease; the supervisor makes the processes follow, on its own thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from protos.tandem.v1 import instance_pb2, stack_pb2, stack_pb2_grpc
from serving.server import ServerSettings, server_options
from tandem.local_stack.desired_state import ROLES, DesiredState, InvalidSize, Role, Snapshot
from tandem.local_stack.settings import MAX_ROUTER_WORKERS
from tandem.local_stack.supervisor import StackFailed

_NUM_OTHER_WATCHES = 24
"""Of those who ask for the sizes. Each worker of the router watches both pools."""
_NUM_SHORT_CALLS = 8
"""Calls at a time that return at once. A watch occupies a thread of its own."""
_STOP_S = 5.0
_MORE_THREADS = "raise the limit on processes and threads (ulimit -u, or that of the container)"
_MAX_TTL_S = 3600.0
_MAX_HOLDER_LEN = 128
_WIRE_ROLES: dict[Role, instance_pb2.Role.ValueType] = {
    "prefill": instance_pb2.ROLE_PREFILL,
    "decode": instance_pb2.ROLE_DECODE,
}


Resize = Callable[[Role, int, Sequence[str], int | None], int]
"""LocalProcesses.resize or DesiredState.resize."""


class LeaderLease:
    """Which router autoscales. Thread-safe.

    free ──acquire──▶ held ──acquire by its holder──▶ extended ──expires──▶ free
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._holder = ""
        self._until_s = -math.inf

    def acquire(self, holder: str, ttl_s: float) -> str:
        """Gives `holder` the lease for `ttl_s` seconds unless another one holds it; returns the holder."""
        with self._lock:
            now_s = self._clock()
            if holder == self._holder or now_s >= self._until_s:
                self._holder, self._until_s = holder, now_s + ttl_s
            return self._holder


class StackServer:
    """Serves from its creation until `stop`. `address` is unix:PATH, percent-encoded. Raises StackFailed if it cannot
    listen there, or if its threads cannot start."""

    def __init__(
        self, address: str, desired: DesiredState, resize: Resize, *, num_router_workers: int = MAX_ROUTER_WORKERS
    ) -> None:
        self._desired = desired
        self._resize_pool = resize
        self._lease = LeaderLease()
        self._stopping = threading.Event()
        # A daemon: Python's exit waits for each other thread, and gRPC may never end.
        self._ending = threading.Thread(target=self._end_calls, name="stack-service-stop", daemon=True)
        self._max_watches = 2 * num_router_workers + _NUM_OTHER_WATCHES
        self._watches = threading.BoundedSemaphore(self._max_watches)
        self._threads = _started_threads(self._max_watches + _NUM_SHORT_CALLS)
        self._server = grpc.server(self._threads, options=server_options(ServerSettings()))
        # The generated code is typed for asyncio alone.
        stack_pb2_grpc.add_StackServiceServicer_to_server(self, self._server)  # type: ignore[arg-type]
        try:
            self._server.add_insecure_port(address)
        except RuntimeError:
            self._threads.shutdown()
            hint = "set TMPDIR to a folder that can be written, with a short path"
            raise StackFailed(f"the stack's server cannot listen at {address}; {hint}") from None
        try:
            self._server.start()
        except RuntimeError as error:
            self._threads.shutdown()
            raise StackFailed(f"the stack's server cannot start its loop: {error}; {_MORE_THREADS}") from None
        try:
            self._ending.start()  # here, since no thread may start any more at the end
        except RuntimeError as error:
            self._server.stop(None)
            self._threads.shutdown()
            raise StackFailed(f"the stack's server cannot start its last thread: {error}; {_MORE_THREADS}") from None

    def stop(self) -> None:
        """Ends every call; returns when all threads have ended, or when gRPC does not end within 5 s."""
        self._stopping.set()
        self._desired.notify()
        self._ending.join(_STOP_S)
        self._threads.shutdown(wait=not self._ending.is_alive())

    def _end_calls(self) -> None:
        self._stopping.wait()
        self._server.stop(None)

    def WatchStack(
        self, request: stack_pb2.WatchStackRequest, context: grpc.ServicerContext
    ) -> Iterator[stack_pb2.WatchStackResponse]:
        if not self._watches.acquire(blocking=False):
            problem = f"this stack has {self._max_watches} watches, the maximum"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
        try:
            context.add_callback(self._desired.notify)  # when the client disconnects
            version = 0
            while snapshot := self._desired.wait(
                version, unless=lambda: self._stopping.is_set() or not context.is_active()
            ):
                version = snapshot.version
                yield _response(snapshot)
        finally:
            self._watches.release()

    def ResizePool(
        self, request: stack_pb2.ResizePoolRequest, context: grpc.ServicerContext
    ) -> stack_pb2.ResizePoolResponse:
        roles = [role for role in ROLES if _WIRE_ROLES[role] == request.role]
        if not roles:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "role is neither ROLE_PREFILL nor ROLE_DECODE")
        assumed = request.previous_size if request.HasField("previous_size") else None
        try:
            previous_size = self._resize_pool(roles[0], request.size, request.victims, assumed)
        except (InvalidSize, OSError) as error:  # OSError: no port is free
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return stack_pb2.ResizePoolResponse(previous_size=previous_size)

    def TakeLead(self, request: stack_pb2.TakeLeadRequest, context: grpc.ServicerContext) -> stack_pb2.TakeLeadResponse:
        if not 0 < len(request.holder) <= _MAX_HOLDER_LEN:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"holder has 1..{_MAX_HOLDER_LEN} characters")
        if not 0 < request.ttl_s <= _MAX_TTL_S:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"ttl_s is {request.ttl_s:g}; allowed: above 0, at most {_MAX_TTL_S:g}",
            )
        holder = self._lease.acquire(request.holder, request.ttl_s)
        return stack_pb2.TakeLeadResponse(granted=holder == request.holder, holder=holder)


def _started_threads(num_threads: int) -> ThreadPoolExecutor:
    """All of them run: one that has to start later, and cannot, would end the loop in which gRPC takes calls. Raises
    StackFailed."""
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix="stack-service")
    all_run = threading.Barrier(num_threads)
    try:
        for _ in range(num_threads):
            threads.submit(all_run.wait)
    except BaseException as error:  # Ctrl-C too: the threads that wait for the others would hold up the exit
        all_run.abort()
        threads.shutdown()
        if not isinstance(error, RuntimeError):
            raise
        problem = f"the stack's server cannot start its {num_threads} threads: {error}"
        raise StackFailed(f"{problem}; {_MORE_THREADS}") from None
    return threads


def _response(snapshot: Snapshot) -> stack_pb2.WatchStackResponse:
    pools = []
    for role in ROLES:
        addresses = [instance.address for instance in snapshot.pool(role)]
        pools.append(stack_pb2.StackPool(role=_WIRE_ROLES[role], size=len(addresses), addresses=addresses))
    return stack_pb2.WatchStackResponse(pools=pools)
