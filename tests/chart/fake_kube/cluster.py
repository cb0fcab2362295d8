"""The fake as a whole: server, controllers and kubelet on the running event loop, and what clients need to reach it."""

from __future__ import annotations

import asyncio
import base64
import secrets
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml

from tandem.local_stack.pki import StackCa
from tests.certificates import files_of
from tests.chart.fake_kube.addresses import Network
from tests.chart.fake_kube.controllers import Controllers
from tests.chart.fake_kube.faults import Fault
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import Kubelet, PaperRuntime, Runtime
from tests.chart.fake_kube.rights import ADMIN, account
from tests.chart.fake_kube.server import ApiServer
from tests.chart.fake_kube.store import Store

TIMEOUT_S = 60.0


class FakeKube:
    """An async context manager. Its store may be read and written directly: nobody asks a test for its rights."""

    def __init__(self, runtime: Runtime | None = None, *, minor: str = "37") -> None:
        """`runtime` runs the pods; by default nothing does, and they say that they are ready."""
        self.store = Store()
        self.runtime = runtime or PaperRuntime()
        self._admin_token = secrets.token_hex(16)
        self._users = {self._admin_token: ADMIN}
        self._server = ApiServer(self.store, self._users, minor, self._log_of)
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fake-kube-")
        self._port = 0
        for namespace in ("default", "kube-system"):
            metadata = {"name": namespace}
            self.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}, None)

    async def __aenter__(self) -> Self:
        self._files = files_of(Path(self._folder.name), "kubernetes", StackCa("Fake Kubernetes"))
        self.network = Network()
        await self.come_back()
        running = (Controllers(self.store).run(), Kubelet(self.store, self.runtime, self.network).run())
        self._tasks = [asyncio.create_task(one) for one in running]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()
        self.network.close()
        self._folder.cleanup()
        for result in results:
            if isinstance(result, Exception):
                raise result

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every pod."""
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self._port)}

    @property
    def requests(self) -> list[tuple[str, str, str, str]]:
        """(user, verb, resource, name) of all that were let in, in their order."""
        return self._server.requests

    @property
    def num_watches(self) -> int:
        """Those that are open."""
        return self._server.num_watches

    async def go_away(self) -> None:
        """The server, not the pods: nobody listens any more, and nothing that was asked is answered."""
        await self._server.stop()

    async def come_back(self) -> None:
        """At the same address."""
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self._files.certificate, self._files.key)
        self._port = await self._server.start(tls, self._port)

    def drop_watches(self) -> None:
        """Breaks every watcher's connection."""
        self._server.drop_watches()

    def order(self, verb: str, resource: str, code: int | None = None, **fields: Any) -> Fault:
        """The next such request meets a fault."""
        return self._server.faults.order(Fault(verb, resource, code, **fields))

    def withdraw(self, fault: Fault) -> None:
        """That one is over."""
        self._server.faults.withdraw(fault)

    def account_folder(self, name: str, namespace: str = "default") -> Path:
        """What a pod of that service account finds mounted: its token, the CA and the namespace."""
        folder = Path(self._folder.name) / namespace / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "ca.crt").write_bytes(self._files.ca.read_bytes())
            (folder / "namespace").write_text(namespace)
            self.renew_token(name, namespace)
        return folder

    def renew_token(self, name: str, namespace: str = "default") -> None:
        """The old one is no longer taken, as when it has expired."""
        user, token = account(namespace, name), secrets.token_hex(16)
        for old in [old for old, its in self._users.items() if its == user]:
            del self._users[old]
        self._users[token] = user
        (Path(self._folder.name) / namespace / name / "token").write_text(token)

    def kubeconfig(self, namespace: str = "default") -> str:
        """Of somebody who may do everything, as YAML."""
        authority = base64.b64encode(self._files.ca.read_bytes()).decode()
        server = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority-data": authority}
        context = {"cluster": "fake", "user": "admin", "namespace": namespace}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "fake", "cluster": server}],
                "users": [{"name": "admin", "user": {"token": self._admin_token}}],
                "contexts": [{"name": "fake", "context": context}],
                "current-context": "fake",
            }
        )

    def _log_of(self, pod: Object) -> str:
        return self.runtime.log(pod)

    async def until(self, condition: Callable[[Store], object]) -> None:
        """Returns when the store meets `condition`. Raises what has gone wrong in the cluster meanwhile."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(self.store):
                news = asyncio.create_task(self.store.wait(self.store.revision))
                await asyncio.wait((news, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                for task in self._tasks:
                    if task.done():
                        task.result()

    def pods(self, prefix: str = "", namespace: str = "default") -> list[Object]:
        """Those whose name begins like this, and that are not on their way out."""
        return [
            pod
            for pod in self.store.all("Pod", namespace)
            if pod["metadata"]["name"].startswith(prefix) and "deletionTimestamp" not in pod["metadata"]
        ]
