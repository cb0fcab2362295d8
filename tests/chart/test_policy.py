"""What a platform team checks before it lets a chart in: restricted pods, pinned images, probes, quoting, secrets."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from helm.rendering import CHART, ci_files, read_values, render
from kv_transfer.stores.redis.address import RedisAddress
from protos.tandem.v1 import decode_pb2, generation_pb2, prefill_pb2
from router.pools.discovery import parse_targets
from tests.chart.rendered import (
    ASKING,
    COMPONENTS,
    NAMES,
    Pod,
    component_of,
    deployment,
    manifests,
    of_kind,
    pods,
    released,
)
from tests.chart.started import Read

ADDED_CAPABILITIES = {"nixl-redis": {"IPC_LOCK"}, "everything": {"IPC_LOCK"}, "rdma": {"IPC_LOCK"}}
"""By ci/ file or example: what it asks for beside the restricted profile."""
CLUSTERS_USER = {"everything", "openshift"}
"""Those that leave the user to the cluster, as OpenShift wants it."""
FIXED_SIZES = {
    "everything": {"prefill": 2, "decode": 4},
    "hub": {"prefill": 4, "decode": 2},
    "null": {"prefill": 0, "decode": 2},
}
"""By ci/ file: what it gives."""
OTHER_VOLUMES = {"oci": {"image"}}
"""By ci/ file: kinds of volumes that older versions of the restricted profile do not name."""
PINNED = re.compile(r".+(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})")
RESTRICTED_VOLUMES = {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "secret"}
READY = {
    "router": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    "prefill": prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    "decode": decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
}


@pytest.mark.parametrize("name", NAMES)
def test_pods_meet_the_restricted_profile(name: str) -> None:
    for pod in pods(manifests(name)):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (context.get("runAsUser", 0) > 0) is (name not in CLUSTERS_USER)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= RESTRICTED_VOLUMES | OTHER_VOLUMES.get(name, set())
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            assert set(own["capabilities"].get("add", [])) <= ADDED_CAPABILITIES.get(name, set())
            assert not {"privileged", "procMount", "runAsUser"} & own.keys()


@pytest.mark.parametrize("name", NAMES)
def test_root_is_read_only_and_what_is_written_to_is_mounted(name: str) -> None:
    for pod in pods(manifests(name)):
        for container in pod.containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
            assert "/tmp" in writable
            names = {variable["name"] for variable in container.get("env", [])}
            assert ("TRITON_CACHE_DIR" in names) == ("NUMBA_CACHE_DIR" in names), "it would write into HOME"
            for variable in container.get("env", []):
                if variable["name"] in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME"):
                    assert any(f"{variable['value']}/".startswith(f"{path}/") for path in writable), variable


@pytest.mark.parametrize("name", NAMES)
def test_images_are_pinned_and_memory_is_bounded(name: str) -> None:
    for pod in pods(manifests(name)):
        for container in pod.containers:
            assert PINNED.fullmatch(container["image"]), container["image"]
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        for volume in pod.spec["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}) or volume["name"] in ("extra", "rdma")


def test_a_digest_pins_each_image() -> None:
    digest = f"sha256:{'5' * 64}"
    pinned = {"image": {"digest": digest}, "connector": {"name": "redis", "redis": {"digest": digest}}}
    images = {one["image"] for pod in pods(render(pinned)) for one in pod.containers}
    assert images == {f"tandem@{digest}", f"docker.io/library/redis:7.4.6-alpine@{digest}"}


@pytest.mark.parametrize("name", NAMES)
def test_probes_distinguish_liveness_from_readiness(name: str) -> None:
    for component in COMPONENTS:
        container = deployment(manifests(name), component)["spec"]["template"]["spec"]["containers"][0]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        probes = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
        assert ports["health"] != ports["grpc"]
        assert probes["startup"] == probes["liveness"] == {"port": ports["health"], "service": ""}
        assert probes["readiness"] == {"port": ports["health"], "service": READY[component]}


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_may_take_as_long_as_its_pods(name: str) -> None:
    """Or `helm --wait` would call a loading release failed; a router waits for decode instances."""
    values = {**read_values(CHART / "values.yaml")["model"], **read_values(ci_files()[name]).get("model", {})}
    download_s = 1800 if values["source"] == "hub" else 0
    deadlines = {}
    for component in COMPONENTS:
        spec = deployment(manifests(name), component)["spec"]
        probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
        deadlines[component] = spec["progressDeadlineSeconds"]
        if component != "router":
            assert probe["periodSeconds"] * probe["failureThreshold"] == values["startupSeconds"]
            assert deadlines[component] >= values["startupSeconds"] + download_s + 300
    assert deadlines["router"] > max(deadlines["prefill"], deadlines["decode"])


@pytest.mark.parametrize("name", NAMES)
def test_labels_and_annotations_are_text(name: str) -> None:
    """A release called `on`, a team called `on` and a number as a cost centre are all here."""
    maps = [found for one in manifests(name) for found in _maps(one)]
    assert maps
    for found in maps:
        assert all(isinstance(value, str) for value in found.values()), found
    assert len({one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in _own(name)}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_written_where_values_name_them_and_no_autoscaler_does(name: str) -> None:
    for component in ("prefill", "decode"):
        found = deployment(manifests(name), component)
        assert found["spec"].get("replicas") == FIXED_SIZES.get(name, {}).get(component)
        assert found["metadata"]["annotations"]["tandem/sized-by"] == str(found["spec"].get("replicas", "others"))
    assert "replicas" in deployment(manifests(name), "router")["spec"]


@pytest.mark.parametrize("name", NAMES)
def test_no_pod_holds_a_token_without_need(name: str) -> None:
    for pod in pods(manifests(name)):
        component = component_of(pod.owner)
        needs_one = component == "sizes" or (name in ASKING and component == "router")
        assert pod.spec["automountServiceAccountToken"] is needs_one
        assert pod.spec["enableServiceLinks"] is False


@pytest.mark.parametrize("name", NAMES)
def test_files_of_secrets_are_replaced_under_running_pods(name: str) -> None:
    """The kubelet does not replace what is mounted by subPath, nor a variable."""
    for pod in pods(manifests(name)):
        secrets = {volume["name"] for volume in pod.spec["volumes"] if "secret" in volume}
        mounts = [mount for one in pod.containers for mount in one["volumeMounts"] if mount["name"] in secrets]
        assert {mount["name"] for mount in mounts} == secrets
        assert all(mount["readOnly"] and not {"subPath", "subPathExpr"} & mount.keys() for mount in mounts)


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_is_in_an_argument_a_variable_or_a_config_map(name: str) -> None:
    made = [value for one in of_kind(manifests(name), "Secret") for value in one["data"].values()]
    rest = json.dumps([one for one in manifests(name) if one["kind"] != "Secret"])
    for value in made:
        assert value not in rest
        assert base64.b64decode(value).hex() not in rest
    for pod in pods(manifests(name)):
        for variable in (one for container in pod.containers for one in container.get("env", [])):
            if re.search("TOKEN|PASSWORD|SECRET|KEY", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"]


def test_secrets_are_random_and_as_long_as_they_must_be() -> None:
    def drawn() -> dict[str, bytes]:
        secrets = of_kind(render({"connector": {"name": "redis"}}), "Secret")
        return {key: base64.b64decode(value) for one in secrets for key, value in one["data"].items()}

    first, second = drawn(), drawn()
    assert len(first["key"]) == 32
    assert re.fullmatch(b"[A-Za-z0-9]{32}", first["password"])
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize("name", NAMES)
def test_selectors_find_their_component_and_no_other(name: str) -> None:
    labels = {component_of(pod.owner): pod.metadata["labels"] for pod in pods(manifests(name))}
    selecting = {
        "Service": lambda one: one["spec"]["selector"],
        "Deployment": lambda one: one["spec"]["selector"]["matchLabels"],
        "PodDisruptionBudget": lambda one: one["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": lambda one: one["spec"]["podSelector"]["matchLabels"],
    }
    for one in (one for one in manifests(name) if one["kind"] in selecting):
        selector = selecting[one["kind"]](one)
        found = [component for component, own in labels.items() if selector.items() <= own.items()]
        assert found == [component_of(one)]


def test_a_pools_name_leads_to_ready_pods_alone() -> None:
    """A draining pod is out of the DNS; the router watches it to its end all the same (docs/membership.md)."""
    headless = [one["spec"] for one in of_kind(manifests("default"), "Service") if "clusterIP" in one["spec"]]
    assert [one["publishNotReadyAddresses"] for one in headless] == [False] * 3


def test_what_took_long_to_come_outlives_the_release() -> None:
    for name in ("shared-storage", "hub"):
        (claim,) = of_kind(manifests(name), "PersistentVolumeClaim")
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_referred_to_is_there(name: str) -> None:
    """An object of the release's own name has to be made; others are the user's."""
    objects = manifests(name)
    made = {(one["kind"], one["metadata"]["name"]) for one in objects}
    made |= {("Secret", one["spec"]["secretName"]) for one in of_kind(objects, "Certificate")}
    prefix = deployment(objects, "router")["metadata"]["name"].removesuffix("router")
    for pod in pods(objects):
        for reference in _references(pod):
            assert reference in made or not reference[1].startswith(prefix), reference


def test_further_objects_are_templates() -> None:
    (extra,) = (one for one in manifests("everything") if one["metadata"]["name"] == "on-extra")
    assert extra["data"] == {"made": "for big"}


def test_pools_differ_in_their_names_alone() -> None:
    prefill, decode = (deployment(manifests("default"), role) for role in ("prefill", "decode"))
    text = json.dumps(prefill).replace("PrefillService", "DecodeService").replace("prefill", "decode")
    assert json.loads(text) == decode


@pytest.mark.parametrize("name", [name for name in NAMES if "nixl" in name or name == "default"])
def test_network_policy_opens_the_ports_that_ucx_listens_on(name: str) -> None:
    objects = manifests(name)
    for component in ("prefill", "decode"):
        (policy,) = (one for one in of_kind(objects, "NetworkPolicy") if component_of(one) == component)
        (ports,) = (port for rule in policy["spec"]["ingress"] for port in rule["ports"] if "endPort" in port)
        env = deployment(objects, component)["spec"]["template"]["spec"]["containers"][0]["env"]
        (given,) = (one["value"] for one in env if one["name"] == "UCX_TCP_PORT_RANGE")
        assert given == f"{ports['port']}-{ports['endPort']}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bare"])
def test_only_routers_and_instances_reach_an_instance(name: str) -> None:
    for policy in of_kind(manifests(name), "NetworkPolicy"):
        if component_of(policy) == "router":
            continue
        for rule in policy["spec"].get("ingress", []):
            if rule["ports"] == [{"protocol": "TCP", "port": 9100 if name == "everything" else 9090}]:
                continue
            peers = [one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in rule["from"]]
            assert peers
            assert set(peers) <= set(COMPONENTS)


def test_a_label_of_a_pod_goes_before_one_of_all() -> None:
    values = {"commonLabels": {"team": "all", "a": 1}, "router": {"podLabels": {"team": "routers"}}}
    values["metrics"] = {"monitor": {"kind": "PodMonitor", "labels": {"team": "monitors"}}}
    objects = render(values)
    assert deployment(objects, "router")["spec"]["template"]["metadata"]["labels"].items() >= {
        ("team", "routers"),
        ("a", "1"),
    }
    assert of_kind(objects, "PodMonitor")[0]["metadata"]["labels"]["team"] == "monitors"
    assert deployment(objects, "decode")["spec"]["template"]["metadata"]["labels"]["team"] == "all"


def test_a_key_that_is_there_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the renders here would hide what an API server refuses."""
    monkeypatch.setattr("helm.rendering.render_text", lambda *_, **__: {"a.yaml": "a: 1\nb: 2\na: 3\n"})
    with pytest.raises(ValueError, match="'a' is there twice, in lines 1 and 3"):
        render({})


