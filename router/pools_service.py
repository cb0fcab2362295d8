"""tandem.v1.PoolsService: the pools as their operators see and move them. Served on the admin listener alone."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import math
import random
from collections.abc import AsyncIterator, Iterator, Mapping

import grpc.aio

from protos.tandem.v1 import common_pb2, generation_pb2, instance_pb2, instance_pb2_grpc, pools_pb2
from router.autoscaler.actuator import ActuatorError
from router.autoscaler.loop import Autoscaler
from router.autoscaler.resizer import Resizer, SizeRefused
from router.config import DisaggregationSettings
from router.failover.safeguards import Safeguards
from router.model import ModelLimits, ServedModel
from router.picking.affinity import Affinity
from router.picking.explain import explain
from router.pools.instances import Role
from router.pools.member import Member
from router.pools_messages import WIRE_ROLES, candidate_of, change_of, instance_of, name_of, unseen
from router.request import GenerationRequest
from router.validation import validated
from serving.calls import Context, remaining_s
from serving.errors import FailedPrecondition, NotFound, Unavailable, invalid_argument, received

_DRAIN_TIMEOUT_S = 5.0
_SIZES_S = 1.0
_MAX_GRACE_S = 86_400.0
_WATCH_S, _MIN_WATCH_S, _MAX_WATCH_S = 1.0, 0.1, 60.0
_NO_OWNER = (
    "this router was not told who owns its instances' processes, so it cannot resize its pools: `tandem up` tells its "
    "router by --stack; elsewhere, whoever starts the instances resizes them"
)


class PoolsService:
    """Belongs to one event loop; of its own it knows only whether it is about to end."""

    def __init__(
        self,
        model: ServedModel,
        safeguards: Safeguards,
        affinity: Affinity,
        disaggregation: DisaggregationSettings,
        *,
        resizer: Resizer | None = None,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        """`resizer` is None where nobody is known who could resize a pool."""
        self._model = model
        self._safeguards = safeguards
        self._pools = safeguards.pools
        self._affinity = affinity
        self._disaggregation = disaggregation
        self._resizer = resizer
        self._autoscaler = autoscaler
        self._ending = asyncio.Event()

    async def ListPools(self, request: pools_pb2.ListPoolsRequest, context: Context) -> pools_pb2.ListPoolsResponse:
        return await self._listed()

    async def ExplainPick(
        self, request: pools_pb2.ExplainPickRequest, context: Context
    ) -> pools_pb2.ExplainPickResponse:
        wanted = await self._request(request)
        explanation = explain(
            self._safeguards.decode.marked(self._pools.decode.views()),
            self._safeguards.prefill.marked(self._pools.prefill.views()),
            wanted,
            self._affinity,
            self._disaggregation,
            random.Random(),
        )
        return pools_pb2.ExplainPickResponse(
            decode=[*map(candidate_of, explanation.decode), *unseen(self._pools.decode)],
            prefill=[*map(candidate_of, explanation.prefill), *unseen(self._pools.prefill)],
            disaggregated=explanation.disaggregated,
            reason=explanation.reason,
        )

    async def DrainInstance(
        self, request: pools_pb2.DrainInstanceRequest, context: Context
    ) -> pools_pb2.DrainInstanceResponse:
        if not (math.isfinite(request.grace_s) and 0 <= request.grace_s <= _MAX_GRACE_S):
            raise invalid_argument("grace_s", f"{request.grace_s:g}", f"0..{_MAX_GRACE_S:g} seconds")
        member = self._member(request.instance)
        name = name_of(member)
        stub = instance_pb2_grpc.InstanceServiceStub(member.channel)
        try:
            answer = await stub.Drain(instance_pb2.DrainRequest(grace_s=request.grace_s), timeout=_DRAIN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise Unavailable(f"{name} does not answer") from error
            raise received(error) from error
        return pools_pb2.DrainInstanceResponse(instance_id=name, num_unfinished=answer.num_unfinished)

    async def ResizePools(
        self, request: pools_pb2.ResizePoolsRequest, context: Context
    ) -> pools_pb2.ResizePoolsResponse:
        if self._resizer is None:
            raise FailedPrecondition(_NO_OWNER)
        sizes = _wanted_sizes(request)
        try:
            changes = await self._resizer.resize(sizes, cause="operator", reason="asked for by an operator")
        except SizeRefused as error:
            raise invalid_argument("sizes", str(error)) from error
        except ActuatorError as error:
            raise FailedPrecondition(str(error)) from error
        return pools_pb2.ResizePoolsResponse(changes=map(change_of, changes))

    async def WatchPools(
        self, request: pools_pb2.WatchPoolsRequest, context: Context
    ) -> AsyncIterator[pools_pb2.WatchPoolsResponse]:
        interval_s = request.interval_s or _WATCH_S
        if not _MIN_WATCH_S <= interval_s <= _MAX_WATCH_S:
            allowed = f"{_MIN_WATCH_S:g}..{_MAX_WATCH_S:g} seconds, or 0 for {_WATCH_S:g}"
            raise invalid_argument("interval_s", f"is {interval_s:g}", allowed)
        while not self._ending.is_set():
            yield pools_pb2.WatchPoolsResponse(pools=await self._listed())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._ending.wait()

    def end_watches(self) -> None:
        """The router is about to end: so do the watches, in good order."""
        self._ending.set()

    async def _listed(self) -> pools_pb2.ListPoolsResponse:
        sizes = await self._sizes()  # first: everything else is of one moment
        instances = [instance_of(role, member, self._out(role, member)) for role, member in self._members()]
        instances.sort(key=lambda instance: (instance.role, instance.instance_id or instance.address))
        pools = [self._status(role, sizes.get(role)) for role in WIRE_ROLES]
        return pools_pb2.ListPoolsResponse(instances=instances, pools=pools)

    async def _sizes(self) -> Mapping[Role, int]:
        """As far as they are known now: a list of the pools is worth having without them."""
        if self._resizer is None:
            return {}
        try:
            async with asyncio.timeout(_SIZES_S):
                return await self._resizer.sizes()
        except (ActuatorError, TimeoutError):
            return {}

    def _status(self, role: Role, size: int | None) -> pools_pb2.PoolStatus:
        pool = self._pools.prefill if role == "prefill" else self._pools.decode
        change = self._resizer.last_change(role) if self._resizer is not None else None
        return pools_pb2.PoolStatus(
            role=WIRE_ROLES[role],
            num_ready=pool.num_ready(),
            size=size,
            autoscaler=self._autoscaler.status(role) if self._autoscaler is not None else None,
            last_change=change_of(change) if change is not None else None,
        )

    def _members(self) -> Iterator[tuple[Role, Member]]:
        for member in self._pools.prefill.members:
            yield "prefill", member
        for member in self._pools.decode.members:
            yield "decode", member

    def _out(self, role: Role, member: Member) -> str | None:
        """Why it is not picked: for what it says or does not say, or for what requests have seen of it."""
        view = member.view()
        if view is None:
            return member.out
        _, ejection = self._safeguards.side(role)
        return ejection.marked([view])[0].out

    def _member(self, wanted: str) -> Member:
        """The instance with that name or address. Raises InvalidArgument, NotFound or FailedPrecondition."""
        if not wanted:
            raise invalid_argument("instance", "is empty", "the name or the address of an instance")
        members = [member for _, member in self._members()]
        found = [member for member in members if wanted in (member.address, name_of(member))]
        processes = {member.key.epoch if member.key else member.address for member in found}
        if len(processes) > 1:
            addresses = ", ".join(member.address for member in found)
            raise FailedPrecondition(f"{wanted!r} is the name of several instances; give an address: {addresses}")
        if not found:
            raise NotFound(_not_known(wanted, [*map(name_of, members), *(member.address for member in members)]))
        return found[0]

    async def _request(self, request: pools_pb2.ExplainPickRequest) -> GenerationRequest:
        """As Generate would make it of the prompt. Raises what validation raises."""
        limits = ModelLimits.of(self._pools.decode_infos())
        if limits is None:
            raise Unavailable("no decode instance has been ready yet, so nothing can be picked")
        imagined = generation_pb2.GenerateRequest(
            session=request.session,
            cache_salt=request.cache_salt,
            sampling=common_pb2.SamplingParams(max_tokens=1),
        )
        if request.HasField("token_ids") or not request.text:
            imagined.token_ids.ids.extend(request.token_ids.ids or [0])
        if request.text:
            imagined.text = request.text  # beside token_ids: validation says that one of them must go
        return await validated(imagined, self._model, limits, remaining_s=remaining_s())


def _not_known(wanted: str, names: list[str]) -> str:
    similar = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    return f"no instance {wanted[:64]!r} in the pools{hint}"


def _wanted_sizes(request: pools_pb2.ResizePoolsRequest) -> dict[Role, int]:
    """The sizes by role. Raises InvalidArgument."""
    roles = {value: role for role, value in WIRE_ROLES.items()}
    sizes: dict[Role, int] = {}
    for wanted in request.sizes:
        role = roles.get(wanted.role)
        if role is None:
            raise invalid_argument("sizes", "names a pool that does not exist", "ROLE_PREFILL, ROLE_DECODE")
        if role in sizes:
            raise invalid_argument("sizes", f"names the {role} pool twice", "one size for each pool")
        sizes[role] = wanted.size
    if not sizes:
        raise invalid_argument("sizes", "is empty", "the size of one pool or of both")
    return sizes
