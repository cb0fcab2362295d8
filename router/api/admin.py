"""tandem.v1.PoolsService: operators list, explain, drain and resize the pools. Served on the admin listener only."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import grpc.aio

from engine.errors import suggestion
from protos.tandem.v1 import generation_pb2, instance_pb2, instance_pb2_grpc, pools_pb2
from router.autoscaler.loop import Autoscaler
from router.autoscaler.observation import samples_of
from router.autoscaler.resizer import ActuatorError, Change, Resizer, SizeRefused
from router.dispatch.dispatcher import Dispatcher
from router.picking.plan import explain
from router.pools.instance import STATES, UpstreamInstance
from router.pools.instance_info import ROLES, WIRE_ROLES, Role
from router.pools.pool import Pool
from router.request.generation_request import GenerationRequest
from router.request.validation import ServedModel, validated
from serving.errors import FailedPrecondition, NotFound, Unavailable, from_rpc_error, invalid_argument
from serving.interceptor import Context
from serving.waits import wait_at_most


def instance_of(role: Role, instance: UpstreamInstance, out: str | None) -> pools_pb2.PoolInstance:
    listed = pools_pb2.PoolInstance(
        address=instance.address,
        role=WIRE_ROLES[role],
        out=out or "",
        num_running_here=instance.calls.num_requests,
    )
    if (info := instance.info) is not None:
        listed.instance_id, listed.num_blocks = info.instance_id, info.num_blocks
        listed.weights_digest, listed.dtype = info.identity.weights_digest, info.identity.dtype
    if (view := instance.view()) is not None:
        listed.load.CopyFrom(view.load.to_wire(view.info.num_blocks))
    return listed


def unseen(pool: Pool) -> Iterable[pools_pb2.Candidate]:
    """Instances without a snapshot: no info or load report of theirs has arrived."""
    for instance in pool.processes:
        if instance.view() is None:
            rejected = instance.out or "connecting"
            yield pools_pb2.Candidate(instance_id=instance.name, address=instance.address, rejected=rejected)


def change_of(change: Change) -> pools_pb2.PoolChange:
    return pools_pb2.PoolChange(
        previous_size=change.previous_size,
        size=change.size,
        cause=change.cause,
        reason=change.reason,
        age_s=time.monotonic() - change.at_s,
    )


_DRAIN_TIMEOUT_S = 5.0
_SIZES_S = 1.0
_MAX_GRACE_S = 3600.0
_WATCH_S, _MIN_WATCH_S, _MAX_WATCH_S = 1.0, 0.1, 60.0
_NO_OWNER = (
    "this router cannot resize its pools: no owner of its instances' processes is configured "
    "(--stack, which `tandem up` sets, or kubernetes.prefill and kubernetes.decode)"
)


@dataclass(eq=False)
class PoolsService:
    """Belongs to one event loop."""

    model: ServedModel
    dispatcher: Dispatcher
    resizer: Resizer | None = None  # None if no owner of the instances is configured
    autoscaler: Autoscaler | None = None
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the router is about to stop: watches end, without an error."""

    def __post_init__(self) -> None:
        self._pools = self.dispatcher.pools
        self._resizes: set[asyncio.Task[list[Change]]] = set()

    async def ListPools(self, request: pools_pb2.ListPoolsRequest, context: Context) -> pools_pb2.ListPoolsResponse:
        return await self._listed()

    async def ExplainPick(
        self, request: pools_pb2.ExplainPickRequest, context: Context
    ) -> pools_pb2.ExplainPickResponse:
        imagined = await self._request(request)
        dispatcher = self.dispatcher
        explanations = (
            explain(*views, imagined, dispatcher.affinity, dispatcher.disaggregation, dispatcher.aims, random.Random())
            for views in dispatcher.safeguards.views_to_try()
        )
        first = next(explanations)
        explanation = next((one for one in chain([first], explanations) if one.HasField("disaggregated")), first)
        explanation.decode.extend(unseen(self._pools.decode))
        explanation.prefill.extend(unseen(self._pools.prefill))
        return explanation

    async def DrainInstance(
        self, request: pools_pb2.DrainInstanceRequest, context: Context
    ) -> pools_pb2.DrainInstanceResponse:
        return await self.drain(request.instance, request.grace_s)

    async def drain(self, name: str, grace_s: float) -> pools_pb2.DrainInstanceResponse:
        """Begins the drain of the instance with that name or address. Raises ServiceError."""
        if not 0 <= grace_s <= _MAX_GRACE_S:
            raise invalid_argument("grace_s", f"{grace_s:g}", f"0..{_MAX_GRACE_S:g} seconds")
        instance = self._instance(name)
        stub = instance_pb2_grpc.InstanceServiceStub(instance.channel)
        try:
            answer = await stub.Drain(instance_pb2.DrainRequest(grace_s=grace_s), timeout=_DRAIN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise Unavailable(f"{instance.name} does not answer") from error
            raise from_rpc_error(error) from error
        return pools_pb2.DrainInstanceResponse(instance_id=instance.name, num_unfinished=answer.num_unfinished)

    async def ResizePools(
        self, request: pools_pb2.ResizePoolsRequest, context: Context
    ) -> pools_pb2.ResizePoolsResponse:
        changes = await self.resize(_requested_sizes(request))
        return pools_pb2.ResizePoolsResponse(changes=map(change_of, changes))

    async def resize(self, sizes: Mapping[Role, int]) -> list[Change]:
        """Begins to give the pools these sizes, all of them even if the caller is cancelled meanwhile. Raises
        InvalidArgument or FailedPrecondition."""
        if self.resizer is None:
            raise FailedPrecondition(_NO_OWNER)
        if not sizes:
            raise invalid_argument("sizes", "is empty", "the size of one pool or of both")
        resizing = asyncio.create_task(self.resizer.resize(sizes, cause="operator", reason=""))
        self._resizes.add(resizing)
        resizing.add_done_callback(self._resizes.discard)
        try:
            return await asyncio.shield(resizing)
        except SizeRefused as error:
            raise invalid_argument("sizes", str(error)) from error
        except ActuatorError as error:
            raise FailedPrecondition(str(error)) from error

    async def WatchPools(
        self, request: pools_pb2.WatchPoolsRequest, context: Context
    ) -> AsyncIterator[pools_pb2.WatchPoolsResponse]:
        interval_s = request.interval_s or _WATCH_S
        if not _MIN_WATCH_S <= interval_s <= _MAX_WATCH_S:
            allowed = f"{_MIN_WATCH_S:g}..{_MAX_WATCH_S:g} seconds, or 0 for {_WATCH_S:g}"
            raise invalid_argument("interval_s", f"is {interval_s:g}", allowed)
        while not self.ending.is_set():
            listed = await self._listed()
            if self.ending.is_set():  # meanwhile: the pools may be empty by now
                return
            yield pools_pb2.WatchPoolsResponse(pools=listed)
            await wait_at_most(self.ending, interval_s)

    async def _listed(self) -> pools_pb2.ListPoolsResponse:
        sizes = await self.sizes()  # first: everything after it is one snapshot
        instances = [
            instance_of(role, instance, sample.out)
            for role, pool in self._pools.by_role.items()
            for instance, sample in zip(pool.processes, samples_of(role, self.dispatcher.safeguards), strict=True)
        ]
        instances.sort(key=lambda instance: (instance.role, instance.instance_id or instance.address))
        pools = [self._status(role, sizes.get(role)) for role in WIRE_ROLES]
        return pools_pb2.ListPoolsResponse(instances=instances, pools=pools)

    async def sizes(self) -> Mapping[Role, int]:
        """The sizes that are known now; the pools are listed without them too."""
        if self.resizer is None:
            return {}
        try:
            async with asyncio.timeout(_SIZES_S):
                return await self.resizer.actuator.sizes()
        except (ActuatorError, TimeoutError):
            return {}

    def _status(self, role: Role, size: int | None) -> pools_pb2.PoolStatus:
        change = self.resizer.last_changes.get(role) if self.resizer is not None else None
        return pools_pb2.PoolStatus(
            role=WIRE_ROLES[role],
            num_ready=self._pools.by_role[role].num_ready(),
            size=size,
            autoscaler=self.autoscaler.to_wire(role) if self.autoscaler is not None else None,
            last_change=change_of(change) if change is not None else None,
        )

    def _instance(self, name: str) -> UpstreamInstance:
        """The instance with that name or address. Raises InvalidArgument, NotFound or FailedPrecondition."""
        if not name:
            raise invalid_argument("instance", "is empty", "the name or the address of an instance")
        instances = [instance for pool in self._pools.by_role.values() for instance in pool.instances]
        found = [instance for instance in instances if name in (instance.address, instance.name)]
        processes = {instance.key.epoch if instance.key else instance.address for instance in found}
        addresses = dict.fromkeys(instance.address for instance in found)
        if min(len(processes), len(addresses)) > 1:  # one address may be given for both pools
            several = f"{name!r} is the name of several instances; give an address"
            raise FailedPrecondition(f"{several}: {', '.join(addresses)}")
        if not found:
            known = [one.name for one in instances] + [one.address for one in instances]
            raise NotFound(f"no instance {name[:64]!r} in the pools{suggestion(name, known)}")
        return min(found, key=lambda one: (one.address != name, STATES.index(one.state)))

    async def _request(self, request: pools_pb2.ExplainPickRequest) -> GenerationRequest:
        """The prompt as a request, as Generate validates it. Raises what validation raises."""
        if (limits := self.dispatcher.model_limits()) is None:
            raise Unavailable("no decode instance has been ready yet, so nothing can be picked")
        message = generation_pb2.GenerateRequest(
            session=request.session,
            cache_salt=request.cache_salt,
            lora=request.lora,
        )
        if request.HasField("token_ids") or not request.text:
            message.token_ids.ids.extend(request.token_ids.ids or [0])
        if request.text:
            message.text = request.text  # with token_ids too, validation rejects it
        return await validated(message, self.model, limits, deadline_s=None)


def _requested_sizes(request: pools_pb2.ResizePoolsRequest) -> dict[Role, int]:
    sizes: dict[Role, int] = {}
    for size in request.sizes:
        role = ROLES.get(size.role)
        if role is None:
            raise invalid_argument("sizes", "names a pool that does not exist", "ROLE_PREFILL, ROLE_DECODE")
        if role in sizes:
            raise invalid_argument("sizes", f"names the {role} pool twice", "one size for each pool")
        sizes[role] = size.size
    return sizes
