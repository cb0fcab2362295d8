"""What operators are told of the pools: the router's own values as messages of protos/tandem/v1/pools.proto."""

from __future__ import annotations

import time
from collections.abc import Iterable

from protos.tandem.v1 import instance_pb2, pools_pb2
from router.autoscaler.resizer import Change
from router.picking.explain import Candidate
from router.pools.instances import LoadReport, Role
from router.pools.member import Member
from router.pools.pool import Pool

WIRE_ROLES: dict[Role, instance_pb2.Role.ValueType] = {
    "prefill": instance_pb2.ROLE_PREFILL,
    "decode": instance_pb2.ROLE_DECODE,
}


def name_of(member: Member) -> str:
    """What operators call it: its own name, or its address while it has told none."""
    return (member.info.instance_id if member.info else "") or member.address


def instance_of(role: Role, member: Member, out: str | None) -> pools_pb2.PoolInstance:
    """One member; `out` says why it is not picked."""
    view = member.view()
    return pools_pb2.PoolInstance(
        instance_id=member.info.instance_id if member.info else "",
        address=member.address,
        role=WIRE_ROLES[role],
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


def candidate_of(candidate: Candidate) -> pools_pb2.Candidate:
    """One instance's standing."""
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


def unseen(pool: Pool) -> Iterable[pools_pb2.Candidate]:
    """Members that are in no snapshot, since they have not told who they are and how loaded."""
    for member in pool.members:
        if member.view() is None:
            yield pools_pb2.Candidate(
                instance_id=name_of(member), address=member.address, rejected=member.out or "connecting"
            )


def change_of(change: Change) -> pools_pb2.PoolChange:
    """One resize, with its age."""
    return pools_pb2.PoolChange(
        previous_size=change.previous_size,
        size=change.size,
        cause=change.cause,
        reason=change.reason,
        age_s=time.monotonic() - change.at_s,
    )
