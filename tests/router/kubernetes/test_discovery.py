"""Discovery by EndpointSlices: pods that come and go, a server that forgets, breaks off and refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from router.kubernetes import cluster as cluster_module
from router.kubernetes.discovery import EndpointSliceDiscovery
from tests.chart.fake_kube.kubelet import PaperRuntime
from tests.chart.fake_kube.workloads import is_ready
from tests.router.kubernetes.release import RIGHTS, FakeRelease, fake_release
from tests.waiting import until

HANG_S = 30.0


class Followed:
    """The addresses that a discovery has yielded last."""

    def __init__(self, found: FakeRelease, pool: str) -> None:
        self.now: frozenset[str] | None = None
        self.num_yielded = 0
        self._found = found
        self._reports = EndpointSliceDiscovery(found.cluster(), pool, 50051).addresses()

    async def listen(self) -> None:
        """For ever."""
        async for addresses in self._reports:
            self.now = addresses
            self.num_yielded += 1

    async def until(self, addresses: set[str]) -> None:
        """Returns when it has yielded this set, and watches."""
        await until(lambda: self.now == addresses and self._found.kube.num_watches, HANG_S)


@asynccontextmanager
async def following(found: FakeRelease, pool: str = "decode") -> AsyncIterator[Followed]:
    followed = Followed(found, pool)
    listening = asyncio.create_task(followed.listen())
    try:
        yield followed
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


def addresses(found: FakeRelease, pool: str = "decode") -> set[str]:
    return {found.address(name) for name in found.names(pool)}


async def resized(found: FakeRelease, size: int) -> None:
    """Resizes without the router."""
    decode = found.kube.store.get("Deployment", "decode")
    found.kube.store.changed(decode, lambda new: new["spec"].update(replicas=size))
    await found.until_ready("decode", size)


async def test_pods_come_and_go_over_many_slices() -> None:
    async with fake_release() as found, following(found) as followed:
        await followed.until(addresses(found))
        for size in (7, 3, 0, 1):
            await resized(found, size)
            await followed.until(addresses(found))
            assert followed.now is not None
            assert len(followed.now) == size
        assert found.asked("list", "endpointslices") == 1


async def test_an_empty_pool_yields_an_empty_set() -> None:
    async with fake_release(prefill=0) as found, following(found, "prefill") as followed:
        await followed.until(set())


async def test_a_terminating_pod_is_out_while_it_drains() -> None:
    runtime = PaperRuntime(stop_s=3600.0)
    async with fake_release(runtime) as found, following(found) as followed:
        await followed.until(addresses(found))
        going, staying = found.names("decode")
        found.kube.store.changed(
            found.kube.store.get("Pod", going),
            lambda new: new["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", deletionGracePeriodSeconds=60),
        )
        await found.kube.until(lambda _: len(found.names("decode")) == 2 and found.addressed("decode"))
        await followed.until(addresses(found))
        assert followed.now is not None
        assert found.address(staying) in followed.now
        assert found.address(going) not in followed.now


async def test_a_pod_that_is_not_ready_is_in() -> None:
    runtime = PaperRuntime()
    runtime.unready.add("decode")
    async with fake_release(runtime, ready=False) as found, following(found) as followed:
        await found.kube.until(lambda store: len([pod for pod in store.all("Pod") if "status" in pod]) == 3)
        await followed.until(addresses(found))
        assert not any(is_ready(pod) for pod in found.kube.pods("decode"))
        assert followed.now is not None
        assert len(followed.now) == 2


async def test_a_watch_that_is_broken_off_misses_nothing() -> None:
    async with fake_release() as found, following(found) as followed:
        await followed.until(addresses(found))
        for size in (4, 1, 3):
            found.kube.drop_watches()
            await resized(found, size)
            await followed.until(addresses(found))


async def test_a_watch_that_ends_by_itself_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_WATCH_S", 0.2)
    async with fake_release() as found, following(found) as followed:
        await followed.until(addresses(found))
        for size in (3, 1, 2):
            async with asyncio.timeout(HANG_S):
                num_watches, num_yielded = found.asked("watch", "endpointslices"), followed.num_yielded
                while found.asked("watch", "endpointslices") < num_watches + 2:
                    await asyncio.sleep(0.01)
            assert followed.num_yielded == num_yielded, "an old set was yielded again"
            await resized(found, size)
            await followed.until(addresses(found))
        assert found.asked("list", "endpointslices") == 1


async def test_a_server_that_has_forgotten_the_past_is_asked_anew() -> None:
    async with fake_release() as found, following(found) as followed:
        await followed.until(addresses(found))
        old = found.kube.order("watch", "endpointslices", 410, times=1)
        found.kube.drop_watches()
        await resized(found, 5)
        found.kube.store.compact()
        await followed.until(addresses(found))
        assert old.num_met == 1
        assert found.asked("list", "endpointslices") >= 2


async def test_a_server_that_forgets_while_it_is_watched_is_asked_anew() -> None:
    async with fake_release() as found, following(found) as followed:
        await followed.until(addresses(found))
        await resized(found, 5)
        found.kube.store.compact()
        found.kube.drop_watches()
        await followed.until(addresses(found))


async def test_a_server_that_is_gone_removes_no_pod_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="router.pools.discovery"):
        async with fake_release() as found, following(found) as followed:
            await followed.until(addresses(found))
            fault = found.kube.order("list", "endpointslices", 500, times=None)
            found.kube.drop_watches()
            await resized(found, 5)
            await until(lambda: fault.num_met >= 5, HANG_S)
            assert followed.now is not None
            assert len(followed.now) == 2
            found.kube.withdraw(fault)
            await followed.until(addresses(found))
    refused = [one for one in caplog.records if "(500)" in one.getMessage()]
    assert len(refused) == 1
    assert "its last known instances are kept" in refused[0].getMessage()


async def test_a_missing_right_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="router.pools.discovery"):
        async with fake_release(rights=RIGHTS[:-1]) as found, following(found) as followed:
            await until(lambda: 'cannot list resource "endpointslices"' in caplog.text, HANG_S)
            assert followed.now is None
    assert "docs/kubernetes/security.md" in caplog.text
