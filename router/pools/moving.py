"""Whether a stream may leave an instance that is about to end: only when somebody else can surely take it.

An instance whose drain is nearly over asks for it (`moving_out` in its load reports). Nothing is broken yet: a stream
that stays runs on until the grace is over. So it is moved only to an instance that is ready and has room for it now.
"""

from __future__ import annotations

from router.picking.plan import NoPlan, Plan
from router.pools.instances import InstanceView


def can_move(plan: Plan | NoPlan, num_tokens: int) -> bool:
    """Whether a stream whose KV takes `num_tokens` may go on where `plan` says."""
    return isinstance(plan, Plan) and has_room(plan.decode.instance, num_tokens)


def has_room(view: InstanceView, num_tokens: int) -> bool:
    """Whether the instance's last report leaves blocks for `num_tokens` and a next one; unknown sizes count as room."""
    block_size = view.info.identity.block_size
    if not view.info.num_blocks or not block_size:
        return True
    return view.load.free_blocks + view.load.cached_blocks > num_tokens // block_size
