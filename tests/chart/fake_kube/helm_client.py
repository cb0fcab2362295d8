"""Helm's SDK for tests: its calls block, so each is made on a thread while the fake goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from helm_python import Chart, Config

from tests.chart.fake_kube.cluster import FakeKube

_TIMEOUT_S = 40


class Helm:
    """What a person does with `helm … --wait`, in one namespace. Raises helm_python.HelmError."""

    def __init__(self, kube: FakeKube, namespace: str = "default") -> None:
        self._namespace = namespace
        # The client holds itself back to a few requests a second if nobody says otherwise.
        self._config = Config(
            kubeconfig_content=kube.kubeconfig(namespace), namespace=namespace, qps=1000, burst_limit=1000
        )

    async def install(
        self, chart: Chart, release: str, values: dict[str, Any], *, timeout_s: int = _TIMEOUT_S
    ) -> dict[str, Any]:
        return await asyncio.to_thread(
            self._config.install, chart, release, values, wait="watcher", timeout=timeout_s, create_namespace=True
        )

    async def upgrade(
        self, chart: Chart, release: str, values: dict[str, Any], *, timeout_s: int = _TIMEOUT_S
    ) -> dict[str, Any]:
        return await asyncio.to_thread(self._config.upgrade, chart, release, values, wait="watcher", timeout=timeout_s)

    async def rollback(self, release: str, *, timeout_s: int = _TIMEOUT_S) -> None:
        await asyncio.to_thread(self._config.rollback, release, wait="watcher", timeout=timeout_s)

    async def test(self, release: str, *, timeout_s: int = _TIMEOUT_S) -> dict[str, Any]:
        return await asyncio.to_thread(self._config.test, release, timeout=timeout_s, logs=True)

    async def uninstall(self, release: str, *, timeout_s: int = _TIMEOUT_S) -> dict[str, Any]:
        return await asyncio.to_thread(self._config.uninstall, release, wait="watcher", timeout=timeout_s)
