"""What the members of a stack are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.machine import free_ports, share_cores
from tandem.member import MemberSpec
from tandem.stack_settings import StackSettings
from tandem.topology import Topology


def topology(**fields: object) -> Topology:
    return Topology(StackSettings(model=Path("/m"), model_name="demo", **fields), Path("/f"))  # type: ignore[arg-type]


def instances(told: Topology, *names: str) -> list[MemberSpec]:
    return [told.instance(name, f"127.0.0.1:{7001 + number}") for number, name in enumerate(names)]


def option(spec: MemberSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_the_router_follows_the_owner_whoever_comes_and_goes() -> None:
    told = topology(num_prefill=2, disaggregation="always")
    router = told.router("0.0.0.0:7000", "127.0.0.1:7003")
    assert option(router, "--stack") == told.stack_address == "unix:/f/stack.sock"
    assert "--prefill" not in router.argv
    assert "--decode" not in router.argv
    assert option(router, "--disaggregation") == "always"
    assert option(router, "--listen") == router.address == "0.0.0.0:7000"
    assert option(router, "--admin-listen") == "127.0.0.1:7003"


def test_instances_share_store_and_secret_and_have_explicit_memory_and_threads() -> None:
    told = topology(lease_s=2.0)
    for member in instances(told, "prefill-0", "decode-0"):
        assert option(member, "--kv-folder") == "/f/store"
        assert option(member, "--kv-secret-file") == "/f/kv_secret"
        assert int(option(member, "--kv-cache-bytes")) == told.kv_cache_bytes > 0  # type: ignore[operator]
        assert int(option(member, "--num-threads")) >= 1
        assert member.env["OMP_NUM_THREADS"] == option(member, "--num-threads")
        assert option(member, "--lease-s") == "2.0"
        assert "--admin-listen" not in member.argv
    assert option(told.router("h:1", "h:2"), "--disaggregation-lease-s") == "2.0"


def test_a_role_is_a_module_and_a_name() -> None:
    prefill, decode = instances(topology(), "prefill-1", "decode-0")
    assert prefill.argv[2] == "prefill_service"
    assert decode.argv[2] == "decode_service"
    assert option(prefill, "--instance-id") == prefill.ready_file.name == "prefill-1"


def test_memory_is_shared_out_for_the_planned_sizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.topology.available_bytes", lambda: 1 << 30)
    small, planned = topology(), topology(max_decode=3)
    assert planned.kv_cache_bytes == small.kv_cache_bytes // 2  # type: ignore[operator]
    monkeypatch.setattr("tandem.topology.available_bytes", lambda: 1 << 20)
    [newcomer] = instances(small, "decode-7")
    assert int(option(newcomer, "--kv-cache-bytes")) == small.kv_cache_bytes, "the first ones' part, not a new one"
    assert topology(num_blocks=64).kv_cache_bytes is None


def test_a_newcomer_gets_cores_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.topology.usable_cores", lambda: [0, 1, 2, 3, 4, 5])
    told = topology(max_decode=2)
    first = instances(told, "prefill-0", "decode-0")
    assert [option(member, "--cpu-cores") for member in first] == ["[0, 1]", "[2, 3]"]
    planned, beyond = instances(told, "decode-1", "decode-2")
    assert option(planned, "--cpu-cores") == "[4, 5]"
    assert "--cpu-cores" not in beyond.argv
    assert option(beyond, "--num-threads") == option(planned, "--num-threads") == "2"
    told.release("decode-0")
    told.release("decode-2")
    assert option(told.instance("decode-3", "h:1"), "--cpu-cores") == "[2, 3]"


@pytest.mark.parametrize(
    "fields", [{"num_decode": 0}, {"num_prefill": -1}, {"num_prefill": 0, "disaggregation": "always"}]
)
def test_a_stack_that_cannot_serve_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        topology(**fields)


def test_cores_are_shared_out_in_equal_separate_parts() -> None:
    assert share_cores([0, 1], 2, True) == [(0,), (1,)]
    assert share_cores([0, 1, 2, 3, 4], 2, True) == [(0, 1), (2, 3)]
    assert share_cores([0, 1], 3, True) == [(), (), ()]
    assert share_cores([0, 1], 2, False) == [(), ()]


def test_free_ports_differ_and_are_not_those_of_outgoing_connections() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(20_000 <= port < 32_000 for port in ports)


def test_the_router_speaks_http_where_it_is_told_to() -> None:
    told = topology()
    assert "--http-listen" not in told.router("h:1", "h:2").argv
    assert option(told.router("h:1", "h:2", "h:3"), "--http-listen") == "h:3"
