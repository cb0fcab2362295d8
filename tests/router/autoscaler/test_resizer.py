"""Which instances a resize removes, what it rejects and what it records, with a real owner of the instances."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import pytest

from router.autoscaler.loop import Autoscaler
from router.autoscaler.resizer import ActuatorError, Resizer, SizeRefused, StackLink, least_loaded
from router.pools.instance import State
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport, Role
from tests.router.autoscaler.builders import pool_of, settings_of
from tests.router.conftest import Run
from tests.router.pools.owned import Owned, owned
from tests.waiting import until


@dataclass(frozen=True)
class InstanceStub:
    """An upstream instance as far as the choice of victims needs it."""

    name: str
    load: LoadReport | None = None
    out: str | None = None
    state: State = "ready"
    num_unreported: int = 0

    @property
    def address(self) -> str:
        return f"{self.name}:1"

    @property
    def info(self) -> InstanceInfo | None:
        if self.load is None:
            return None
        return InstanceInfo(self.name, "e", "decode", self.address, Identity(), num_blocks=100)

    def view(self) -> InstanceView | None:
        if self.info is None or self.load is None:
            return None
        key = InstanceKey(self.address, "e")
        return InstanceView(key, self.info, self.load, out=self.out, num_unreported=self.num_unreported)


IDLE = LoadReport("e", free_blocks=100)


def order(*instances: InstanceStub) -> list[str]:
    """Names in the order of removal, whatever the order of the input."""
    found = least_loaded(instances, len(instances))  # type: ignore[arg-type]
    assert found == least_loaded(instances[::-1], len(instances))  # type: ignore[arg-type]
    return [address.removesuffix(":1") for address in found]


def test_those_that_are_not_ready_go_first() -> None:
    busy = replace(IDLE, num_running=9)
    assert order(
        InstanceStub("ready", IDLE), InstanceStub("starting"), InstanceStub("draining", busy, out="draining")
    ) == [
        "starting",
        "draining",
        "ready",
    ]


def test_then_those_with_the_fewest_requests_whatever_they_do() -> None:
    running, waiting = replace(IDLE, num_running=3), replace(IDLE, num_waiting=2)
    loading = replace(IDLE, num_loading=1)
    assert order(
        InstanceStub("running", running),
        InstanceStub("waiting", waiting),
        InstanceStub("loading", loading),
        InstanceStub("idle", IDLE),
    ) == [
        "idle",
        "loading",
        "waiting",
        "running",
    ]
    assert order(InstanceStub("sent to", IDLE, num_unreported=5), InstanceStub("reported", running)) == [
        "reported",
        "sent to",
    ]


def test_then_those_with_the_least_kv_cached_or_not() -> None:
    cached = replace(IDLE, free_blocks=40, cached_blocks=60)
    used = replace(IDLE, free_blocks=70)
    assert order(InstanceStub("c", cached), InstanceStub("b", used), InstanceStub("a", IDLE)) == ["a", "b", "c"]


def test_then_the_last_by_name_and_never_one_that_leaves() -> None:
    assert order(InstanceStub("decode-0", IDLE), InstanceStub("decode-1", IDLE)) == ["decode-1", "decode-0"]
    leaving = InstanceStub("decode-9", IDLE, out="its address has left the pool", state="leaving")
    assert least_loaded((leaving, InstanceStub("decode-0", IDLE)), 5) == ["decode-0:1"]  # type: ignore[arg-type]


async def test_the_least_loaded_go_and_the_router_follows(run: Run) -> None:
    async with owned(run, num_decode=3) as stack:
        stack.rig.decode[0].behaviour.num_running = 1
        stack.rig.decode[2].behaviour.num_running = 4
        await until(lambda: sum(view.load.num_running for view in stack.rig.app.pools.decode.views()) == 5)
        [change] = await stack.resizer.resize({"decode": 1}, cause="autoscaler", reason="idle for an hour")
        assert (change.previous_size, change.size, change.cause) == (3, 1, "autoscaler")
        assert stack.decode_names() == ["decode-2"]
        assert stack.resizer.last_changes.get("decode") == change
        assert stack.resizer.last_changes.get("prefill") is None
        await stack.until_ready(decode=1)
        await stack.resizer.resize({"decode": 3}, cause="operator", reason="why not")
        await stack.until_ready(decode=3)


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        ({"decode": 0}, r"between 1 and 64"),
        ({"decode": 65}, r"between 1 and 64"),
        ({"prefill": -1}, r"between 0 and 64"),
        ({"decode": 3, "prefill": 65}, r"between 0 and 64"),
    ],
)
async def test_a_size_that_cannot_be_is_refused_before_anything_begins(
    run: Run, sizes: dict[str, int], allowed: str
) -> None:
    async with owned(run) as stack:
        before = stack.desired.snapshot
        with pytest.raises(SizeRefused, match=allowed):
            await stack.resizer.resize(sizes, cause="operator", reason="")  # type: ignore[arg-type]
        assert stack.desired.snapshot is before


async def test_a_router_that_always_splits_keeps_a_prefill_instance(run: Run) -> None:
    async with owned(run) as stack:
        resizer = Resizer(stack.resizer.actuator, stack.rig.app.pools, needs_prefill=True)
        with pytest.raises(SizeRefused, match="prefill must be between 1 and 64 with disaggregation 'always', is 0"):
            await resizer.resize({"decode": 3, "prefill": 0}, cause="operator", reason="")
        assert await resizer.actuator.sizes() == {"prefill": 1, "decode": 2}


async def test_both_pools_begin_together_or_neither_does(run: Run) -> None:
    async with owned(run, num_spares=1) as stack:
        refuses, assumed = ActuatorError("no room"), list[int]()
        resize = stack.resizer.actuator.resize

        async def without_prefill(role: str, size: int, victims: list[str], *, previous_size: int) -> None:
            if role == "prefill":
                raise refuses
            assumed.append(previous_size)
            await resize(role, size, victims, previous_size=previous_size)  # type: ignore[arg-type]

        stack.resizer.actuator.resize = without_prefill  # type: ignore[method-assign,assignment]
        with pytest.raises(ActuatorError, match="no room"):
            await stack.resizer.resize({"decode": 3, "prefill": 0}, cause="operator", reason="")
        assert await stack.resizer.actuator.sizes() == {"prefill": 1, "decode": 2}
        assert assumed == [2, 3], "back from what it has become"
        assert stack.resizer.last_changes.get("decode") is None


async def test_a_resize_whose_client_leaves_between_the_pools_goes_on(run: Run) -> None:
    async with owned(run, num_spares=1) as stack:
        resize, reached, may_go_on = stack.resizer.actuator.resize, asyncio.Event(), asyncio.Event()

        async def slow_for_prefill(role: str, size: int, victims: list[str], *, previous_size: int) -> None:
            if role == "prefill":
                reached.set()
                await may_go_on.wait()
            await resize(role, size, victims, previous_size=previous_size)  # type: ignore[arg-type]

        stack.resizer.actuator.resize = slow_for_prefill  # type: ignore[method-assign,assignment]
        asking = asyncio.create_task(stack.rig.app._pools_service.resize({"decode": 3, "prefill": 0}))
        await reached.wait()
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        may_go_on.set()
        await until(lambda: len(stack.resizer.recent) == 2)
        assert await stack.resizer.actuator.sizes() == {"prefill": 0, "decode": 3}
        assert {role: change.size for role, change in stack.resizer.last_changes.items()} == {"prefill": 0, "decode": 3}


async def test_a_pool_that_does_not_get_its_size_back_is_recorded(run: Run) -> None:
    async with owned(run, num_spares=1) as stack:
        resize = stack.resizer.actuator.resize

        async def once(role: str, size: int, victims: list[str], *, previous_size: int) -> None:
            if role == "prefill":
                raise ActuatorError("no room")
            if previous_size == 3:
                raise ActuatorError("no answer")
            await resize(role, size, victims, previous_size=previous_size)  # type: ignore[arg-type]

        stack.resizer.actuator.resize = once  # type: ignore[method-assign,assignment]
        problem = "no room; the decode pool could not be resized from 3 back to 2: no answer"
        with pytest.raises(ActuatorError, match=problem):
            await stack.resizer.resize({"decode": 3, "prefill": 0}, cause="operator", reason="")
        [change] = stack.resizer.recent
        assert (change.role, change.previous_size, change.size) == ("decode", 2, 3)
        assert stack.resizer.last_changes == {"decode": change}


async def test_a_pool_that_has_its_size_is_left_alone(run: Run) -> None:
    async with owned(run) as stack:
        before = stack.desired.snapshot
        [change] = await stack.resizer.resize({"decode": 2}, cause="operator", reason="")
        assert (change.previous_size, change.size) == (2, 2)
        assert stack.desired.snapshot is before
        assert stack.resizer.last_changes.get("decode") is None


def resize_after_reading(stack: Owned, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resize of the decode pool by another router, between reading the sizes for the next resize and that resize."""
    actuator = stack.resizer.actuator
    read = actuator.sizes

    async def sizes() -> Mapping[Role, int]:
        found = await read()
        if stack.resizer._one_at_a_time.locked():
            monkeypatch.undo()
            stack.desired.resize("decode", size)
        return found

    monkeypatch.setattr(actuator, "sizes", sizes)


