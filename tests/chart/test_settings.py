"""Every container's arguments, variables and settings file, read by the very parser of the service that it starts."""

from __future__ import annotations

import math

import click
import msgspec
import pytest
from helm_python import HelmError

from engine.text.tokenizer import Tokenizer
from helm.rendering import SETTINGS_ANNOTATION, TREES, Manifest, check_settings, render
from instance.settings import InstanceSettings, engine_config
from kv_transfer.nixl.connector import NixlOptions
from kv_transfer.stores.files import SharedStorageOptions
from kv_transfer.stores.lmcache.connector import LMCacheOptions
from kv_transfer.stores.redis.address import RedisAddress
from kv_transfer.stores.redis.connector import RedisOptions
from router.kubernetes.settings import Workload
from router.pools.discovery import parse_targets
from serving.settings import environment_name, leaves, parse_address
from tandem.commands.generate import command as generate_command
from tandem.demo import MODEL_DIR
from tests.chart.rendered import COMPONENTS, NAMES, SCALING, deployment, manifests, of_kind
from tests.chart.started import Read

OPTIONS: dict[str, type[msgspec.Struct]] = {
    "SharedStorageConnector": SharedStorageOptions,
    "RedisConnector": RedisOptions,
    "NixlConnector": NixlOptions,
    "LMCacheConnector": LMCacheOptions,
}
POOLS = ("prefill", "decode")
FOLLOWING = frozenset({"autoscaling", "endpoints"})
"""ci/ files whose router follows EndpointSlices."""


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", NAMES)
def test_service_takes_what_the_chart_gives(name: str, component: str, read: Read) -> None:
    settings, process = read(manifests(name), component)
    module = "router" if component == "router" else f"{component}_service"
    assert process.command == ["python", "-m", module]
    known = {environment_name(path) for path, _ in leaves(TREES[component])}
    assert {name for name in process.environment if name.startswith("TANDEM_")} <= known
    assert settings.log is not None


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
def test_connector_takes_its_options(name: str, role: str, read: Read) -> None:
    settings, process = read(manifests(name), role)
    config = engine_config(settings).kv_connector
    for one in config.options.get("connectors", [{"class_path": config.class_path, "options": config.options}]):
        options = OPTIONS.get(one["class_path"].partition(":")[2])
        if options is None:
            assert name in ("null", "third-party")
            continue
        taken = msgspec.convert(one["options"], options, strict=False)
        if isinstance(taken, LMCacheOptions):
            taken.backend_name()
        for path in (getattr(taken, field, "") for field in ("kv_secret_file", "path", "password_file")):
            assert not path or process.has(path), path


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", NAMES)
def test_model_is_where_the_service_looks(name: str, component: str, read: Read) -> None:
    settings, process = read(manifests(name), component)
    folder = str(settings.router.model if component == "router" else settings.model.folder)
    assert process.has(folder) is (name in ("hub", "claim", "oci", "everything", "corporate"))
    init = deployment(manifests(name), component)["spec"]["template"]["spec"].get("initContainers", [])
    if init:
        assert f"--local-dir={folder}" in init[0]["args"]
        assert ("--include=*.safetensors" in init[0]["args"]) is (component != "router")


@pytest.mark.parametrize("name", NAMES)
def test_all_agree_on_the_models_name(name: str, read: Read) -> None:
    router, _ = read(manifests(name), "router")
    assert {read(manifests(name), role)[0].model_name for role in ("prefill", "decode")} == {router.router.model_name}


@pytest.mark.parametrize("name", NAMES)
def test_router_looks_for_its_pools_where_their_services_are(name: str, read: Read) -> None:
    settings, _ = read(manifests(name), "router")
    headless = {
        one["metadata"]["name"]: {port["name"]: port["port"] for port in one["spec"]["ports"]}
        for one in of_kind(manifests(name), "Service")
        if one["spec"].get("clusterIP") == "None"
    }
    for role in POOLS:
        (target,) = parse_targets(getattr(settings.pools, role))
        assert headless[target.host]["grpc"] == target.port
        assert target.host == deployment(manifests(name), role)["metadata"]["name"]
        assert (target.is_service, target.is_name) == ((name in FOLLOWING), (name not in FOLLOWING))


