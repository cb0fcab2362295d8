"""A model changes by a rollout that pauses: each version gets the share that was set, and no answer is of both."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from helm_python import Chart

from engine.identity import weights_digest
from helm.rendering import CHART
from tests.chart.end_to_end.conftest import aggregated
from tests.chart.end_to_end.scene import FULLNAME, RELEASE, WAIT_S, Release, Tide, cluster, values
from tests.chart.end_to_end.test_release import Models, same_questions
from tests.chart.fake_kube.workloads import is_ready
from tests.system.questions import make_questions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_TOKENS = 24
NUM_CLIENTS = 2
"""Of up to two streams: the one new instance has room for all."""
NUM_SHARED = 40
OF_OLD = 0.2
POOLS = ("prefill", "decode")


def values_of(model: str, old: Path) -> dict[str, Any]:
    found = values(model, "none", 2)
    found["router"]["settings"]["picking"] = {"weights_shares": f"{weights_digest(old)[:12]}={OF_OLD}"}
    return found


def pause(release: Release, *, paused: bool) -> None:
    """`kubectl rollout pause`, or `resume`, of both pools."""
    for pool in POOLS:
        found = release.kube.store.get("Deployment", f"{FULLNAME}-{pool}")
        release.kube.store.changed(found, lambda new: new["spec"].update(paused=paused))


async def until_paused(release: Release) -> None:
    """With one new pod in each pool beside all old ones."""
    await release.until(lambda: all(len(release.pods(pool)) == release.size(pool) + 1 for pool in POOLS))
    pause(release, paused=True)
    await release.until(lambda: all(map(is_ready, release.pods())) and len(release.pods("router")) == 1)


async def test_a_canary_gets_its_share_and_no_answer_is_lost_or_mixed(checkpoint: Path, other_checkpoint: Path) -> None:
    questions = make_questions(aggregated(checkpoint), 24, random.Random("canary"), num_tokens=NUM_TOKENS)
    models = Models(questions, same_questions(questions, aggregated(other_checkpoint)))
    async with cluster(old=checkpoint, new=other_checkpoint) as release:
        with Chart.load(CHART) as chart:
            await release.helm.install(chart, RELEASE, values_of("old", checkpoint), timeout_s=WAIT_S)
            async with Tide(release.address, questions, NUM_CLIENTS) as tide:
                new = values_of("new", checkpoint)
                upgrading = asyncio.create_task(release.helm.upgrade(chart, RELEASE, new, timeout_s=WAIT_S))
                # STEP one new pair of three decode instances gets four fifths
                await until_paused(release)
                first = len(tide.outcomes)
                await release.until(lambda: tide.num_answered >= first + NUM_SHARED)
                last = len(tide.outcomes)
                # STEP the rest follows
                pause(release, paused=False)
                await upgrading
                await release.until_settled()
                assert models.of(await tide.next()) == "new"
        served = [models.of(outcome) for outcome in tide.outcomes]
        shared = served[first:last]
        assert 0.5 < shared.count("new") / len(shared) < 1
        assert release.kube.processes.num_restarts == 0
        await release.helm.uninstall(RELEASE, timeout_s=WAIT_S)
        await release.assert_nothing_is_left()
