"""Channels are shared, kept while in use, and closed when too many lie idle."""

from __future__ import annotations

from instance.peers import _MAX_IDLE, Peers
from serving.channel import ChannelSettings


async def test_users_of_an_address_share_its_channel() -> None:
    peers = Peers(ChannelSettings())
    async with peers.channel("127.0.0.1:1") as first, peers.channel("127.0.0.1:1") as second:
        assert first is second
    async with peers.channel("127.0.0.1:1") as third:
        assert third is first
    await peers.close()


async def test_the_longest_idle_are_closed_and_none_in_use() -> None:
    peers = Peers(ChannelSettings())
    async with peers.channel("127.0.0.1:1") as used:
        kept = {}
        for port in range(2, 2 + _MAX_IDLE + 5):
            async with peers.channel(f"127.0.0.1:{port}") as channel:
                kept[port] = channel
        async with peers.channel("127.0.0.1:1") as again:
            assert again is used
        async with peers.channel(f"127.0.0.1:{1 + _MAX_IDLE + 5}") as latest:
            assert latest is kept[1 + _MAX_IDLE + 5]
        async with peers.channel("127.0.0.1:2") as oldest:
            assert oldest is not kept[2]
    await peers.close()