COLLECTOR = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}]
RESTRICTED: dict[str, Any] = {
    "connector": {"name": "nixl,redis"},
    "discovery": "endpoints",
    "networkPolicy": {
        "restrictEgress": True,
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "ports": [{"protocol": "TCP", "port": 6443}]}],
    },
    "tracing": {"otlp": "otel-collector.observability:4317", "peers": COLLECTOR},
}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_restricted_pod_reaches_what_its_settings_name_and_nothing_else(component: str, read: Read) -> None:
    """The names that its settings have are those of Services; rules have the pods behind these."""
    objects = render(RESTRICTED, release="on")
    settings, _ = read(objects, component)
    (policy,) = (one for one in of_kind(objects, "NetworkPolicy") if component_of(one) == component)
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    rules = policy["spec"]["egress"]
    dns, *others = rules
    assert {(one["protocol"], one["port"]) for one in dns["ports"]} == {
        (protocol, port) for protocol in ("UDP", "TCP") for port in (53, 5353)
    }
    if component == "router":
        targets = [settings.pools.prefill, settings.pools.decode, settings.signals.routers]
        named = {(one.host, one.port) for target in targets for one in parse_targets(target)}
    else:
        store = RedisAddress.parse(settings.transfer.url).hosts
        named = {*store, *((f"on-tandem-{pool}", settings.server.port) for pool in ("prefill", "decode"))}
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    called = {(component_of(services[name]), port) for name, port in named}
    reached = set()
    for rule in others:
        peers = [one["podSelector"]["matchLabels"] for one in rule["to"] if "podSelector" in one]
        ports = {one["port"] for one in rule.get("ports", ())}
        for service in services.values():
            if service["spec"]["selector"] in peers:
                offered = {port["port"] for port in service["spec"]["ports"]}
                reached |= {(component_of(service), port) for port in ports or offered}
    assert called <= reached
    assert {peer for peer, _ in reached} == {"prefill", "decode", "router" if component == "router" else "redis"}
    beyond = [one for one in others if not any("podSelector" in peer for peer in one["to"])]
    assert beyond == [
        {"to": COLLECTOR, "ports": [{"protocol": "TCP", "port": 4317}]},
        *RESTRICTED["networkPolicy"]["egress"],
    ]