@pytest.mark.parametrize("name", NAMES)
def test_routers_find_each_other_at_the_port_that_they_listen_on(name: str, read: Read) -> None:
    settings, _ = read(manifests(name), "router")
    (target,) = parse_targets(settings.signals.routers)
    (service,) = (one for one in of_kind(manifests(name), "Service") if one["metadata"]["name"] == target.host)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "router"
    assert settings.server_beside(settings.signals.listen).port == target.port
    assert (settings.signals.router_name is not None) is (settings.tls.cert_file is not None)


def test_a_change_of_the_number_of_routers_replaces_none() -> None:
    """Their pods are the same: the present ones stay, and share the pools with the new ones."""
    one, five = (deployment(render({"router": {"replicas": number}}), "router")["spec"] for number in (1, 5))
    assert (one["replicas"], five["replicas"]) == (1, 5)
    assert one["template"] == five["template"]


@pytest.mark.parametrize("name", NAMES)
def test_autoscaler_owns_the_workloads_that_the_chart_makes(name: str, read: Read) -> None:
    settings, _ = read(manifests(name), "router")
    assert settings.autoscaler.enabled is (name in SCALING)
    made = {role: Workload("deployments", deployment(manifests(name), role)["metadata"]["name"]) for role in POOLS}
    assert settings.kubernetes.workloads == (made if name in SCALING else {})


def test_autoscaler_gets_its_bounds_and_objectives(read: Read) -> None:
    settings, _ = read(manifests("autoscaling"), "router")
    prefill, decode = settings.autoscaler.prefill, settings.autoscaler.decode
    assert (prefill.min_size, prefill.max_size, prefill.ttft_objective_s) == (1, 4, 0.5)
    assert (decode.min_size, decode.max_size, decode.itl_objective_s) == (1, 10, 0.05)
    assert (decode.scale_in_window_s, settings.autoscaler.max_ratio) == (600, 2)
    for role, policy in (("prefill", prefill), ("decode", decode)):
        spec = deployment(manifests("autoscaling"), role)["spec"]
        drain_s = spec["template"]["spec"]["terminationGracePeriodSeconds"]
        assert policy.start_timeout_s == spec["progressDeadlineSeconds"] - drain_s
    bare, _ = read(render({"autoscaling": {"mode": "builtin"}}), "router")
    assert bare.autoscaler.prefill.ttft_objective_s is bare.autoscaler.decode.itl_objective_s is None


@pytest.mark.parametrize("name", ["redis", "nixl-redis"])
def test_bundled_redis_is_at_the_address_of_the_settings(name: str, read: Read) -> None:
    settings, _ = read(manifests(name), "decode")
    address = RedisAddress.parse(settings.transfer.url)
    ((host, port),) = address.hosts
    (service,) = (one for one in of_kind(manifests(name), "Service") if one["metadata"]["name"] == host)
    assert service["spec"]["ports"][0]["port"] == port


