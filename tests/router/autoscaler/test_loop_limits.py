"""The loop within the limits of both pools together, while one of them cannot be resized."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from router.autoscaler.loop import Autoscaler, metrics_of
from router.autoscaler.observation import PoolObservation
from router.pools.instance_info import Role
from tests.router import virtual_time
from tests.router.autoscaler.builders import pool_of, settings_of
from tests.router.autoscaler.simulation import Owner, now, resizer_of

OVERLOADED = {"num_running": 10, "num_waiting": 40}
IDLE = {"num_running": 0}
A_WHILE_S = 900.0


def run_loop(
    test: Callable[[Owner, Autoscaler], Coroutine[Any, Any, None]], size: int, load: dict[str, int], **limits: Any
) -> Owner:
    """`test` beside the loop, in virtual time. Each pool has `size` instances at first, and each of them has `load`; a
    pool that the owner does not have keeps them."""
    owner = Owner({"prefill": size, "decode": size})

    def observe(sizes: Mapping[Role, int]) -> dict[Role, PoolObservation]:
        roles: tuple[Role, ...] = ("prefill", "decode")
        seen = {role: pool_of(sizes.get(role, size), role=role, at_s=now(), **load) for role in roles}
        return {role: replace(observation, size=sizes.get(role)) for role, observation in seen.items()}

    async def main() -> None:
        settings = settings_of(prefill={"max_size": 16}, decode={"max_size": 16}, **limits)
        scaler = Autoscaler(resizer_of(owner), observe, settings, holder="one", clock=now)
        running = asyncio.create_task(scaler.run())
        await test(owner, scaler)
        running.cancel()

    virtual_time.run(main())
    return owner


def ratios(owner: Owner, size: int) -> list[float]:
    """Of prefill to decode, after each resize; both pools had `size`."""
    of: dict[Role, int] = {"prefill": size, "decode": size}
    found = []
    for _, role, new_size in owner.resizes:
        of[role] = new_size
        found.append(of["prefill"] / of["decode"])
    return found


ONE_IS_REFUSED = pytest.mark.parametrize(
    ("limits", "refused", "size", "load", "end"),
    [
        ({"min_ratio": 1.0}, "prefill", 1, OVERLOADED, 16),
        ({"max_ratio": 1.0}, "decode", 1, OVERLOADED, 16),
        ({"min_ratio": 1.0}, "decode", 8, IDLE, 1),
        ({"max_ratio": 1.0}, "prefill", 8, IDLE, 1),
    ],
)


@ONE_IS_REFUSED
def test_a_pool_waits_where_the_ratio_demands_what_the_other_is_refused(
    limits: dict[str, float], refused: Role, size: int, load: dict[str, int], end: int
) -> None:
    other: Role = "decode" if refused == "prefill" else "prefill"

    async def refusing(owner: Owner, scaler: Autoscaler) -> None:
        owner.refused = refused
        await asyncio.sleep(A_WHILE_S)
        assert owner.of == {"prefill": size, "decode": size}
        assert scaler.statuses[refused].holds["no_answer"] > 0
        assert scaler.statuses[other].holds["ratio"] > 0
        owner.refused = None
        await asyncio.sleep(2 * A_WHILE_S)
        assert owner.of == {"prefill": end, "decode": end}

    run_loop(refusing, size, load, **limits)


@ONE_IS_REFUSED
def test_a_pool_changes_alone_as_far_as_the_ratio_allows(
    limits: dict[str, float], refused: Role, size: int, load: dict[str, int], end: int
) -> None:
    other: Role = "decode" if refused == "prefill" else "prefill"
    limits = {name: limit / 2 if name == "min_ratio" else limit * 2 for name, limit in limits.items()}

    async def refusing(owner: Owner, scaler: Autoscaler) -> None:
        owner.refused = refused
        await asyncio.sleep(A_WHILE_S)
        assert owner.of == {refused: size, other: 2 * size if end > size else size // 2}

    run_loop(refusing, size, load, **limits)


@ONE_IS_REFUSED
def test_the_instances_of_a_pool_without_an_owner_count_in_the_ratio(
    limits: dict[str, float], refused: Role, size: int, load: dict[str, int], end: int
) -> None:
    other: Role = "decode" if refused == "prefill" else "prefill"

    async def unowned(owner: Owner, scaler: Autoscaler) -> None:
        del owner.of[refused]
        await asyncio.sleep(A_WHILE_S)
        assert scaler.statuses[refused].holds["no_actuator"] > 0
        assert scaler.statuses[other].holds["ratio"] > 0

    assert run_loop(unowned, size, load, **limits).of == {other: size}
    limits = {name: limit / 2 if name == "min_ratio" else limit * 2 for name, limit in limits.items()}
    assert run_loop(unowned, size, load, **limits).of == {other: 2 * size if end > size else size // 2}


@pytest.mark.parametrize("unowned", ["prefill", "decode"])
def test_the_instances_of_a_pool_without_an_owner_count_in_the_budget(unowned: Role) -> None:
    other: Role = "decode" if unowned == "prefill" else "prefill"

    async def overloaded(owner: Owner, scaler: Autoscaler) -> None:
        del owner.of[unowned]
        await asyncio.sleep(A_WHILE_S)
        assert scaler.statuses[other].holds["budget"] > 0

    assert run_loop(overloaded, 2, OVERLOADED, max_instances=7).of == {other: 5}


@pytest.mark.parametrize(("size", "load"), [(1, OVERLOADED), (8, IDLE)])
@pytest.mark.parametrize("limit", ["min_ratio", "max_ratio"])
def test_no_single_resize_leaves_the_ratio(limit: str, size: int, load: dict[str, int]) -> None:
    async def undisturbed(owner: Owner, scaler: Autoscaler) -> None:
        await asyncio.sleep(2 * A_WHILE_S)

    owner = run_loop(undisturbed, size, load, **{limit: 1.0})
    found = ratios(owner, size)
    assert len(found) >= 6
    assert all(ratio >= 1 if limit == "min_ratio" else ratio <= 1 for ratio in found)


@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_a_pool_waits_for_another_that_has_no_room(full: Role) -> None:
    async def without_room(owner: Owner, scaler: Autoscaler) -> None:
        owner.lack, owner.full = "no node takes 1 of 2 pods", full
        await asyncio.sleep(A_WHILE_S)
        assert owner.resizes == []
        assert scaler.statuses[full].holds["no_room"] > 0
        owner.lack = None
        await asyncio.sleep(A_WHILE_S)
        assert owner.of == {"prefill": 16, "decode": 16}

    run_loop(without_room, 1, OVERLOADED, min_ratio=1.0, max_ratio=1.0)


@pytest.mark.parametrize("refused", ["prefill", "decode"])
def test_an_exact_ratio_is_left_by_one_resize_at_most(refused: Role) -> None:
    """One of both has to be first, and only the attempt shows that the other one is refused."""

    async def refusing(owner: Owner, scaler: Autoscaler) -> None:
        owner.refused = refused
        await asyncio.sleep(A_WHILE_S)
        assert len(owner.resizes) <= 1
        owner.refused = None
        await asyncio.sleep(A_WHILE_S)
        assert owner.of == {"prefill": 16, "decode": 16}

    run_loop(refusing, 1, OVERLOADED, min_ratio=1.0, max_ratio=1.0)


@pytest.mark.parametrize("refused", ["prefill", "decode"])
def test_without_limits_no_pool_waits_for_the_other(refused: Role) -> None:
    other: Role = "decode" if refused == "prefill" else "prefill"

    async def refusing(owner: Owner, scaler: Autoscaler) -> None:
        owner.refused = refused
        await asyncio.sleep(A_WHILE_S)
        assert owner.of == {refused: 1, other: 16}

    run_loop(refusing, 1, OVERLOADED)


@pytest.mark.parametrize("refused", ["prefill", "decode"])
def test_the_share_of_a_pool_that_is_refused_stays_free_for_it(refused: Role) -> None:
    """What was refused once may be possible a moment later, and a pool under load gives nothing back."""

    async def refusing(owner: Owner, scaler: Autoscaler) -> None:
        owner.refused = refused
        await asyncio.sleep(A_WHILE_S)
        assert sum(owner.of.values()) < 8
        owner.refused = None
        await asyncio.sleep(A_WHILE_S)
        assert sum(owner.of.values()) == 8

    run_loop(refusing, 1, OVERLOADED, max_instances=8)


def test_a_pool_without_an_owner_has_no_size_among_the_metrics() -> None:
    """Its size is unknown, and not 0."""

    async def unowned(owner: Owner, scaler: Autoscaler) -> None:
        del owner.of["prefill"]
        await asyncio.sleep(A_WHILE_S)
        roles = {family.name: [one.labels.get("role") for one in family.samples] for family in metrics_of(scaler)}
        for name in ("size", "desired_size"):
            assert roles[f"tandem_router_autoscaler_{name}"] == ["decode"]
        assert roles["tandem_router_autoscaler_decision_age_seconds"] == ["prefill", "decode"]

    run_loop(unowned, 2, OVERLOADED)
