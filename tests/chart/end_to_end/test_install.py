"""The chart is installed, generates and goes, with a process behind every container."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import SamplingParams
from helm.rendering import CHART, read_values
from tests.chart.end_to_end.conftest import aggregated
from tests.chart.end_to_end.scene import RELEASE, WAIT_S, cluster, install
from tests.chart.fake_kube.workloads import is_ready

pytestmark = pytest.mark.timeout(600)


async def test_a_release_generates_and_leaves_nothing(checkpoint: Path) -> None:
    prompt = read_values(CHART / "values.yaml")["test"]["prompt"]
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    [expected] = aggregated(checkpoint).generate([prompt], greedy, use_tqdm=False)
    async with cluster(old=checkpoint) as release:
        await install(release, CHART, "old")
        assert [is_ready(pod) for pod in release.pods()] == [True] * 3
        assert len(release.kube.processes.left) >= 3
        told = await release.helm.test(RELEASE, timeout_s=WAIT_S)
        assert expected.outputs[0].text in told["logs"]
        await release.helm.uninstall(RELEASE, timeout_s=WAIT_S)
        await release.assert_nothing_is_left()
        assert len(release.kube.processes.ends) == 3