async def test_a_resize_by_another_router_is_not_overwritten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with owned(run) as stack:
        resize_after_reading(stack, 4, monkeypatch)
        with pytest.raises(ActuatorError, match="the decode pool was resized from 2 to 4 meanwhile"):
            await stack.resizer.resize({"decode": 1}, cause="operator", reason="")
        assert await stack.resizer.actuator.sizes() == {"prefill": 1, "decode": 4}
        assert stack.resizer.last_changes == {}


async def test_the_autoscaler_goes_on_from_what_another_router_has_resized(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    roles: tuple[Role, ...] = ("prefill", "decode")
    async with owned(run) as stack:
        scaler = Autoscaler(
            stack.resizer,
            lambda sizes: {role: pool_of(sizes[role], role=role, at_s=now_s) for role in roles},
            settings_of(decode={"max_size": 1}),
            holder="one",
            clock=lambda: now_s,
        )
        resize_after_reading(stack, 4, monkeypatch)
        await scaler.step()
        assert len(stack.desired.snapshot.pool("decode")) == 4
        assert "the decode pool was resized from 2 to 4 meanwhile" in scaler.to_wire("decode").reason
        now_s += 300.0
        await scaler.step()  # a change by others: the cool-down begins with it
        assert scaler.statuses["decode"].holds["cool_down"] == 1
        now_s += 300.0
        await scaler.step()
        assert len(stack.desired.snapshot.pool("decode")) == 2
        assert "; the size may change" not in scaler.to_wire("decode").reason


async def test_a_link_that_is_closed_says_that_the_router_ends() -> None:
    link = StackLink("unix:/nowhere/stack.sock")
    await link.close()
    for call in (link.sizes(), link.resize("decode", 2, (), previous_size=1), link.take_lead("one", 15.0)):
        with pytest.raises(ActuatorError, match="the router is about to end"):
            await call


async def test_a_router_that_stops_accepts_no_calls_of_operators_once_its_owner_is_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[grpc.aio.AioRpcError] = []
    async with owned(run) as found:

        async def closed(link: StackLink) -> None:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await found.listed()
            refused.append(error.value)
            await close(link)

        close = StackLink.close
        with monkeypatch.context() as patched:
            patched.setattr(StackLink, "close", closed)
            await found.rig.app.stop()
    assert [error.code() for error in refused] == [grpc.StatusCode.UNAVAILABLE]


async def test_concurrent_resizes_run_one_after_the_other(run: Run) -> None:
    async with owned(run, num_decode=1, num_spares=5) as stack:
        changes = await asyncio.gather(
            *(stack.resizer.resize({"decode": size}, cause="operator", reason="") for size in (4, 2, 3))
        )
        assert [(change.previous_size, change.size) for (change,) in changes] == [(1, 4), (4, 2), (2, 3)]
        assert await stack.resizer.actuator.sizes() == {"prefill": 1, "decode": 3}
