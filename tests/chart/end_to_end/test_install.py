"""The chart is installed, generates and goes, with a process behind every container."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from engine import SamplingParams
from helm.rendering import CHART, read_values
from tests.chart.end_to_end.conftest import aggregated
from tests.chart.end_to_end.scene import MAX_CONNECTIONS, RELEASE, WAIT_S, Release, cluster, install
from tests.chart.fake_kube.probes import Probe
from tests.chart.fake_kube.workloads import is_ready
from tests.floods.http2 import Connection

pytestmark = pytest.mark.timeout(600)


async def _runs_nothing(_: list[str]) -> int:
    raise AssertionError("the chart's probes run no command")


async def assert_probed_with_its_connections_used_up(release: Release) -> None:
    """Whatever clients do to the router's port, the kubelet gets its answers."""
    (router,) = release.pods("router")
    (container,) = router["spec"]["containers"]
    async with AsyncExitStack() as stack:
        address = f"{router['status']['podIP']}:50051"
        idle = [await stack.enter_async_context(Connection(address)) for _ in range(MAX_CONNECTIONS + 1)]
        await release.until(lambda: not all(one.is_open for one in idle))
        for kind in ("livenessProbe", "readinessProbe"):
            assert await Probe(container[kind], router, _runs_nothing).starts()


async def test_a_release_generates_and_leaves_nothing(checkpoint: Path) -> None:
    prompt = read_values(CHART / "values.yaml")["test"]["prompt"]
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    [expected] = aggregated(checkpoint).generate([prompt], greedy, use_tqdm=False)
    async with cluster(old=checkpoint) as release:
        await install(release, CHART, "old")
        assert [is_ready(pod) for pod in release.pods()] == [True] * 3
        assert len(release.kube.processes.left) >= 3
        await assert_probed_with_its_connections_used_up(release)
        tested = await release.helm.test(RELEASE, timeout_s=WAIT_S)
        assert expected.outputs[0].text in tested["logs"]
        await release.helm.uninstall(RELEASE, timeout_s=WAIT_S)
        await release.assert_nothing_is_left()
        assert len(release.kube.processes.ends) == 3
        assert release.kube.processes.num_restarts == 0
