"""Pods as processes: what they are given, how they are watched, and that they go."""

from __future__ import annotations

import asyncio
import base64
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.process_kube import ProcessKube
from tests.chart.fake_kube.workloads import is_ready
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

SERVE = "import sys,http.server as s;s.HTTPServer((sys.argv[1],8000),s.SimpleHTTPRequestHandler).serve_forever()"


@pytest.fixture
async def kube() -> AsyncIterator[ProcessKube]:
    async with ProcessKube() as kube:
        yield kube


def pod(script: str, *, name: str = "one", never: bool = False, **fields: Any) -> Object:
    """Its one container runs a script of the shell; `fields` are of the container, and of the pod where it has them."""
    spec: Object = {key: fields.pop(key) for key in ("volumes", "initContainers") if key in fields}
    spec["terminationGracePeriodSeconds"] = fields.pop("grace_s", 30)
    container = {"name": "main", "image": "", "command": ["sh", "-c", script], **fields}
    metadata = {"name": name, "labels": {"app": name}}
    restarts = {"restartPolicy": "Never"} if never else {}
    spec = {"automountServiceAccountToken": False, **spec, **restarts, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def condition(name: str, phase: str) -> Callable[[Any], bool]:
    return lambda store: (store.get("Pod", name).get("status") or {}).get("phase") == phase


async def written(kube: ProcessKube, wanted: Object, phase: str = "Succeeded") -> str:
    """What the pod writes until it ends like that."""
    made = kube.store.create(wanted)
    await kube.until(condition(made["metadata"]["name"], phase))
    return kube.processes.log(made)


def num_restarts(kube: ProcessKube) -> int:
    """Of the pod `one`."""
    statuses = (kube.store.get("Pod", "one").get("status") or {}).get("containerStatuses")
    return int(statuses[0]["restartCount"]) if statuses else 0


async def gone(kube: ProcessKube, name: str = "one") -> None:
    """Deletes the pod, and returns when it is gone."""
    found = kube.store.get("Pod", name)
    reported = {
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": found["spec"]["terminationGracePeriodSeconds"],
    }
    kube.store.changed(found, lambda new: new["metadata"].update(reported))
    await kube.until(lambda store: store.find("Pod", name) is None)


# What it is given


async def test_variables_are_the_specs_and_nothing_of_this_process(
    kube: ProcessKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_LEAKED", "1")
    kube.store.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": _encoded("x")}})
    env = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "AT", "value": "$(POD_IP):1 $(NOBODY)"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu"}}},
    ]
    resources = {"requests": {"cpu": "1500m"}}
    output = await written(kube, pod("env", never=True, env=env, resources=resources))
    address = kube.store.get("Pod", "one")["status"]["podIP"]
    variables = dict(line.split("=", 1) for line in output.splitlines())
    assert (variables["WHO"], variables["KEY"], variables["CORES"]) == ("one", "x", "2")
    assert variables["AT"] == f"{address}:1 $(NOBODY)"
    assert variables["KUBERNETES_SERVICE_PORT"].isdecimal()
    assert "TANDEM_LEAKED" not in variables


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


NOTE_PATH = "metadata.annotations['a/note']"


async def test_paths_below_mounts_lead_to_the_volumes(kube: ProcessKube) -> None:
    kube.store.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "m"},
            "data": {"k": "/models/a and /models-other"},
        }
    )
    kube.store.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": _encoded("x")}})
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": {}}
    kube.store.create(claim)
    (kube.claim_folder("c") / "a").write_text("weights")
    volumes = [
        {"name": "settings", "configMap": {"name": "m", "items": [{"key": "k", "path": "file"}]}},
        {"name": "key", "secret": {"secretName": "s", "defaultMode": 0o400, "items": [{"key": "k", "path": "k2"}]}},
        {"name": "model", "persistentVolumeClaim": {"claimName": "c"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "own", "downwardAPI": {"items": [{"path": "note", "fieldRef": {"fieldPath": NOTE_PATH}}]}},
    ]
    mounts = [
        {"name": "settings", "mountPath": "/etc/settings"},
        {"name": "key", "mountPath": "/etc/key"},
        {"name": "model", "mountPath": "/models"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "own", "mountPath": "/etc/own"},
    ]
    first = {"name": "first", "image": "", "command": ["sh", "-c", "echo before > /tmp/left"], "volumeMounts": mounts}
    script = "cat /models/a /etc/settings/file /etc/key/k2 /tmp/left; stat -c %a /etc/key/k2; cat /etc/own/note; "
    found = pod(f"{script} echo $TMPDIR", never=True, volumes=volumes, volumeMounts=mounts, initContainers=[first])
    found["metadata"]["annotations"] = {"a/note": "of /models\n"}
    output = await written(kube, found)
    assert output.startswith(f"weights{kube.claim_folder('c')}/a and /models-otherx" + "before\n400\n")
    assert f"\nof {kube.claim_folder('c')}\n" in output
    assert output.endswith("/tmp\n")
    assert not Path("/tmp/left").exists()


async def test_an_account_is_there_for_those_who_are_to_have_one(kube: ProcessKube) -> None:
    script = "cat /var/run/secrets/kubernetes.io/serviceaccount/namespace"
    found = pod(script, never=True)
    assert "default" not in await written(kube, found, "Failed")
    found = pod(script, never=True, name="two")
    found["spec"]["automountServiceAccountToken"] = True
    assert await written(kube, found) == "default"


# How it is watched


async def test_who_ends_is_started_again(kube: ProcessKube) -> None:
    made = kube.store.create(pod("echo started; exit 3"))
    await kube.until(lambda _: num_restarts(kube) == 2)
    assert kube.processes.log(made).count("started") >= 2


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
async def test_who_fails_a_probe_that_is_not_readiness_is_started_again(kube: ProcessKube, probe: str) -> None:
    wrong: dict[str, Any] = {probe: {"grpc": {"port": 1}, "periodSeconds": 0.1, "failureThreshold": 2}}
    made = kube.store.create(pod("echo started; sleep 100", **wrong))
    await kube.until(lambda _: num_restarts(kube) == 1)
    await until_written(kube, made, "started")  # by the first or, if that was ended before it wrote, by a later one


async def test_readiness_follows_its_probe(kube: ProcessKube) -> None:
    probe = {"httpGet": {"port": "http", "path": "/flag"}, "periodSeconds": 0.1, "failureThreshold": 1}
    volumes, mounts = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}], [{"name": "v", "mountPath": "/v"}]
    kube.store.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": {}})
    env = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    script = f'cd /v && exec python -c "{SERVE}" $POD_IP'
    ports = [{"name": "http", "containerPort": 8000}]
    found = pod(script, readinessProbe=probe, ports=ports, env=env, volumes=volumes, volumeMounts=mounts)
    kube.store.create(found)
    flag = kube.claim_folder("c") / "flag"
    flag.touch()
    await kube.until(lambda store: is_ready(store.get("Pod", "one")))
    flag.unlink()
    await kube.until(lambda store: not is_ready(store.get("Pod", "one")))
    flag.touch()
    await kube.until(lambda store: is_ready(store.get("Pod", "one")))
    assert num_restarts(kube) == 0