def test_a_restricted_redis_calls_none() -> None:
    (policy,) = (one for one in of_kind(render(RESTRICTED), "NetworkPolicy") if component_of(one) == "redis")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy["spec"]


def test_operators_reach_an_admin_listener_that_is_no_loopback_and_others_do_not() -> None:
    team = [{"podSelector": {"matchLabels": {"team": "platform"}}}]
    for listen, peers, opened in (
        ("$(POD_IP):50052", team, [team]),
        ("127.0.0.1:50052", team, []),
        ("$(POD_IP):50052", [], []),
    ):
        objects = render({"router": {"adminListen": listen}, "networkPolicy": {"operators": peers}})
        (policy,) = (one for one in of_kind(objects, "NetworkPolicy") if component_of(one) == "router")
        rules = [one for one in policy["spec"]["ingress"] if {"protocol": "TCP", "port": 50052} in one["ports"]]
        assert [one["from"] for one in rules] == opened


def test_a_volume_of_pages_and_their_key_are_kept_together() -> None:
    for name, is_kept in (("shared-storage", True), ("default", False)):
        (key,) = of_kind(manifests(name), "Secret")
        assert ("helm.sh/resource-policy" in key["metadata"].get("annotations", {})) is is_kept


@pytest.mark.parametrize("name", NAMES)
def test_no_empty_dir_keeps_a_node(name: str) -> None:
    for pod in pods(manifests(name)):
        if pod.owner["kind"] == "Deployment":
            local = {one["name"] for one in pod.spec["volumes"] if "emptyDir" in one} - {"extra", "rdma"}
            safe = pod.metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"]
            assert local <= set(safe.split(","))


