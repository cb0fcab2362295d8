"""Strict lint, and values that are refused before anything is installed, with a message that says what to write."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helm_python import HelmError, lint

from helm.rendering import CHART, ci_files, read_values, render
from helm.values import documented
from tests.chart.rendered import NAMES, settings_of_pods

VLLM: dict[str, Any] = {"engine": "vllm", "image": {"tag": "0.1.0-vllm"}}
ISSUER = {"certManager": {"issuerRef": {"name": "private-ca"}}}
REFUSED_BY_SCHEMA: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt value": ({"conector": {}}, "'conector' not allowed"),
    "a misspelt setting": ({"instance": {"settings": {"engine": {"max_num_seq": 4}}}}, "'max_num_seq' not allowed"),
    "a setting of one pool": ({"pools": {"decode": {"settings": {"engin": {}}}}}, "'engin' not allowed"),
    "a setting out of range": ({"instance": {"settings": {"engine": {"block_size": 0}}}}, "minimum: got 0"),
    "a setting that the chart decides": ({"router": {"settings": {"server": {"port": 1}}}}, "'port' not allowed"),
    "a connector that the chart decides": (
        {"instance": {"settings": {"transfer": {"connector": "redis"}}}},
        "'connector' not allowed",
    ),
    "a page that the chart decides": ({"router": {"settings": {"http": {"page": True}}}}, "'page' not allowed"),
    "a third pool": ({"pools": {"draft": {}}}, "'draft' not allowed"),
    "an unknown autoscaler": ({"autoscaling": {"mode": "keda"}}, "must be one of 'none', 'builtin'"),
    "LMCache on Redis": ({"connector": {"lmcache": {"place": "redis"}}}, "must be one of 'disk', 'server'"),
    "a password in an address": ({"connector": {"redis": {"url": "redis://:secret@host:6379"}}}, "does not match"),
    "a digest that is cut": ({"image": {"digest": "sha256:0f34"}}, "does not match"),
    "an objective between two bounds": ({"metrics": {"alerts": {"timeToFirstTokenSeconds": 3}}}, "must be one of"),
    "a certificate that the chart decides": (
        {"instance": {"settings": {"tls": {"cert_file": "/tls.crt"}}}},
        "'tls' not allowed",
    ),
    "a bound that the chart decides": (
        {"router": {"settings": {"autoscaler": {"decode": {"max_size": 4}}}}},
        "'max_size' not allowed",
    ),
    "an objective of nothing": ({"autoscaling": {"decode": {"interTokenLatencySeconds": 0}}}, "exclusiveMinimum"),
    "an unknown discovery": ({"discovery": "etcd"}, "must be one of 'dns', 'endpoints'"),
    "a name in capitals": ({"tls": {"routerName": "Router"}}, "does not match"),
    "no router": ({"router": {"replicas": 0}}, "minimum: got 0"),
    "an unknown engine": ({"instance": {"engine": "sglang"}}, "must be one of 'tandem', 'vllm'"),
    "an engine that the chart decides": (
        {"instance": {"settings": {"engine": {"kind": "vllm"}}}},
        "'kind' not allowed",
    ),
    "an argument of vLLM as a flag": ({"instance": {**VLLM, "vllmArgs": {"--enforce-eager": True}}}, "does not match"),
    "a name that is no label": ({"nameOverride": "x" * 64}, "maxLength: got 64"),
    "a name that no Service has": ({"fullnameOverride": "Llm"}, "does not match"),
    "a label with a space": ({"commonLabels": {"owner": "team a"}}, "does not match"),
    "routers of no number": ({"router": {"replicas": None}}, "'/router': missing property 'replicas'"),
    "a start of no length": ({"model": {"startupSeconds": None}}, "'/model': missing property 'startupSeconds'"),
    "a section without values": ({"metrics": None}, "missing property 'metrics'"),
    "a label's key with a space": ({"commonLabels": {"owner name": "a"}}, "does not match"),
    "an annotation's key with a colon": ({"instance": {"podAnnotations": {"a: b": "c"}}}, "does not match"),
    "a port that no machine has": ({"router": {"adminListen": "0.0.0.0:99999"}}, "does not match"),
    "more pods than all": ({"router": {"maxUnavailable": "150%"}}, "does not match"),
    "a key without a name": ({"connector": {"key": {"existingSecretKey": ""}}}, "does not match"),
    "a GPU of no vendor": ({"instance": {"gpu": {"count": 1, "resource": "gpu"}}}, "does not match"),
    "a range with too many bits": (
        {"router": {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/33"]}}},
        "does not match",
    ),
    "a label that is too long": ({"instance": {"podLabels": {"owner": "x" * 64}}}, "maxLength: got 64"),
}

REFUSED_BY_TEMPLATE: dict[str, tuple[dict[str, Any], str]] = {
    "connector twice": ({"connector": {"name": "redis,redis"}}, "names a connector twice"),
    "unknown connector": ({"connector": {"name": "nixle"}}, "nor module:Class"),
    "nixl as a store": ({"connector": {"name": "redis,nixl"}}, "write connector.name=nixl,"),
    "null in a list": ({"connector": {"name": "null,redis"}}, "null moves nothing"),
    "two users of one address": ({"connector": {"name": "lmcache,redis"}}, "put it alone, or after nixl"),
    "no server": ({"connector": {"name": "lmcache", "lmcache": {"place": "server"}}}, "connector.lmcache.serverUrl"),
    "no Redis": ({"connector": {"name": "redis", "redis": {"bundled": False}}}, "connector.redis.url"),
    "two Redis": ({"connector": {"name": "redis", "redis": {"url": "redis://host:1"}}}, "redis.bundled=false"),
    "a user of no Redis": (
        {"connector": {"name": "redis", "redis": {"username": "tandem"}}},
        'connector.redis.username: the bundled Redis has no user "tandem"',
    ),
    "a user without a password": (
        {"connector": {"name": "redis", "redis": {"bundled": False, "url": "redis://host:1", "username": "tandem"}}},
        'connector.redis.username: "tandem" has no password; give connector.redis.existingSecret',
    ),
    "a Secret that Helm deletes": (
        {"connector": {"key": {"existingSecret": "on-tandem-kv-key"}}},
        "connector.key.existingSecret: on-tandem-kv-key is the name of the Secret that the chart creates",
    ),
    "an option of no connector": (
        {"connector": {"name": "nixl,redis", "options": {"nixl.num_io_threads": 2, "ttl_s": 9}}},
        "connector.options.ttl_s: in a list of connectors an option has the name of its connector; write redis.ttl_s",
    ),
    "few bits on vLLM": (
        {"instance": {**VLLM, "settings": {"engine": {"quantization": "int8"}}}},
        "settings.engine.quantization of prefill: int8 is for the built-in engine on CPUs; leave it out, or set",
    ),
    "drafts on vLLM": (
        {"instance": {**VLLM, "settings": {"engine": {"num_speculative_tokens": 3}}}},
        "settings.engine.num_speculative_tokens of prefill: it is for the built-in engine",
    ),
    "capacity of nothing": ({"connector": {"capacityBytes": 1}}, "connector.capacityBytes"),
    "a volume for one node": (
        {"connector": {"name": "shared_storage", "sharedStorage": {"accessModes": ["ReadWriteOnce"]}}},
        "[ReadWriteMany]",
    ),
    "a GPU that the engine does not use": (
        {"pools": {"decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}},
        "alone the engine would use the CPU; set instance.gpu.count=1",
    ),
    "GPUs that are not used": (
        {"instance": {"gpu": {"count": 8}}},
        "gpu.count of prefill: 8, and its engine has 1 worker(s), one for each GPU; set instance.tensorParallelSize=8",
    ),
    "a built-in engine on several GPUs": (
        {"instance": {"gpu": {"count": 2}, "tensorParallelSize": 2}},
        "tensorParallelSize of prefill: 2 on GPUs, and this chart divides the built-in engine on CPUs only",
    ),
    "vLLM's arguments without it": (
        {"pools": {"decode": {"vllmArgs": {"enforce_eager": True}}}},
        "vllmArgs of decode: the engine is tandem, which has no such arguments",
    ),
    "two engines": (
        {"pools": {"decode": VLLM}},
        "prefill has the engine tandem and decode vllm, and instances of different engines are never paired",
    ),
    "two vLLMs": (
        {"instance": VLLM, "pools": {"prefill": {"vllmArgs": {"quantization": "fp8"}}}},
        'vllmArgs: prefill has {"quantization":"fp8"} and decode {}, and instances with different arguments are never',
    ),
    "vLLM in no image": ({"instance": {"engine": "vllm"}}, "set instance.image.repository"),
    "vLLM's speculation": (
        {"instance": {**VLLM, "vllmArgs": {"speculative_config": {}}}},
        "speculative_config: it is not supported: a speculating engine does not continue sampled streams exactly",
    ),
    "vLLM with a list of connectors": (
        {"instance": VLLM, "connector": {"name": "nixl,redis"}},
        "connector.name: nixl,redis is not supported with instance.engine=vllm; allowed: nixl, redis, shared_storage",
    ),
    "KV of several workers": (
        {"instance": {**VLLM, "tensorParallelSize": 4, "gpu": {"count": 4}}},
        "tensorParallelSize of prefill: 4, and vLLM hands over the KV of one worker only; set connector.name=null",
    ),
    "no hub id": ({"model": {"source": "hub"}}, "model.hub.id"),
    "no image with a model": ({"model": {"source": "oci"}}, "model.oci.reference"),
    "no cache to fill": (
        {"model": {"source": "hub", "hub": {"id": "a/b", "preload": True}}},
        "model.hub.cache.create=true",
    ),
    "no claim": ({"model": {"source": "claim"}}, "model.claim.name"),
    "alerts on nothing": ({"metrics": {"enabled": False, "alerts": {"enabled": True}}}, "metrics.enabled=true"),
    "a monitor of nothing": (
        {"metrics": {"enabled": False, "monitor": {"kind": "PodMonitor"}}},
        "metrics.enabled=true",
    ),
    "more at the least than at the most": (
        {"autoscaling": {"decode": {"minReplicas": 3, "maxReplicas": 2}}},
        "3 is above maxReplicas, which is 2",
    ),
    "TLS without certificates": ({"tls": {"enabled": True}}, "tls.existingSecret, or let cert-manager"),
    "certificates from two places": (
        {"tls": {"enabled": True, "existingSecret": "a", "certManager": {"issuerRef": {"name": "b"}}}},
        "leave one of the two empty",
    ),
    "instances alone": ({"tls": {"enabled": True, "existingInstanceSecret": "a", **ISSUER}}, "in tls.existingSecret"),
    "certificates that nobody shows": ({"tls": {"clients": {"certificateRequired": True}}}, "set tls.enabled=true"),
    "no tokens in the Secret": (
        {"auth": {"existingSecret": "tenants", "existingSecretTokensKey": ""}},
        "none of its keys is used",
    ),
    "a page without operators' tokens": (
        {"router": {"openai": {"enabled": True, "page": True}}, "auth": {"existingSecret": "tenants"}},
        "operators need a token for the page",
    ),
    "a cache for one node": (
        {"model": {"source": "hub", "hub": {"id": "a/b", "cache": {"create": True, "accessModes": ["ReadWriteOnce"]}}}},
        "model.hub.cache.accessModes",
    ),
    "fewer in all than at the least": (
        {
            "autoscaling": {"mode": "builtin", "decode": {"minReplicas": 8}},
            "router": {"settings": {"autoscaler": {"max_instances": 4}}},
        },
        "max_instances: 4 is below the sum of both minReplicas, which is 9",
    ),
    "a selector's label": (
        {"pools": {"decode": {"podLabels": {"app.kubernetes.io/component": "x"}}}},
        "pools.decode.podLabels: the chart sets app.kubernetes.io/component itself",
    ),
    "a port of two": ({"metrics": {"port": 50053}}, "metrics.port: port 50053 is taken by probes"),
    "a Service's port of two": (
        {"router": {"openai": {"enabled": True}, "service": {"port": 8000}}},
        "router.service.port: 8000 is router.openai.port too",
    ),
    "ports from last to first": ({"connector": {"nixl": {"tcpPorts": "30010-30001"}}}, "30010-30001 is no range"),
    "UCX on the port of others": (
        {"connector": {"nixl": {"tcpPorts": "50000-50100"}}},
        "50000-50100 contains port 50051 of gRPC",
    ),
    "a variable twice": (
        {"instance": {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "extraEnv of prefill: a variable is there twice",
    ),
    "a drain that the pod's grace does not follow": (
        {"router": {"extraEnv": [{"name": "Tandem_SERVER__DRAIN_GRACE_S", "value": "3600"}]}},
        "would not follow Tandem_SERVER__DRAIN_GRACE_S; set server.drain_grace_s in router.settings",
    ),
    "a volume of the chart's": (
        {"router": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
        "extraVolumes of router: a name is there twice",
    ),
    "the settings": (
        {"router": {"podAnnotations": {"tandem/settings": "x"}}},
        "podAnnotations of router: the chart sets tandem/settings",
    ),
    "settings that no pod could keep": (
        {"router": {"settings": {"admission": {"tenants": {f"tenant-{i}": {"max_requests": 8} for i in range(5000)}}}}},
        "settings of router: they are",
    ),
    "a rollout that cannot": (
        {"instance": {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}}},
        "strategy of prefill: with maxSurge and maxUnavailable of 0",
    ),
    "no accounts": ({"serviceAccount": {"create": False}}, "serviceAccount.routerName"),
    "KEDA beside another that sizes": (
        {"autoscaling": {"mode": "builtin", "keda": {"enabled": True}}},
        "autoscaling.mode is builtin, which sizes the pools too; set it to external",
    ),
    "KEDA without a certificate": (
        {
            "autoscaling": {"mode": "external", "keda": {"enabled": True}},
            "tls": {"enabled": True, "existingSecret": "s"},
        },
        "name a TriggerAuthentication",
    ),
    "zero instances without KEDA": (
        {"autoscaling": {"prefill": {"minReplicas": 0}}},
        "autoscaling.prefill.minReplicas: 0 needs autoscaling.keda.enabled",
    ),
    "a window of KEDA's before a pod counts": (
        {
            "autoscaling": {
                "mode": "external",
                "keda": {"enabled": True, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 90}}},
            }
        },
        "90 is less than 60 s and the minReadySeconds of the prefill pool, which are 40: a new pod could be removed"
        " before it counts; set it to 100 or more",
    ),
    "an Ingress to a closed port": (
        {"ingress": {"enabled": True, "hosts": ["a.example"]}},
        "ingress.enabled: it leads to OpenAI's HTTP API; set router.openai.enabled=true",
    ),
    "an Ingress for all names": (
        {"ingress": {"enabled": True}, "router": {"openai": {"enabled": True}}},
        "ingress.hosts: give the host names",
    ),
    "sources of no load balancer": (
        {"router": {"service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
        "the Service is a ClusterIP; set router.service.type=LoadBalancer",
    ),
    "a mount of no volume": (
        {"instance": {"extraVolumeMounts": [{"name": "data", "mountPath": "/data"}]}},
        'extraVolumeMounts of prefill: there is no volume "data"; name it in extraVolumes, or one of settings, tmp',
    ),
    "a path of the chart's": (
        {"router": {"extraVolumeMounts": [{"name": "cache", "mountPath": "/tmp/"}]}},
        "extraVolumeMounts of router: a path is there twice",
    ),
    "a container of the chart's": (
        {"model": {"source": "hub", "hub": {"id": "a/b"}}, "instance": {"initContainers": [{"name": "model"}]}},
        "sidecars and initContainers of prefill: a name is there twice (prefill, model, model)",
    ),
    "a Redis that outgrows its limit": (
        {"connector": {"name": "redis", "redis": {"maxMemory": "8gb"}}},
        "connector.redis.resources.limits.memory: 3Gi is less than a quarter above maxMemory, which is 8gb",
    ),
    "a certificate that is always due": (
        {"tls": {"enabled": True, "certManager": {**ISSUER["certManager"], "duration": "24h"}}},
        "tls.certManager.renewBefore: 720h must be less than duration, which is 24h",
    ),
    "an alert for every certificate": (
        {
            "tls": {"enabled": True, "certManager": {**ISSUER["certManager"], "renewBefore": "72h"}},
            "metrics": {"alerts": {"enabled": True}},
        },
        "metrics.alerts.certificateSeconds: 259200 must be less than tls.certManager.renewBefore, which is 72h",
    ),
    "a route without a Gateway": ({"routes": {"grpc": {"enabled": True}}}, "routes.grpc.parentRefs: name the Gateway"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["v1.27.0", "v1.37.0"])
def test_strict_lint_has_nothing_to_say(name: str, version: str) -> None:
    report = lint(CHART, read_values(ci_files()[name]), strict=True, namespace="default", kube_version=version)
    assert report["messages"] == []


@pytest.mark.parametrize("what", REFUSED_BY_SCHEMA)
def test_schema_refuses(what: str) -> None:
    values, message = REFUSED_BY_SCHEMA[what]
    with pytest.raises(HelmError) as refused:
        render(values)
    assert message in str(refused.value)


@pytest.mark.parametrize("what", REFUSED_BY_TEMPLATE)
def test_template_refuses_what_does_not_go_together(what: str) -> None:
    values, message = REFUSED_BY_TEMPLATE[what]
    with pytest.raises(HelmError) as refused:
        render(values)
    assert message in str(refused.value)


def test_the_charts_own_name_is_refused_for_redis_too_and_another_releases_is_not() -> None:
    def redis(secret: str, **other: Any) -> dict[str, Any]:
        return {"connector": {"name": "redis", "redis": {"existingSecret": secret, **other}}}

    with pytest.raises(HelmError, match=r"connector\.redis\.existingSecret: on-tandem-redis is the name of the Secret"):
        render(redis("on-tandem-redis"))
    with pytest.raises(HelmError, match=r"if this release created it, Helm deletes it .*; copy it to a Secret with"):
        render(redis("on-tandem-redis", bundled=False, url="redis://host:1"))
    assert render(redis("tandem-redis"))


def test_every_refusal_of_the_templates_is_tested() -> None:
    texts = [(CHART / "templates" / name).read_text() for name in ("_validate.tpl", "_engine.tpl", "_workload.tpl")]
    assert sum(text.count("fail ") for text in texts) == len(REFUSED_BY_TEMPLATE)


def test_a_key_without_a_value_is_one_with_an_empty_value() -> None:
    """As a values file has it whose lines below the key are comments."""
    empty = {**_empty(read_values(CHART / "values.yaml")), "pools": {"prefill": None, "decode": None}}
    assert empty["router"].keys() >= {"podAnnotations", "extraEnv"}
    key: dict[str, Any] = {"connector": {"key": {"existingSecret": "key"}}}
    assert render({**empty, "connector": {**empty["connector"], **key["connector"]}}) == render(key)


@pytest.mark.parametrize(
    ("most", "limit"), [("8gb", "10Gi"), ("512mb", 671088640), ("1gb", "1.4G"), ("1048576kb", "1310720Ki")]
)
def test_a_redis_within_its_limit_is_accepted(most: str, limit: str | int) -> None:
    redis = {"maxMemory": most, "resources": {"limits": {"memory": limit}}}
    assert render({"connector": {"name": "redis", "redis": redis}})


@pytest.mark.parametrize("connector", ["nixl", "redis", "shared_storage", "null"])
def test_vllm_takes_these_connectors(connector: str) -> None:
    assert render({"instance": VLLM, "connector": {"name": connector}})


def test_vllm_takes_adapters() -> None:
    assert render({"instance": {**VLLM, "settings": {"engine": {"lora_adapters": {"sql": "/adapters/sql"}}}}})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dtype", "set instance.settings.model.dtype"),
        ("enable_lora", "set instance.settings.engine.lora_adapters"),
        ("model", "the chart sets it, by `model`"),
        ("tensor_parallel_size", "set instance.tensorParallelSize"),
        ("pipeline_parallel_size", "set instance.pipelineParallelSize"),
    ],
)
def test_an_argument_of_vllm_that_is_a_value_names_it(name: str, instead: str) -> None:
    with pytest.raises(HelmError, match=rf"vllmArgs of prefill: {name}: {re.escape(instead)}"):
        render({"instance": {**VLLM, "vllmArgs": {name: 1}}})


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (
            {**VLLM, "vllmArgs": {"decode_context_parallel_size": 2}},
            "vllmArgs.decode_context_parallel_size of prefill: 2",
        ),
        (
            {**VLLM, "pipelineParallelSize": 2, "gpu": {"count": 2}},
            "pipelineParallelSize of prefill: 2, and vLLM hands",
        ),
        (
            {"pipelineParallelSize": 3, "gpu": {"count": 3}},
            "pipelineParallelSize of prefill: 3 on GPUs, and this chart divides the built-in",
        ),
    ],
)
def test_stages_and_other_workers_are_refused_too(instance: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        render({"instance": instance})


def test_pools_of_vllm_may_differ_in_what_is_no_part_of_the_identity() -> None:
    assert render({"instance": VLLM, "pools": {"prefill": {"vllmArgs": {"gpu_memory_utilization": 0.8}}}})


def test_every_value_has_a_line_above_it() -> None:
    text = (CHART / "values.yaml").read_text()
    explained = {value.path for value in documented(text)}
    for path in _leaves(read_values(CHART / "values.yaml")):
        above = [path.rsplit(".", count)[0] for count in range(path.count(".") + 1)]
        assert explained & {path, *above}, path


def test_numbers_of_bytes_stay_whole() -> None:
    """Helm reads every number as a float; a template that prints one writes 1.7179869184e+10."""
    values = {"instance": {"settings": {"engine": {"kv_cache_bytes": 68_719_476_736}}}}
    texts = [settings_of_pods(render(values), pool) for pool in ("prefill", "decode")]
    assert all("kv_cache_bytes: 68719476736" in text for text in texts)


def _empty(values: dict[str, Any]) -> dict[str, Any]:
    """Null in place of every value that is nothing, an empty object or an empty list."""
    inner = {key: _empty(value) for key, value in values.items() if isinstance(value, dict)}
    return {
        **{key: found for key, found in inner.items() if found},
        **{k: None for k, v in values.items() if v in (None, {}, [])},
    }


def _leaves(values: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += _leaves(value, f"{above}{key}.") if isinstance(value, dict) and value else [f"{above}{key}"]
    return found


NULLS = [value.path for value in documented((CHART / "values.yaml").read_text()) if "null:" in value.doc]


@pytest.mark.parametrize("path", NULLS)
def test_a_null_that_values_yaml_explains_is_accepted(path: str) -> None:
    values: Any = None
    for key in reversed(path.split(".")):
        values = {key: values}
    assert render(values)
