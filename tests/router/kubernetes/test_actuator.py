"""Sizes and removed pods, against an API server with other writers, failures and checked rights."""

from __future__ import annotations

import asyncio
import copy
import datetime
import logging
from types import SimpleNamespace

import pytest
from kubernetes.aio.config import incluster_config

from router.autoscaler.resizer import ActuatorError
from router.kubernetes import cluster as cluster_module
from router.kubernetes.actuator import DELETION_COST
from router.kubernetes.cluster import Missing
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import PaperRuntime
from tests.router.kubernetes.release import ACCOUNT, RIGHTS, FakeRelease, fake_release


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_WAIT_S", 0.001)
    monkeypatch.setattr(cluster_module, "_MAX_WAIT_S", 0.01)


def costs(found: FakeRelease, pool: str = "decode") -> dict[str, str]:
    """Of the pods that have one."""
    annotated = {pod["metadata"]["name"]: pod["metadata"].get("annotations") or {} for pod in found.kube.pods(pool)}
    return {name: notes[DELETION_COST] for name, notes in annotated.items() if DELETION_COST in notes}


def without(resource: str) -> list[Object]:
    """The rights but for those on `resource`."""
    return [rule for rule in copy.deepcopy(RIGHTS) if resource not in rule["resources"]]


# Sizes


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
async def test_pods_follow_the_sizes_that_are_written(kind: str) -> None:
    async with fake_release(kind=kind) as found:
        actuator = found.actuator(kind=kind.lower())
        assert await actuator.sizes() == {"prefill": 1, "decode": 2}
        await actuator.resize("decode", 4, (), previous_size=2)
        await found.until_ready("decode", 4)
        await actuator.resize("decode", 1, (), previous_size=4)
        await found.until_ready("decode", 1)
        assert await actuator.sizes() == {"prefill": 1, "decode": 1}


async def test_an_empty_pool_has_a_size_too() -> None:
    """Go leaves a zero out."""
    async with fake_release(prefill=0) as found:
        actuator = found.actuator()
        assert (await actuator.sizes())["prefill"] == 0
        await actuator.resize("prefill", 1, (), previous_size=0)
        await found.until_ready("prefill", 1)
        await actuator.resize("prefill", 0, (), previous_size=1)
        assert (await actuator.sizes())["prefill"] == 0


async def test_only_pools_with_a_workload_can_be_resized() -> None:
    async with fake_release() as found:
        actuator = found.actuator(decode="deployment/decode")
        assert await actuator.sizes() == {"decode": 2}
        with pytest.raises(ActuatorError, match=r"set kubernetes\.prefill"):
            await actuator.resize("prefill", 2, (), previous_size=1)


async def test_a_workload_that_is_not_there_is_named() -> None:
    async with fake_release(rights=[{**RIGHTS[0], "resourceNames": []}]) as found:
        with pytest.raises(Missing, match="missing/scale"):
            await found.actuator(decode="deployment/missing").sizes()


# Which pods are removed


async def test_the_victims_go_and_not_the_newest() -> None:
    async with fake_release(decode=4) as found:
        actuator = found.actuator()
        await actuator.sizes()
        first, second, third, fourth = found.names("decode")
        await actuator.resize("decode", 2, [found.address(third), found.address(first)], previous_size=4)
        await found.until_ready("decode", 2)
        assert found.names("decode") == [second, fourth]
        assert costs(found) == {}


async def test_of_two_victims_the_first_goes_first() -> None:
    async with fake_release(decode=3) as found:
        actuator = found.actuator()
        await actuator.sizes()
        first, second, third = found.names("decode")
        await actuator.resize("decode", 2, [found.address(second), found.address(first)], previous_size=3)
        await found.until_ready("decode", 2)
        assert found.names("decode") == [first, third]