def test_everything_that_runs_is_placed_and_a_download_gets_through_a_proxy() -> None:
    objects = manifests("corporate")
    for pod in pods(objects):
        assert pod.spec["nodeSelector"] == {"pool": "llm"}
        assert pod.spec["tolerations"] == [{"key": "llm", "operator": "Exists"}]
    spec = deployment(objects, "decode")["spec"]["template"]["spec"]
    assert spec["schedulerName"] == "volcano"
    assert [one["name"] for one in spec["initContainers"]] == ["model", "prepare"]
    assert spec["initContainers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    assert deployment(objects, "redis")["spec"]["template"]["spec"]["priorityClassName"] == "high"
    assert [one["name"] for one in spec["containers"]] == ["decode", "logs"]
    download = {one["name"]: one["value"] for one in spec["initContainers"][0]["env"]}
    assert download["HTTPS_PROXY"] == "http://proxy.example.com:3128"
    mounted = {one["mountPath"] for one in spec["initContainers"][0]["volumeMounts"]}
    assert {download["SSL_CERT_FILE"], download["REQUESTS_CA_BUNDLE"]} == {"/etc/tandem/hub-ca/ca.crt"}
    assert "/etc/tandem/hub-ca" in mounted
    (service,) = (one for one in of_kind(objects, "Service") if one["spec"]["type"] == "LoadBalancer")
    assert service["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8", "fd00::/8"]
    router = deployment(objects, "router")["spec"]["template"]["spec"]
    assert router["containers"][0]["envFrom"] == [{"configMapRef": {"name": "proxy"}}]
    assert router["dnsConfig"] == {"options": [{"name": "ndots", "value": "2"}]}
    assert not {"Role", "RoleBinding"} & {one["kind"] for one in objects}


def test_a_variable_of_ucx_may_be_zero() -> None:
    env = deployment(render({"connector": {"nixl": {"ucxEnv": {"UCX_IB_GID_INDEX": 0}}}}), "decode")
    variables = env["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "UCX_IB_GID_INDEX", "value": "0"} in variables


def test_times_of_probes_are_the_users_where_given_and_a_start_takes_as_long_as_before() -> None:
    slow = {"startup": {"periodSeconds": 20}, "liveness": {"failureThreshold": 9}, "readiness": {"timeoutSeconds": 7}}
    objects = render(
        {"instance": {"probes": slow}, "pools": {"decode": {"probes": {"liveness": {"timeoutSeconds": 8}}}}}
    )
    probes = deployment(objects, "decode")["spec"]["template"]["spec"]["containers"][0]
    startup, liveness, readiness = (probes[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
    assert (startup["periodSeconds"], startup["failureThreshold"]) == (20, 45)
    assert (liveness["periodSeconds"], liveness["failureThreshold"], liveness["timeoutSeconds"]) == (10, 9, 8)
    assert (readiness["timeoutSeconds"], readiness["grpc"]["service"]) == (7, READY["decode"])
    router = deployment(objects, "router")["spec"]["template"]["spec"]["containers"][0]
    assert router["livenessProbe"]["failureThreshold"] == 3


def test_an_instance_reports_the_domain_of_its_pod_or_of_its_pool(read: Read) -> None:
    label = {"instance": {"domainLabel": "topology.kubernetes.io/zone"}, "pools": {"decode": {"domain": "rack-1"}}}
    found = {}
    for role in ("prefill", "decode"):
        container = deployment(render(label), role)["spec"]["template"]["spec"]["containers"][0]
        (found[role],) = (one for one in container["env"] if one["name"] == "TANDEM_INSTANCE__DOMAIN")
    assert found["decode"]["value"] == "rack-1"
    assert read(render(label), "decode")[0].instance.domain == "rack-1"
    path = "metadata.labels['topology.kubernetes.io/zone']"
    assert found["prefill"]["valueFrom"] == {"fieldRef": {"fieldPath": path}}


def test_accounts_have_annotations_of_their_own() -> None:
    annotations = {
        "annotations": {"both": "1"},
        "routerAnnotations": {"role": "r"},
        "instanceAnnotations": {"both": "2"},
    }
    objects = released(render({"serviceAccount": annotations}))
    found = {component_of(one): one["metadata"]["annotations"] for one in of_kind(objects, "ServiceAccount")}
    assert found == {"router": {"both": "1", "role": "r"}, "instance": {"both": "2"}}


def test_with_ipv6_alone_services_have_its_addresses() -> None:
    values: dict[str, Any] = {"connector": {"name": "redis"}, "router": {"adminListen": "[::1]:50052"}}
    values |= {"networkPolicy": {"operators": [{"podSelector": {}}]}}
    for families, policy in ((["IPv6"], "SingleStack"), (["IPv6", "IPv4"], "RequireDualStack")):
        objects = render({**values, "ipFamilies": families})
        services = [one["spec"] for one in of_kind(objects, "Service")]
        assert len(services) == 5
        found = [(one["ipFamilies"], one["ipFamilyPolicy"]) for one in services if "ipFamilies" in one]
        assert found == [(families, policy)] * (5 if len(families) == 1 else 1)
    policies = of_kind(objects, "NetworkPolicy")
    (policy_of_router,) = (one for one in policies if component_of(one) == "router")
    ports = [port["port"] for rule in policy_of_router["spec"]["ingress"] for port in rule["ports"]]
    assert ports == [50051, 50054, 9090]


def test_with_two_families_a_pod_is_found_at_the_one_address_that_it_listens_at() -> None:
    """Another one would be an instance that is lost, and a router that never answers. Only clients have both."""
    values = {"connector": {"name": "redis"}, "ipFamilies": ["IPv4", "IPv6"]}
    values |= {"autoscaling": {"mode": "external", "keda": {"enabled": True}}}
    services = [one["spec"] for one in of_kind(render(values), "Service")]
    others = [one for one in services if "ipFamilies" not in one]
    assert sum(one.get("clusterIP") == "None" for one in others) == 3
    assert [one["ipFamilyPolicy"] for one in others] == ["SingleStack"] * (len(services) - 1)


def _own(name: str) -> list[dict[str, Any]]:
    return [one for one in manifests(name) if "labels" in one["metadata"]]


def _maps(value: Any) -> Iterator[dict[str, Any]]:
    """Every map of labels, annotations or node labels."""
    if isinstance(value, list):
        for item in value:
            yield from _maps(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("labels", "annotations", "matchLabels", "nodeSelector") and isinstance(item, dict):
                yield item
            else:
                yield from _maps(item)


def _references(pod: Pod) -> Iterator[tuple[str, str]]:
    if "serviceAccountName" in pod.spec:
        yield "ServiceAccount", pod.spec["serviceAccountName"]
    for volume in pod.spec["volumes"]:
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        elif "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        elif "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]


def test_these_checks_see_a_wrong_pod() -> None:
    """The maps and references above are really looked into."""
    wrong = copy.deepcopy(deployment(manifests("secure"), "decode"))
    wrong["spec"]["template"]["metadata"]["labels"]["team"] = True
    assert any(value is True for found in _maps(wrong) for value in found.values())
    (pod,) = pods([wrong])
    assert {kind for kind, _ in _references(pod)} == {"ServiceAccount", "ConfigMap", "Secret"}
