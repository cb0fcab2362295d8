"""Connections from this instance to others: one channel an address, shared by the transfers that use it.

A channel in use is never closed. Of those that are not, the latest few stay open, because the next request's KV most
likely comes from the same place; the rest are closed, because addresses come and go with the pool.

Whom an instance dials its callers say. With TLS that does no harm: nothing is told to a peer before it has shown a
certificate of the stack's CA. Without, addresses outside private networks are refused, as is link-local, where clouds
keep credentials. A name is resolved here and its address dialled, so that it cannot be another one a moment later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from serving.addresses import is_ip, is_private, joined, resolved
from serving.channel import ChannelSettings, open_channel
from serving.errors import PermissionDenied, Unavailable
from serving.settings import host_and_port
from serving.tls import TlsFiles

_MAX_IDLE = 32


class _Shared:
    """A channel and how many use it."""

    __slots__ = ("channel", "num_users")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_users = 0


class Peers:
    """Owns the channels. Belongs to the front's event loop."""

    def __init__(
        self,
        settings: ChannelSettings,
        *,
        tls: TlsFiles | None = None,
        peer_name: str | None = None,
        anywhere: bool = False,
    ) -> None:
        """`peer_name` is what a peer's certificate must carry in place of its address; `anywhere` lets plaintext go
        outside private networks."""
        self._settings = settings
        self._tls = tls
        self._peer_name = peer_name
        self._is_bounded = tls is None and not anywhere
        self._by_address: dict[str, _Shared] = {}  # least lately used first

    @property
    def num_channels(self) -> int:
        """Open ones, used or not."""
        return len(self._by_address)

    def check(self, address: str) -> None:
        """Raises PermissionDenied for an address that is not dialled. What a name stands for is known only later."""
        host, _ = host_and_port(address)
        if self._is_bounded and is_ip(host) and not is_private(host):
            raise PermissionDenied(
                f"transfer.address: {address} is not in a private network, and without TLS nothing else is dialled"
            )

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to `address` (a host:port that `convert.dial_address` let pass), connecting already. Raises
        PermissionDenied or Unavailable."""
        address = await self._pinned(address) if self._is_bounded else address
        shared = self._by_address.pop(address, None) or _Shared(self._dial(address))
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

    def _dial(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self._settings, tls=self._tls, peer_name=self._peer_name)

    async def _pinned(self, address: str) -> str:
        """The address with its name resolved, checked."""
        host, port = host_and_port(address)
        try:
            pinned = joined(host if is_ip(host) else await resolved(host), port)
        except OSError:
            raise Unavailable(f"transfer.address: {host} cannot be resolved") from None
        self.check(pinned)
        return pinned

    async def _close_idle(self) -> None:
        idle = [address for address, shared in self._by_address.items() if shared.num_users == 0]
        for address in idle[: max(0, len(idle) - _MAX_IDLE)]:
            await self._by_address.pop(address).channel.close()
