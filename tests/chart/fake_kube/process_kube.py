"""A cluster whose pods are processes of this machine: the fake, its process runtime and the Services' addresses."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Self

from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.process_runtime import ProcessRuntime
from tests.chart.fake_kube.services import Services


class ProcessKube(FakeKube):
    """An async context manager, after which no process of it is left."""

    def __init__(self) -> None:
        super().__init__()
        self.processes = ProcessRuntime(self)
        self.runtime = self.processes
        self._claims = tempfile.TemporaryDirectory(prefix="claims-")

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._services = await Services(self.store, self.network).__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._services.__aexit__()
            await super().__aexit__(*error)
        finally:
            await self.processes.close()
            self._claims.cleanup()

    def claim_folder(self, name: str, namespace: str = "default") -> Path:
        """What is on the volume of a claim. It stays as long as the cluster."""
        folder = Path(self._claims.name) / namespace / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def service_addresses(self, namespace: str) -> dict[str, str]:
        """IP by name, of the Services that have one."""
        return self._services.addresses(namespace)
