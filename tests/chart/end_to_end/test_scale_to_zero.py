"""KEDA sizes the pools by the routers' scaler, from none to three and back, every pod a process: no request is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from helm_python import Chart

from helm.rendering import CHART
from tests.chart.end_to_end.conftest import aggregated
from tests.chart.end_to_end.scene import RELEASE, WAIT_S, Release, Tide, cluster, values
from tests.chart.fake_kube.keda import Keda
from tests.system.questions import make_questions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_TOKENS = 90
MOST = 3
FLOOD = 12
"""Clients of up to two streams, where an instance runs four at a time."""


def keda_values() -> dict[str, Any]:
    """Windows are short; a request waits for as long as a busy machine takes to start a pod."""
    found = values("old", "external")
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 2}}
    keda = {"enabled": True, "pollingSeconds": 1, "cooldownSeconds": 3, "waitSeconds": WAIT_S, "behavior": behavior}
    found["autoscaling"]["keda"] = keda
    found["autoscaling"]["prefill"] = {"minReplicas": 0, "maxReplicas": 1}
    found["autoscaling"]["decode"] = {"minReplicas": 0, "maxReplicas": MOST}
    return found


async def until_none(release: Release) -> None:
    """Both pools are at 0, their pods have gone, and the router stays ready."""
    await release.until(lambda: release.size("prefill") + release.size("decode") == 0)
    await release.until_settled()


async def test_pools_at_zero_start_for_requests_grow_and_go_and_no_request_is_lost(checkpoint: Path) -> None:
    questions = make_questions(aggregated(checkpoint), 24, random.Random("keda"), num_tokens=NUM_TOKENS)
    async with cluster(old=checkpoint) as release:
        with Chart.load(CHART) as chart:
            await release.helm.install(chart, RELEASE, keda_values(), timeout_s=WAIT_S)
        async with Keda(release.kube):
            # STEP none has asked yet, so that no instance stays
            await until_none(release)
            num_ends = len(release.kube.processes.ends)
            # STEP requests wait for the first pods, and the pool grows to what they need
            async with Tide(release.address, questions, FLOOD) as tide:
                await release.until(lambda: release.size("decode") == MOST)
                await release.until_settled()
                await release.until(lambda: tide.num_answered >= FLOOD)
            for outcome in tide.outcomes:
                outcome.assert_exact()
            # STEP and nothing is left without requests
            await until_none(release)
            assert len(release.kube.processes.ends) >= num_ends + MOST + 1
            # STEP a single request starts it all again
            async with Tide(release.address, questions, 1) as tide:
                (await tide.next()).assert_exact()
        assert release.kube.processes.num_restarts == 0
        await release.helm.uninstall(RELEASE, timeout_s=WAIT_S)
        await release.assert_nothing_is_left()