# That it goes


async def test_who_is_told_to_go_hears_pre_stop_first_and_then_sigterm(kube: ProcessKube) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook"]}}}
    script = "(trap '' TERM; sleep 99) & trap 'echo term; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    made = kube.store.create(pod(script, lifecycle=hook))
    await until_written(kube, made, "up")
    await gone(kube)
    assert not kube.processes.left, "with the first process all others go"
    assert kube.processes.log(made) == "up\nhook\nterm\n"
    [end] = kube.processes.ends
    assert (end.pod, end.status) == ("one", 0)


async def until_written(kube: ProcessKube, made: Object, text: str) -> None:
    deadline_s = time.monotonic() + 60
    while text not in kube.processes.log(made):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def test_who_does_not_go_is_killed_with_all_that_it_started(kube: ProcessKube) -> None:
    made = kube.store.create(pod("trap '' TERM; (sleep 99) & echo child $!; wait; sleep 99", grace_s=0.3))
    await until_written(kube, made, "child")
    child = int(kube.processes.log(made).split()[1])
    await gone(kube)
    [end] = kube.processes.ends
    assert end.status == -signal.SIGKILL
    assert end.took_s >= 0.3
    assert not kube.processes.left
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


async def test_a_cluster_that_ends_leaves_no_process() -> None:
    async with ProcessKube() as kube:
        made = kube.store.create(pod("trap '' TERM; (sleep 99) & echo up; sleep 99"))
        await until_written(kube, made, "up")
        await until(lambda: len(kube.processes.left) >= 2)
        left = kube.processes.left
    assert not [pid for pid in left if _runs(pid)]


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
