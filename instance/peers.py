"""Connections from this instance to others: one channel an address, shared by the transfers that use it.

A channel in use is never closed. Of those that are not, the latest few stay open, because the next request's KV most
likely comes from the same place; the rest are closed, because addresses come and go with the pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from serving.channel import ChannelSettings, open_channel

_MAX_IDLE = 32


class _Shared:
    """A channel and how many use it."""

    __slots__ = ("channel", "num_users")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_users = 0


class Peers:
    """Owns the channels. Belongs to the front's event loop."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._by_address: dict[str, _Shared] = {}  # least lately used first

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to `address` (a host:port that `convert.dial_address` let pass), connecting already."""
        shared = self._by_address.pop(address, None) or _Shared(open_channel(address, self._settings))
        self._by_address[address] = shared
        shared.num_users += 1
        shared.channel.get_state(try_to_connect=True)
        try:
            yield shared.channel
        finally:
            shared.num_users -= 1
            await self._close_idle()

    async def close(self) -> None:
        """Closes every channel, cancelling what still uses them."""
        while self._by_address:
            _, shared = self._by_address.popitem()
            await shared.channel.close()

    async def _close_idle(self) -> None:
        idle = [address for address, shared in self._by_address.items() if shared.num_users == 0]
        for address in idle[: max(0, len(idle) - _MAX_IDLE)]:
            await self._by_address.pop(address).channel.close()