@pytest.mark.parametrize("pod_ip", ["10.1.2.3", "fd00::1:2"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_addresses_are_the_pods_in_both_families(component: str, pod_ip: str, read: Read) -> None:
    settings, _ = read(manifests("default"), component, pod_ip=pod_ip)
    assert settings.metrics.listen == f"[{pod_ip}]:9090"
    if component == "router":
        assert settings.effective_server.host == "0.0.0.0"
        assert parse_address(settings.router.admin_listen) == ("127.0.0.1", 50052)
    else:
        assert (settings.server.resolved().host, settings.server.resolved().port) == (pod_ip, 50051)
        assert settings.server.advertised_host == pod_ip
        assert settings.instance.id == "on-tandem-pod"


def test_routers_listen_where_the_cluster_has_addresses(read: Read) -> None:
    ipv6 = {"ipFamilies": ["IPv6"], "router": {"openai": {"enabled": True}}}
    settings, _ = read(render(ipv6), "router", pod_ip="fd00::1")
    assert (settings.effective_server.host, settings.http.listen) == ("::", "[::]:8000")
    both, _ = read(render({**ipv6, "ipFamilies": ["IPv4", "IPv6"]}), "router", pod_ip="fd00::1")
    assert (both.effective_server.host, both.http.listen) == ("::", "[::]:8000"), "which includes IPv4"
    assert both.signals.listen == "[fd00::1]:50054"
    chosen, _ = read(render({**ipv6, "router": {"bindAddress": "$(POD_IP)"}}), "router", pod_ip="fd00::1")
    assert chosen.effective_server.host == "fd00::1"


@pytest.mark.parametrize("listen", ["$(POD_IP):50052", "[$(POD_IP)]:50052"])
@pytest.mark.parametrize("pod_ip", ["10.1.2.3", "fd00::1:2"])
def test_the_admin_listener_is_at_the_pods_address_of_either_family(listen: str, pod_ip: str, read: Read) -> None:
    settings, _ = read(render({"router": {"adminListen": listen}}), "router", pod_ip=pod_ip)
    assert parse_address(settings.router.admin_listen) == (pod_ip, 50052)


def test_how_the_model_writes_tool_calls_is_the_users_to_say(read: Read) -> None:
    settings, _ = read(render({"router": {"settings": {"router": {"tool_call_parser": "hermes"}}}}), "router")
    assert (settings.router.tool_call_parser, settings.router.model_name) == ("hermes", "demo")
    with pytest.raises(HelmError, match="'workers' not allowed"):
        render({"router": {"settings": {"router": {"workers": 2}}}})


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_waits_longer_than_a_drain(name: str, component: str, read: Read) -> None:
    """docs/operations.md: longer than drain_accept_s + drain_grace_s + 10 s."""
    settings, _ = read(manifests(name), component)
    grace_s = deployment(manifests(name), component)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > math.ceil(settings.server.drain_accept_s + settings.server.drain_grace_s + 10)


@pytest.mark.parametrize("setting", ["drain_accept_s", "drain_grace_s"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_drain_without_a_value_is_waited_for_too(component: str, setting: str, read: Read) -> None:
    values = {"settings": {"server": {setting: None}}}
    objects = render({"router": values, "instance": values})
    server = read(objects, component)[0].server
    grace_s = deployment(objects, component)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > math.ceil(server.drain_accept_s + server.drain_grace_s + 10)


def test_threads_are_the_cores_that_the_pod_has(read: Read) -> None:
    settings: dict[str, InstanceSettings] = {
        name: read(manifests(name), "prefill")[0] for name in ("default", "hub", "everything")
    }
    assert {name: one.engine.num_threads for name, one in settings.items()} == {
        "default": 1,
        "hub": 8,
        "everything": 16,
    }


@pytest.mark.parametrize(
    ("tensor", "pipeline", "resources", "threads"),
    [
        (2, 1, {"limits": {"cpu": 8}}, 4),
        (2, 2, {"limits": {"cpu": "9500m"}}, 2),
        (1, 2, {"requests": {"cpu": "1"}}, 1),
        (2, 1, {"requests": {"cpu": None}, "limits": {}}, None),
    ],
)
def test_ranks_share_the_cores_that_the_pod_has(
    tensor: int, pipeline: int, resources: Manifest, threads: int | None, read: Read
) -> None:
    instance = {"tensorParallelSize": tensor, "pipelineParallelSize": pipeline, "resources": resources}
    engine = read(render({"instance": instance}), "decode")[0].engine
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.num_threads) == (
        tensor,
        pipeline,
        threads,
    )


def test_vllm_gets_its_arguments_and_a_gpu_for_each_worker(read: Read) -> None:
    instance = {
        "engine": "vllm",
        "image": {"repository": "tandem-vllm", "tag": "0.1.0-vllm"},
        "tensorParallelSize": 2,
        "pipelineParallelSize": 2,
        "vllmArgs": {"quantization": "fp8", "max_num_partial_prefills": 2},
        "gpu": {"count": 4},
        "shmSize": "16Gi",
    }
    values = {"connector": {"name": "null"}, "instance": instance, "model": {"startupSeconds": 3600}}
    objects = render({**values, "image": {"digest": f"sha256:{'0' * 64}"}})
    engine = read(objects, "decode")[0].engine
    assert (engine.kind, engine.device, engine.kv_cache_bytes) == ("vllm", "cuda", None)
    assert engine.vllm_args == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "quantization": "fp8",
        "max_num_partial_prefills": 2,
    }
    pod = deployment(objects, "decode")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"] == "tandem-vllm:0.1.0-vllm"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600
    (router,) = deployment(objects, "router")["spec"]["template"]["spec"]["containers"]
    assert router["image"] == f"tandem@sha256:{'0' * 64}"


def test_vllm_without_a_gpu_gets_blocks_and_memory_that_its_kernels_take(read: Read) -> None:
    vllm = {"engine": "vllm", "image": {"tag": "0.1.0-vllm-cpu"}}
    engine = read(render({"instance": vllm}), "decode")[0].engine
    assert (engine.block_size, engine.kv_cache_bytes) == (32, 1 << 30)
    own = {**vllm, "settings": {"engine": {"block_size": 64, "python": "/opt/vllm/bin/python"}}}
    engine = read(render({"instance": own}), "decode")[0].engine
    assert (engine.block_size, engine.python) == (64, "/opt/vllm/bin/python")


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_measured_on_gpus_and_set_on_cpus(name: str, read: Read) -> None:
    """An instance measures its node's memory, not its pod's limit."""
    for role in ("prefill", "decode"):
        engine = read(manifests(name), role)[0].engine
        assert (engine.device == "cuda") is (name in ("hub", "everything", "devices"))
        if engine.device == "cpu":
            assert engine.num_blocks or engine.kv_cache_bytes == 1 << 30
        elif name != "hub":  # which gives it
            assert engine.num_blocks is engine.kv_cache_bytes is None


def test_users_settings_reach_the_service(read: Read) -> None:
    router, _ = read(manifests("everything"), "router")
    assert router.disaggregation.mode == "always"
    assert router.admission.tenants["on"].max_requests == 8
    assert router.http.listen == "[10.1.2.3]:8080"
    decode, _ = read(manifests("hub"), "decode")
    assert (decode.engine.max_num_seqs, decode.engine.kv_cache_bytes, decode.model.dtype) == (256, 32 << 30, "bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_helm_test_is_a_command_that_there_is(name: str) -> None:
    (pod,) = of_kind(manifests(name), "Pod")
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["tandem", "generate"]
    params = generate_command.make_context("generate", list(container["args"])).params
    assert params["prompt"].startswith("{{ not a template }}" if name == "everything" else "Once upon a time")
    host, _, port = params["address"].rpartition(":")
    (service,) = (one for one in of_kind(manifests(name), "Service") if one["metadata"]["name"] == host)
    assert service["spec"]["ports"][0]["port"] == int(port)


def test_prompt_of_helm_test_crosses_both_pools(read: Read) -> None:
    (pod,) = of_kind(manifests("default"), "Pod")
    tokenizer = Tokenizer.from_folder(MODEL_DIR)
    router, _ = read(manifests("default"), "router")
    assert len(tokenizer.encode(pod["spec"]["containers"][0]["args"][0])) > router.disaggregation.min_tokens


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_collector_gets_the_spans_of_every_component(component: str, read: Read) -> None:
    otlp = {"tracing": {"otlp": "otel-collector.observability:4317"}}
    assert str(read(render(otlp), component)[0].tracing.otlp) == otlp["tracing"]["otlp"]
    assert read(manifests("default"), component)[0].tracing.otlp is None
    owner = "router" if component == "router" else "instance"
    own = {owner: {"settings": {"tracing": {"otlp": "127.0.0.1:4317", "sample": 0.1}}}}
    tracing = read(render({**otlp, **own}), component)[0].tracing
    assert (str(tracing.otlp), tracing.sample) == ("127.0.0.1:4317", 0.1)


def test_a_wrong_setting_is_seen(read: Read) -> None:
    """Or the tests above prove nothing: one that got past the schema is refused by the parser."""
    objects = render({})
    metadata = deployment(objects, "decode")["spec"]["template"]["metadata"]
    metadata["annotations"][SETTINGS_ANNOTATION] += "sever: {port: 1}\n"
    with pytest.raises(click.UsageError, match=r"unknown setting sever; did you mean server\?"):
        read(objects, "decode")
    with pytest.raises(ValueError, match=r"(?s)Deployment on-tandem-decode: .*sever"):
        check_settings(objects)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_pod_of_an_earlier_revision_keeps_its_settings(component: str, read: Read) -> None:
    """One that restarts during a rollout, or comes back by `kubectl rollout undo`, beside the later revision's
    objects."""
    earlier, later = (
        render({"model": {"source": "hub", "hub": {"id": "a/b", "revision": revision * 40}}}) for revision in "12"
    )
    settings, _ = read(earlier, component)
    assert settings != read(later, component)[0]
    mixed = [one for one in later if one["kind"] != "Deployment"] + of_kind(earlier, "Deployment")
    assert read(mixed, component)[0] == settings
