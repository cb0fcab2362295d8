"""What the members of a stack are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.machine import free_ports, share_cores
from tandem.member import MemberSpec
from tandem.stack_settings import StackSettings
from tandem.topology import member_specs


def specs(**fields: object) -> dict[str, MemberSpec]:
    settings = StackSettings(model=Path("/m"), model_name="demo", **fields)  # type: ignore[arg-type]
    ports = range(7000, 7000 + settings.num_prefill + settings.num_decode + 2)
    return {spec.name: spec for spec in member_specs(settings, Path("/f"), ports)}


def option(spec: MemberSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_the_router_knows_every_instance_before_any_of_them_runs() -> None:
    members = specs(num_prefill=2, num_decode=1, disaggregation="always")
    assert list(members) == ["router", "prefill-0", "prefill-1", "decode-0"]
    router = members["router"]
    assert option(router, "--prefill") == "127.0.0.1:7001,127.0.0.1:7002"
    assert option(router, "--decode") == option(members["decode-0"], "--listen") == "127.0.0.1:7003"
    assert option(router, "--disaggregation") == "always"
    assert members["prefill-1"].argv[2] == "prefill_service"


def test_operators_reach_the_router_on_this_machine_alone() -> None:
    members = specs(num_prefill=1, num_decode=1, host="0.0.0.0")
    assert option(members["router"], "--listen") == "0.0.0.0:7000"
    assert option(members["router"], "--admin-listen") == "127.0.0.1:7003"
    assert not [name for name, member in members.items() if name != "router" and "--admin-listen" in member.argv]


def test_instances_share_store_and_secret_and_have_explicit_memory_and_threads() -> None:
    members = specs(lease_s=2.0)
    for name in ("prefill-0", "decode-0"):
        assert option(members[name], "--kv-folder") == "/f/store"
        assert option(members[name], "--kv-secret-file") == "/f/kv_secret"
        assert int(option(members[name], "--kv-cache-bytes")) > 0
        assert int(option(members[name], "--num-threads")) >= 1
        assert members[name].env["OMP_NUM_THREADS"] == option(members[name], "--num-threads")
    assert option(members["router"], "--disaggregation-lease-s") == option(members["decode-0"], "--lease-s") == "2.0"


def test_aggregated_serving_has_no_prefill_pool() -> None:
    members = specs(num_prefill=0)
    assert list(members) == ["router", "decode-0"]
    assert "--prefill" not in members["router"].argv


@pytest.mark.parametrize(
    "fields", [{"num_decode": 0}, {"num_prefill": -1}, {"num_prefill": 0, "disaggregation": "always"}]
)
def test_a_stack_that_cannot_serve_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        specs(**fields)


def test_cores_are_shared_out_in_equal_separate_parts() -> None:
    assert share_cores([0, 1], 2, True) == [(0,), (1,)]
    assert share_cores([0, 1, 2, 3, 4], 2, True) == [(0, 1), (2, 3)]
    assert share_cores([0, 1], 3, True) == [(), (), ()]
    assert share_cores([0, 1], 2, False) == [(), ()]


def test_free_ports_differ_and_are_not_those_of_outgoing_connections() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(20_000 <= port < 32_000 for port in ports)