async def test_marks_of_a_resize_that_came_to_nothing_are_taken_back() -> None:
    async with fake_release(decode=3) as found:
        actuator = found.actuator()
        await actuator.sizes()
        first, second, third = found.names("decode")
        fault = found.kube.order("patch", "deployments/scale", 500, times=None)
        with pytest.raises(ActuatorError):
            await actuator.resize("decode", 2, [found.address(first)], previous_size=3)
        assert set(costs(found)) == {first}
        found.kube.withdraw(fault)
        await actuator.resize("decode", 2, [found.address(second)], previous_size=3)
        await found.until_ready("decode", 2)
        assert found.names("decode") == [first, third]
        assert costs(found) == {}


async def test_a_foreign_deletion_cost_is_left_alone() -> None:
    async with fake_release(decode=3) as found:
        actuator = found.actuator()
        first, second, _ = found.names("decode")
        pod = found.kube.store.get("Pod", first)
        found.kube.store.changed(pod, lambda new: new["metadata"].update(annotations={DELETION_COST: "-7"}))
        await actuator.resize("decode", 2, [found.address(second)], previous_size=3)
        await found.until_ready("decode", 2)
        assert costs(found) == {first: "-7"}


@pytest.mark.parametrize("rights", [without("pods"), [*without("pods"), {**RIGHTS[1], "verbs": ["list"]}]])
async def test_a_router_that_may_not_mark_pods_resizes_all_the_same(
    rights: list[Object], caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_release(rights=rights) as found:
        actuator = found.actuator()
        with caplog.at_level(logging.WARNING, logger="router.kubernetes.actuator"):
            await actuator.resize("decode", 1, [found.address(found.names("decode")[0])], previous_size=2)
        assert found.size("decode") == 1
        assert "could not set pod-deletion-cost" in caplog.text


async def test_pods_of_a_stateful_set_are_not_marked_and_the_last_goes() -> None:
    async with fake_release(kind="StatefulSet", decode=3) as found:
        await found.actuator(kind="statefulset").resize("decode", 2, [found.address("decode-0")], previous_size=3)
        await found.until_ready("decode", 2)
        assert found.names("decode") == ["decode-0", "decode-1"]
        assert found.asked("list", "pods") == 0


# Other writers


async def test_a_rollout_does_not_hinder_a_resize() -> None:
    async with fake_release() as found:
        actuator = found.actuator()
        before = found.kube.store.revision
        template = found.kube.store.get("Deployment", "decode")
        found.kube.store.changed(
            template, lambda new: new["spec"]["template"]["metadata"].update(annotations={"checksum": "1"})
        )
        await found.kube.until(lambda store: is_rolled_out(store.get("Deployment", "decode")))
        found.kube.order("get", "deployments/scale", revision=before)  # the resize reads before the rollout
        await actuator.resize("decode", 3, (), previous_size=2)
        await found.until_ready("decode", 3)
        assert found.asked("patch", "deployments/scale") == 2


async def test_a_resize_that_others_always_precede_asks_to_try_again() -> None:
    async with fake_release() as found:
        before = found.kube.store.revision
        found.kube.store.changed(
            found.kube.store.get("Deployment", "decode"), lambda new: new["metadata"].update(labels={"release": "b"})
        )
        stale = found.kube.order("get", "deployments/scale", revision=before, times=10)
        with pytest.raises(ActuatorError, match="the decode pool changes too fast to be resized to 3: try again"):
            await found.actuator().resize("decode", 3, (), previous_size=2)
        assert stale.num_met == found.asked("patch", "deployments/scale") + 1
        assert found.size("decode") == 2


def is_rolled_out(deployment: Object) -> bool:
    """All its pods are new ones, and its status has nothing left to say about it."""
    status = deployment["status"]
    counts = {status[count] for count in ("replicas", "updatedReplicas", "readyReplicas")}
    is_seen = status["observedGeneration"] == deployment["metadata"]["generation"]
    return is_seen and counts == {deployment["spec"]["replicas"]}


async def test_a_concurrent_resize_is_not_overwritten() -> None:
    async with fake_release() as found:
        late, other = found.actuator(), found.actuator()
        await late.sizes()
        await other.resize("decode", 5, (), previous_size=2)
        with pytest.raises(ActuatorError, match="the decode pool was resized from 2 to 5"):
            await late.resize("decode", 1, (), previous_size=2)
        assert found.size("decode") == 5
        await late.resize("decode", 4, (), previous_size=5)
        assert found.size("decode") == 4


async def test_a_resize_by_others_is_not_overwritten_whoever_reads_the_sizes_meanwhile() -> None:
    async with fake_release() as found:
        actuator, other = found.actuator(), found.actuator()
        assumed = await actuator.sizes()
        await other.resize("decode", 5, (), previous_size=2)
        await actuator.sizes()  # for a client that lists the pools
        with pytest.raises(ActuatorError, match="the decode pool was resized from 2 to 5"):
            await actuator.resize("decode", 1, (), previous_size=assumed["decode"])
        assert found.size("decode") == 5


async def test_a_stale_answer_decides_nothing() -> None:
    async with fake_release() as found:
        actuator, other = found.actuator(), found.actuator()
        before = found.kube.store.revision
        await other.resize("decode", 6, (), previous_size=2)
        stale = found.kube.order("get", "deployments/scale", revision=before, times=3)
        assert (await actuator.sizes())["decode"] == 2
        assert stale.num_met == 2
        with pytest.raises(ActuatorError, match="from 2 to 6"):
            await actuator.resize("decode", 1, (), previous_size=2)
        assert stale.num_met == 3
        assert found.size("decode") == 6


async def test_a_concurrent_resize_to_the_same_size_succeeds() -> None:
    async with fake_release() as found:
        late, other = found.actuator(), found.actuator()
        await late.sizes()
        await other.resize("decode", 3, (), previous_size=2)
        await late.resize("decode", 3, (), previous_size=2)
        assert found.size("decode") == 3


# A server with a bad day


@pytest.mark.parametrize("code", [409, 429, 500, 503])
@pytest.mark.parametrize("is_done", [False, True])
async def test_a_write_that_fails_once_is_written_once(code: int, is_done: bool) -> None:
    async with fake_release() as found:
        actuator = found.actuator()
        await actuator.sizes()
        fault = found.kube.order("patch", "deployments/scale", code, is_done=is_done, retry_after_s=1)
        await actuator.resize("decode", 3, (), previous_size=2)
        assert fault.num_met == 1
        await found.until_ready("decode", 3)
        assert await actuator.sizes() == {"prefill": 1, "decode": 3}


@pytest.mark.parametrize("code", [409, 429, 500, 503])
async def test_a_server_that_goes_on_failing_leaves_the_size_and_is_not_asked_for_ever(code: int) -> None:
    async with fake_release() as found:
        actuator = found.actuator()
        await actuator.sizes()
        fault = found.kube.order("patch", "deployments/scale", code, times=None)
        with pytest.raises(ActuatorError):
            await actuator.resize("decode", 3, (), previous_size=2)
        assert fault.num_met <= 5
        assert found.size("decode") == 2
        found.kube.withdraw(fault)
        await actuator.resize("decode", 3, (), previous_size=2)
        assert found.size("decode") == 3


@pytest.mark.parametrize("code", [429, 500])
async def test_reading_is_tried_again_too(code: int) -> None:
    async with fake_release() as found:
        fault = found.kube.order("get", "deployments/scale", code, times=2)
        assert await found.actuator().sizes() == {"prefill": 1, "decode": 2}
        assert fault.num_met == 2


async def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_TRY_S", 0.05)
    async with fake_release() as found:
        actuator = found.actuator()
        await actuator.sizes()
        found.kube.order("patch", "deployments/scale", delay_s=60.0, times=None)
        with pytest.raises(ActuatorError, match="cannot be reached"):
            await actuator.resize("decode", 3, (), previous_size=2)
        assert found.size("decode") == 2


async def test_marking_that_takes_too_long_does_not_hold_the_resize_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.kubernetes.actuator._MARKING_S", 0.05)
    async with fake_release() as found:
        found.kube.order("list", "pods", delay_s=60.0)
        async with asyncio.timeout(30):
            await found.actuator().resize("decode", 1, [found.address(found.names("decode")[0])], previous_size=2)
        assert found.size("decode") == 1


async def test_a_server_that_is_gone_is_an_error_until_it_is_back() -> None:
    async with fake_release() as found:
        actuator = found.actuator()
        await found.kube.go_away()
        with pytest.raises(ActuatorError, match="Kubernetes cannot be reached to GET"):
            await actuator.sizes()
        await found.kube.come_back()
        assert await actuator.sizes() == {"prefill": 1, "decode": 2}


async def test_a_token_that_cannot_be_used_is_an_error_until_another_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again once a minute, here for each request. A line feed at its end is not part of it."""
    always = SimpleNamespace(datetime=datetime.datetime, timedelta=lambda **_: datetime.timedelta())
    monkeypatch.setattr(incluster_config, "datetime", always)
    async with fake_release() as found:
        token_file = found.kube.account_folder(ACCOUNT) / "token"
        token = token_file.read_text()
        token_file.write_text(f"{token}\n")
        actuator = found.actuator()
        assert await actuator.sizes() == {"prefill": 1, "decode": 2}
        for content, why in (("", "empty"), ("a\nb", "header")):
            token_file.write_text(content)
            with pytest.raises(ActuatorError, match=f"cannot be reached to GET .*: .*{why}"):
                await actuator.sizes()
        token_file.write_text(f"{token}\n")
        assert await actuator.sizes() == {"prefill": 1, "decode": 2}


async def test_a_client_that_is_closed_is_an_error() -> None:
    async with fake_release() as found:
        actuator = found.actuator()
        await actuator.sizes()
        await found.close()
        with pytest.raises(ActuatorError, match="Session is closed"):
            await actuator.sizes()


async def test_a_missing_right_is_reported_with_the_server_s_message_and_not_retried() -> None:
    async with fake_release(rights=without("deployments/scale")) as found:
        fault = found.kube.order("get", "deployments/scale")
        with pytest.raises(
            ActuatorError, match=r'cannot get resource "deployments/scale".*docs/kubernetes/security\.md'
        ):
            await found.actuator().sizes()
        assert fault.num_met == 0


async def test_pods_that_start_slowly_do_not_change_what_is_told() -> None:
    runtime = PaperRuntime()
    runtime.unready.add("decode")
    async with fake_release(runtime, ready=False) as found:
        actuator = found.actuator()
        await actuator.resize("decode", 3, (), previous_size=2)
        assert await actuator.sizes() == {"prefill": 1, "decode": 3}


# What keeps a pool from growing


async def test_pods_that_no_node_takes_are_a_reason_not_to_order_more() -> None:
    async with fake_release() as found:
        actuator = found.actuator()
        assert await actuator.no_room("decode") is None
        (first, _) = found.kube.pods("decode")
        full = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu."}
        found.kube.store.changed(first, lambda new: new["status"].update(conditions=[full]))
        assert await actuator.no_room("decode") == (
            "no node takes 1 of 2 pods: 0/3 nodes are available: 3 Insufficient gpu."
        )
        assert await actuator.no_room("prefill") is None


async def test_without_the_right_to_list_pods_a_pool_grows_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_release(rights=without("pods")) as found:
        with caplog.at_level(logging.WARNING):
            assert await found.actuator().no_room("decode") is None
        assert "could not look for pending pods" in caplog.text


async def test_pods_are_left_alone_where_marking_is_off(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_release(rights=without("pods")) as found:
        actuator = found.actuator()
        actuator.mark_pods = False
        (first, _) = found.kube.pods("decode")
        with caplog.at_level(logging.WARNING):
            await actuator.resize("decode", 1, [f"{first['status']['podIP']}:50051"], previous_size=2)
            await found.until_ready("decode", 1)
        assert caplog.text == ""
