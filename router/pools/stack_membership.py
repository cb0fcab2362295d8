"""Who is in the pools of a local stack: what the owner of its processes tells, again whenever it changes.

    connecting ──first word──▶ following ──the stream breaks──▶ connecting: what was known last holds meanwhile

An instance that was told to go vanishes from here at once, before it has begun to drain, so that nothing new is sent
there; what runs there runs on (pool.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from protos.tandem.v1 import instance_pb2, stack_pb2, stack_pb2_grpc
from router.pools.instances import Role

_log = logging.getLogger(__name__)
_AGAIN_S = 0.2
"""The stack's socket is on this machine, and nobody else asks there."""
_ROLES: dict[Role, instance_pb2.Role.ValueType] = {
    "prefill": instance_pb2.ROLE_PREFILL,
    "decode": instance_pb2.ROLE_DECODE,
}


class StackMembership:
    """One pool's addresses, over a channel to the stack's socket, which somebody else closes."""

    def __init__(self, channel: grpc.aio.Channel, role: Role) -> None:
        self._stub = stack_pb2_grpc.StackServiceStub(channel)
        self._role = role
        self._problem: str | None = None

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        known: frozenset[str] | None = None
        while True:
            async for told in self._told():
                if told != known:
                    known = told
                    _log.info("the %s pool is now %s", self._role, ", ".join(sorted(told)) or "nobody")
                    yield told
            await asyncio.sleep(_AGAIN_S)

    async def _told(self) -> AsyncIterator[frozenset[str]]:
        """What one stream tells, until it breaks."""
        call = self._stub.WatchStack(stack_pb2.WatchStackRequest())
        try:
            async for answer in call:
                self._problem = None
                for pool in answer.pools:
                    if pool.role == _ROLES[self._role]:
                        yield frozenset(pool.addresses)
            self._tell("ended the stream")
        except grpc.aio.AioRpcError as error:
            self._tell(f"does not answer: {error.code().name}")
        finally:
            call.cancel()

    def _tell(self, problem: str) -> None:
        """Once per problem, not per attempt."""
        if problem != self._problem:
            _log.warning("the local stack %s; its last known %s instances are kept for now", problem, self._role)
        self._problem = problem
