"""tandem.v1.PoolsService: the pools as their operators see and move them. Served on the admin listener alone."""

from __future__ import annotations

import asyncio
import difflib
import math
import random
from collections.abc import Iterable, Iterator

import grpc.aio

from protos.tandem.v1 import common_pb2, generation_pb2, instance_pb2, instance_pb2_grpc, pools_pb2
from router.config import DisaggregationSettings
from router.failover.safeguards import Safeguards
from router.model import ModelLimits, ServedModel
from router.picking.affinity import Affinity
from router.picking.explain import Candidate, explain
from router.pools.instances import LoadReport, Role
from router.pools.member import Member
from router.pools.pool import Pool
from router.request import GenerationRequest
from router.validation import validated
from serving.calls import Context, remaining_s
from serving.errors import FailedPrecondition, NotFound, Unavailable, invalid_argument, received
from serving.writer import Writer

_DRAIN_TIMEOUT_S = 5.0
_MAX_GRACE_S = 86_400.0
_ROLES: dict[Role, instance_pb2.Role.ValueType] = {
    "prefill": instance_pb2.ROLE_PREFILL,
    "decode": instance_pb2.ROLE_DECODE,
}


class PoolsService:
    """Holds no state of its own."""

    def __init__(
        self, model: ServedModel, safeguards: Safeguards, affinity: Affinity, disaggregation: DisaggregationSettings
    ) -> None:
        self._model = model
        self._safeguards = safeguards
        self._pools = safeguards.pools
        self._affinity = affinity
        self._disaggregation = disaggregation

    async def ListPools(self, request: pools_pb2.ListPoolsRequest, context: Context) -> pools_pb2.ListPoolsResponse:
        instances = [_instance(role, member, self._out(role, member)) for role, member in self._members()]
        instances.sort(key=lambda instance: (instance.role, instance.instance_id or instance.address))
        return pools_pb2.ListPoolsResponse(instances=instances)

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
            decode=[*map(_candidate, explanation.decode), *_unseen(self._pools.decode)],
            prefill=[*map(_candidate, explanation.prefill), *_unseen(self._pools.prefill)],
            disaggregated=explanation.disaggregated,
            reason=explanation.reason,
        )

    async def DrainInstance(
        self, request: pools_pb2.DrainInstanceRequest, context: Context
    ) -> pools_pb2.DrainInstanceResponse:
        if not (math.isfinite(request.grace_s) and 0 <= request.grace_s <= _MAX_GRACE_S):
            raise invalid_argument("grace_s", f"{request.grace_s:g}", f"0..{_MAX_GRACE_S:g} seconds")
        member = self._member(request.instance)
        name = _name(member)
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
        raise FailedPrecondition("this router was not told who owns its instances' processes")

    async def WatchPools(
        self, request: pools_pb2.WatchPoolsRequest, context: Context, writer: Writer[pools_pb2.WatchPoolsResponse]
    ) -> None:
        while True:
            pools = await self.ListPools(pools_pb2.ListPoolsRequest(), context)
            await writer.write(pools_pb2.WatchPoolsResponse(pools=pools))
            await asyncio.sleep(request.interval_s or 1.0)

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
        found = [member for member in members if wanted in (member.address, _name(member))]
        processes = {member.key.epoch if member.key else member.address for member in found}
        if len(processes) > 1:
            addresses = ", ".join(member.address for member in found)
            raise FailedPrecondition(f"{wanted!r} is the name of several instances; give an address: {addresses}")
        if not found:
            raise NotFound(_not_known(wanted, [*map(_name, members), *(member.address for member in members)]))
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


def _name(member: Member) -> str:
    return (member.info.instance_id if member.info else "") or member.address


def _not_known(wanted: str, names: list[str]) -> str:
    similar = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    return f"no instance {wanted[:64]!r} in the pools{hint}"


def _instance(role: Role, member: Member, out: str | None) -> pools_pb2.PoolInstance:
    view = member.view()
    return pools_pb2.PoolInstance(
        instance_id=member.info.instance_id if member.info else "",
        address=member.address,
        role=_ROLES[role],
        out=out or "",
        load=_load(view.load, view.info.num_blocks) if view else None,
        num_running_here=member.num_requests,
        num_blocks=member.info.num_blocks if member.info else 0,
    )


def _load(load: LoadReport, num_blocks: int) -> instance_pb2.WatchLoadResponse:
    """What the router keeps of a report. Blocks that are neither free nor cached are told as running."""
    num_running_blocks = max(num_blocks - load.free_blocks - load.cached_blocks, 0)
    return instance_pb2.WatchLoadResponse(
        instance_epoch=load.epoch,
        sequence=load.sequence,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_loading=load.num_loading,
        num_waiting_tokens=load.num_waiting_tokens,
        blocks=instance_pb2.BlockUsage(free=load.free_blocks, cached=load.cached_blocks, running=num_running_blocks),
        step_s=load.step_s,
        core_silence_s=load.core_silence_s,
        draining=load.draining,
        num_prefilled_tokens=load.num_prefilled_tokens,
    )


def _candidate(candidate: Candidate) -> pools_pb2.Candidate:
    return pools_pb2.Candidate(
        instance_id=candidate.view.instance_id,
        address=candidate.view.key.address,
        rejected=candidate.rejected or "",
        score=candidate.score,
        parts=[
            pools_pb2.ScorePart(scorer=part.scorer, value=part.value, weight=part.weight) for part in candidate.parts
        ],
        picked=candidate.picked,
    )


def _unseen(pool: Pool) -> Iterable[pools_pb2.Candidate]:
    """Members that are in no snapshot, since they have not told who they are and how loaded."""
    for member in pool.members:
        if member.view() is None:
            yield pools_pb2.Candidate(
                instance_id=_name(member), address=member.address, rejected=member.out or "connecting"
            )
