"""What a container sees of its pod and of the cluster, laid out in a folder of this machine.

A process has no file system and no DNS of its own here. So each volume is a folder, and wherever the pod's spec, its
annotations or a ConfigMap name a path below a mount, or a Service with its port, `View.local` puts the folder or the
Service's address in its place. What a program opens of itself (/dev/shm, /proc) is this machine's;
`TMPDIR` leads it to the pod's own /tmp.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.store import Store

ACCOUNT_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_TMP = "/tmp"
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_SECRET_MODE = 0o644


class Node(Protocol):
    """What pods find in the cluster."""

    store: Store

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every pod."""
        ...

    def account_folder(self, name: str, namespace: str = "default") -> Path:
        """Token, CA and namespace of a service account."""
        ...

    def claim_folder(self, name: str, namespace: str = "default") -> Path:
        """What is on a volume."""
        ...

    def service_addresses(self, namespace: str) -> dict[str, str]:
        """IP by name, of those that have one."""
        ...


class View:
    """One container's, made anew when it starts."""

    def __init__(self, node: Node, pod: Object, container: Object, folder: Path) -> None:
        """`folder`: the pod's own. Volumes are made there at once."""
        self._node = node
        self._pod = pod
        self._container = container
        self._namespace = pod["metadata"]["namespace"]
        self._services = node.service_addresses(self._namespace)
        own = folder / container["name"]
        own.mkdir(exist_ok=True)
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
        self._mounts = self._account_mount()
        mounts = container.get("volumeMounts") or ()
        for mount in mounts:
            place = self._volume(volumes[mount["name"]], folder, own) / mount.get("subPath", "")
            self._mounts[mount["mountPath"].rstrip("/")] = place
        for mount in mounts:
            self._write_texts(volumes[mount["name"]], own / mount["name"])

    def local(self, text: str) -> str:
        """`text` with this machine's paths and addresses, put in at one pass."""
        paths = {path: str(place) for path, place in self._mounts.items()}
        known = [rf"(?<![\w./-]){re.escape(path)}(?![\w.-])" for path in sorted(paths, key=len, reverse=True)]
        known += [rf"(?<![\w.-]){re.escape(name)}(?=:\d)" for name in self._services]
        if not known:
            return text
        return re.sub("|".join(known), lambda found: {**paths, **self._services}[found[0]], text)

    def argv(self) -> list[str]:
        """Command and arguments."""
        environment = self.environment()
        words = [*self._container["command"], *(self._container.get("args") or ())]
        return [self.local(_expanded(word, environment)) for word in words]

    def environment(self) -> dict[str, str]:
        """The cluster's variables and the container's own, nothing of this process's."""
        told = dict(self._node.environment)
        if _TMP in self._mounts:
            told["TMPDIR"] = str(self._mounts[_TMP])
        for variable in self._container.get("env") or ():
            if "valueFrom" in variable:
                told[variable["name"]] = self._told(variable["valueFrom"])
            else:
                told[variable["name"]] = self.local(_expanded(variable.get("value", ""), told))
        return told

    def _told(self, source: Object) -> str:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            which, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            return _amount(str(self._container["resources"][which][resource]))
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            secret = self._node.store.get("Secret", reference["name"], self._namespace)
            return base64.b64decode(secret["data"][reference["key"]]).decode()
        reference = source["configMapKeyRef"]
        found = self._node.store.get("ConfigMap", reference["name"], self._namespace)
        return str(found["data"][reference["key"]])

    def _field(self, path: str) -> str:
        """Of the pod: status.podIP, metadata.annotations['NAME']."""
        place, _, key = path.partition("['")
        found: Any = self._pod
        for part in place.split("."):
            found = found[part]
        return str(found[key.removesuffix("']")] if key else found)

    def _account_mount(self) -> dict[str, Path]:
        spec = self._pod["spec"]
        if not spec.get("automountServiceAccountToken", True):
            return {}
        return {ACCOUNT_MOUNT: self._node.account_folder(spec.get("serviceAccountName", "default"), self._namespace)}

    def _volume(self, volume: Object, folder: Path, own: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            return self._node.claim_folder(volume["persistentVolumeClaim"]["claimName"], self._namespace)
        place = (folder if "emptyDir" in volume else own) / volume["name"]
        place.mkdir(exist_ok=True)
        if "secret" in volume:
            self._write_secret(volume["secret"], place)
        elif not {"emptyDir", "configMap", "downwardAPI"} & volume.keys():
            raise NotImplementedError(f"no such volume here: {volume}")
        return place

    def _write_texts(self, volume: Object, place: Path) -> None:
        """The files of a ConfigMap or of the downward API; of other volumes nothing."""
        texts: dict[str, str] = {}
        if "configMap" in volume:
            source = volume["configMap"]
            texts = _files(source, self._node.store.get("ConfigMap", source["name"], self._namespace))
        elif "downwardAPI" in volume:
            items = volume["downwardAPI"]["items"]
            texts = {item["path"]: self._field(item["fieldRef"]["fieldPath"]) for item in items}
        for name, text in texts.items():
            (place / name).write_text(self.local(text))

    def _write_secret(self, source: Object, place: Path) -> None:
        found = self._node.store.find("Secret", source["secretName"], self._namespace)
        if found is None:
            assert source.get("optional"), "the kubelet waits for the others"
            return
        for name, value in _files(source, found).items():
            file = place / name
            file.unlink(missing_ok=True)  # an older one may be read-only
            file.write_bytes(base64.b64decode(value))
            file.chmod(source.get("defaultMode", _SECRET_MODE))


def _files(source: Object, found: Object) -> dict[str, str]:
    """Contents by name: all of a ConfigMap or Secret, or those that the volume lists."""
    data = found.get("data") or {}
    if "items" not in source:
        return dict(data)
    return {item["path"]: data[item["key"]] for item in source["items"]}


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes does it: what is not known stays."""
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)


def _amount(quantity: str) -> str:
    """Of a resource in whole units, rounded up; a divisor of 1."""
    return str(-(-int(quantity[:-1]) // 1000) if quantity.endswith("m") else int(quantity))
