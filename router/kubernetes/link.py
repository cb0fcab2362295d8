"""The router's way to its cluster: one client, to learn who there is and to ask for other sizes."""

from __future__ import annotations

from router.kubernetes.actuator import KubernetesActuator
from router.kubernetes.cluster import Cluster
from router.kubernetes.election import Election
from router.kubernetes.endpoints import EndpointsMembership
from router.kubernetes.settings import KubernetesSettings


class KubernetesLink:
    """Owns the client; made on the running event loop. `actuator` is None where no workload may be resized."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """Raises SettingsError outside of a pod."""
        self._cluster = Cluster(settings.account_folder, settings.namespace)
        self.actuator: KubernetesActuator | None = None
        if settings.workloads:
            election = Election(self._cluster, settings.lease)
            self.actuator = KubernetesActuator(self._cluster, settings.workloads, election)

    def membership(self, service: str, port: int) -> EndpointsMembership:
        """The pods behind that Service, at that port of theirs."""
        return EndpointsMembership(self._cluster, service, port)

    async def close(self) -> None:
        """Ends what is left of its requests."""
        await self._cluster.close()
