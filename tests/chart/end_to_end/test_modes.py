"""Who sizes the pools changes under load, every pod a process: sizes stay or become the chart's, no request is lost."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from helm_python import Chart

from helm.rendering import CHART
from tests.chart.end_to_end.conftest import aggregated
from tests.chart.end_to_end.scene import FULLNAME, RELEASE, WAIT_S, Release, Tide, cluster, there, values
from tests.chart.test_sizes import Sizes
from tests.system.questions import make_questions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 60
NUM_CLIENTS = 3
OF_CHART, OF_OTHERS = 2, 3
"""Decode instances: what the chart writes in mode `none`, and what the router or another controller wants."""
ROLLBACK = None
WALK = (
    *("builtin", ROLLBACK, "external", ROLLBACK, ROLLBACK, "builtin"),
    *(ROLLBACK, ROLLBACK, "none", ROLLBACK, "external", "none"),
)
"""From `none`: every ordered pair of modes once by an upgrade and once by a rollback."""


def values_of(mode: str) -> dict[str, Any]:
    found = values("old", mode, OF_CHART)
    found["autoscaling"]["decode"] = {"minReplicas": OF_OTHERS, "maxReplicas": OF_OTHERS}
    return found


class Modes:
    """The release, its mode now and the mode before, and the changes so far."""

    def __init__(self, release: Release, chart: Chart) -> None:
        self._release = release
        self._chart = chart
        self._scaler = Sizes(release.kube)
        self._before, self._now = "", "none"
        self.done: list[tuple[str, str, str]] = []
        """(upgrade or rollback, from, to)"""

    async def change(self, mode: str | None) -> None:
        """An upgrade to that mode, or a rollback. Decode never has another size than the old or the new one."""
        store = self._release.kube.store
        size, revision = self._release.size("decode"), store.revision
        if mode is ROLLBACK:
            mode = self._before
            await self._release.helm.rollback(RELEASE, timeout_s=WAIT_S)
            self.done.append(("rollback", self._now, mode))
        else:
            await self._release.helm.upgrade(self._chart, RELEASE, values_of(mode), timeout_s=WAIT_S)
            self.done.append(("upgrade", self._now, mode))
        self._before, self._now = self._now, mode
        if mode == "external":
            assert self._release.size("decode") == size
            await self._scaler.scale({"decode": OF_OTHERS})
        wanted = OF_CHART if mode == "none" else OF_OTHERS
        await self._release.until(lambda: self._release.size("decode") == wanted)
        await self._release.until_settled()
        assert {size, *self._sizes_since(revision)} == {size, wanted}, self.done[-1]

    def _sizes_since(self, revision: int) -> set[int]:
        return {
            event.object["spec"]["replicas"]
            for event in self._release.kube.store.since(revision)
            if event.object["metadata"]["name"] == f"{FULLNAME}-decode" and event.kind.kind == "Deployment"
        }


async def test_every_change_of_mode_and_its_rollback_keep_the_sizes_and_lose_no_request(checkpoint: Path) -> None:
    questions = make_questions(aggregated(checkpoint), 24, random.Random("modes"), num_tokens=NUM_TOKENS)
    async with cluster(old=checkpoint) as release:
        with Chart.load(CHART) as chart:
            modes = Modes(release, chart)
            release.before = there(release.kube)
            await release.helm.install(chart, RELEASE, values_of("none"), timeout_s=WAIT_S)
            async with Tide(release.address, questions, NUM_CLIENTS) as tide:
                for mode in WALK:
                    await modes.change(mode)
                    await tide.next()
        pairs = itertools.permutations(("none", "builtin", "external"), 2)
        assert sorted(modes.done) == sorted((how, *pair) for pair in pairs for how in ("rollback", "upgrade"))
        for outcome in tide.outcomes:
            outcome.assert_exact()
        assert release.kube.processes.num_restarts == 0
        print(f"\n{len(modes.done)} changes, {len(tide.outcomes)} requests")
        await release.helm.uninstall(RELEASE, timeout_s=WAIT_S)
        await release.assert_nothing_is_left()
