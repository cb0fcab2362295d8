"""A follower never makes its request wait, and its holder is told to let go on every path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.messages import KVProgress, LeaseCommand, TransferEvent
from instance.convert import TransferSource, model_identity
from instance.followers import Followers
from instance.peers import Peers
from prefill_service.service import ROLE
from serving.channel import ChannelSettings
from tests.instance.rig import Rig, model_folder, running
from tests.instance.scripted_core import INFO
from tests.waiting import until

RELEASE = LeaseCommand("t1", "release")


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(model_folder(tmp_path / "model"), ROLE) as rig:
        yield rig


class Reader:
    """Followers whose core is a list."""

    def __init__(self) -> None:
        self.said: list[KVProgress] = []
        self.peers = Peers(ChannelSettings())
        self.followers = Followers(
            self.peers, model_identity(INFO), self.said.append, lease_s=1.0, attach_timeout_s=5.0
        )


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    reader = Reader()
    yield reader
    await reader.followers.close()
    assert reader.followers.num_following == 0
    await reader.peers.close()


def source(holder: Rig) -> TransferSource:
    return TransferSource("t1", holder.front.server.address, holder.front.instance_epoch)


async def test_what_was_never_reserved_is_released_all_the_same(holder: Rig, reader: Reader) -> None:
    with reader.followers.following(source(holder), "r1"):
        pass
    await until(lambda: RELEASE in holder.core.commands)
    assert not reader.said


async def test_the_first_word_about_a_release_counts(holder: Rig, reader: Reader) -> None:
    holder.core.emit(TransferEvent("t1", 3, num_tokens=14))
    with reader.followers.following(source(holder), "r1") as follower:
        follower.follow(1)
        await until(lambda: any(said.num_tokens == 14 for said in reader.said))
        follower.release(whole=True)
        follower.release(whole=False)
        assert follower.loaded.result()
    await until(lambda: RELEASE in holder.core.commands)
    assert holder.core.commands.count(RELEASE) == 1


async def test_the_lease_is_renewed_for_as_long_as_the_load_takes(holder: Rig, reader: Reader) -> None:
    holder.core.emit(TransferEvent("t1", 0))
    with reader.followers.following(source(holder), "r1") as follower:
        follower.follow(0)
        await until(lambda: sum(command.action == "renew" for command in holder.core.of(LeaseCommand)) >= 2)


async def test_letting_go_of_a_holder_that_is_not_there_takes_no_time(reader: Reader) -> None:
    began = asyncio.get_running_loop().time()
    with reader.followers.following(TransferSource("t1", "127.0.0.1:1", "e"), "r1") as follower:
        follower.follow(0)
        await until(lambda: reader.said)
    assert asyncio.get_running_loop().time() - began < 1.0
    assert "UNAVAILABLE" in (reader.said[-1].failed or "")
