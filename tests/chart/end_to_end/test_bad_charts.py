"""Charts that are wrong in ways that show only where something runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helm_python import HelmError

from tandem.client.health import READY, health
from tests.chart.end_to_end.scene import FULLNAME, Release, cluster, install
from tests.chart.fake_kube.workloads import is_ready
from tests.chart.test_end_to_end_bad_charts import changed

pytestmark = pytest.mark.timeout(600)

INSTALL_S = 20
STARTUP_PERIOD_S = 5
"""Of the chart's startup probes."""


async def until_alive(release: Release) -> None:
    """Every container answers at its own port that it lives."""
    await release.until(lambda: len(release.pods()) == 3 and all(pod.get("status") for pod in release.pods()))
    for pod in release.pods():
        address = f"{pod['status']['podIP']}:50051"
        while await asyncio.to_thread(health, address, "") != READY:
            await asyncio.sleep(0.1)


async def test_probes_of_the_wrong_port_never_let_a_pod_be_ready(checkpoint: Path, tmp_path: Path) -> None:
    right = '"periodSeconds" 5 .spec.probes }}\n  grpc: {port: {{ '
    changed(tmp_path, "_workload.tpl", right, f"{right}add 1000 ").close()
    async with cluster(old=checkpoint) as release:
        installing = asyncio.create_task(install(release, tmp_path / "tandem", "old", timeout_s=INSTALL_S))
        await until_alive(release)
        await asyncio.sleep(STARTUP_PERIOD_S + 1)
        assert not any(is_ready(pod) for pod in release.pods())
        with pytest.raises(HelmError, match=f"{FULLNAME}-decode not ready"):
            await installing
        assert release.kube.processes.num_restarts == 0
