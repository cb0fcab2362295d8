"""The router's way to the owner of a local stack: one channel, to learn who there is and to ask for other sizes."""

from __future__ import annotations

from router.autoscaler.stack_actuator import StackActuator
from router.pools.instances import Role
from router.pools.stack_membership import StackMembership
from serving.channel import open_channel


class StackLink:
    """Owns the channel; made on the running event loop."""

    def __init__(self, address: str) -> None:
        """`address` is unix:/PATH of the stack's socket; nobody has to listen there yet."""
        self._channel = open_channel(address)
        self.actuator = StackActuator(self._channel)

    def membership(self, role: Role) -> StackMembership:
        """Who is in that pool."""
        return StackMembership(self._channel, role)

    async def close(self) -> None:
        """Ends what is left of its calls."""
        await self._channel.close()
