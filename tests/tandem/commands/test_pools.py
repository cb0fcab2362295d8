"""`tandem pools` against a real router with fake instances; what it prints, and its errors."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from protos.tandem.v1 import instance_pb2, pools_pb2
from router.pools.instance import LEFT
from tandem.cli import main
from tandem.client import channel, registry
from tandem.client.registry import RunningStack, StackFolder
from tandem.commands import pools
from tandem.commands.pools import _pick_text, _pools_as_dict, _pools_table
from tests.tandem.client.test_channel import frozen_server, notice_soon
from tests.tandem.commands.background import WEIGHTS, Background

pytestmark = pytest.mark.usefixtures("no_other_stack")


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ("pools", *args))
    return result.exit_code, result.output


def test_it_shows_a_table_of_both_pools(stack: Background) -> None:
    status, output = run("--admin", stack.admin_address)
    assert status == 0, output
    table, _, pools = output.partition("\n\n")
    assert pools.splitlines() == ["prefill: 1 ready", "decode: 2 ready"]
    header, *rows = [line.split() for line in table.splitlines()]
    assert header[:4] == ["POOL", "INSTANCE", "STATE", "WAITING"]
    assert [row[-2] for row in rows] == ["bfloat16+int8"] * 3
    assert [row[:5] for row in rows] == [
        ["prefill", "prefill-0", "ready", "0", "0"],
        ["decode", "decode-0", "ready", "0", "0"],
        ["decode", "decode-1", "ready", "1", "2"],
    ]


def test_programs_get_json(stack: Background) -> None:
    status, output = run("--admin", stack.admin_address, "--json")
    assert status == 0, output
    answer = json.loads(output)
    assert answer["pools"][1] == {
        "pool": "decode",
        "num_ready": 2,
        "size": None,
        "last_change": None,
        "autoscaler": None,
    }
    last = answer["instances"][-1]
    assert (last["pool"], last["instance"], last["out"]) == ("decode", "decode-1", None)
    assert (last["weights"], last["dtype"]) == (WEIGHTS, "bfloat16+int8")
    assert (last["load"]["num_waiting"], last["load"]["draining"]) == (1, False)


def test_a_router_that_freezes_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    notice_soon(monkeypatch, channel, "ADMIN_OPTIONS")
    with frozen_server(1) as address:
        status, output = run("--watch", "--admin", address)
    assert (status, "ping timeout" in output) == (1, True), output


def test_a_closed_standard_output_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    pools._watch(lambda name, request: [pools_pb2.WatchPoolsResponse()], 1.0, as_json=False)
    assert capsys.readouterr().err == "the router stopped\n"


def test_instances_with_several_weights_show_them() -> None:
    instances = [pools_pb2.PoolInstance(instance_id=name, weights_digest=name * 64) for name in ("a", "b", "")]
    header, *rows = _pools_table(pools_pb2.ListPoolsResponse(instances=instances)).splitlines()[:4]
    assert [line.split()[-1] for line in (header, *rows)] == ["WEIGHTS", "a" * 12, "b" * 12, "-"]
    assert "WEIGHTS" not in _pools_table(pools_pb2.ListPoolsResponse(instances=instances[1:]))


def test_blocks_that_are_held_for_a_reader_are_in_use() -> None:
    blocks = instance_pb2.BlockUsage(free=40, cached=20, running=10, held=25, quarantined=5)
    load = instance_pb2.WatchLoadResponse(blocks=blocks)
    instance = pools_pb2.PoolInstance(instance_id="prefill-0", num_blocks=100, load=load)
    assert " 40% of 100 " in _pools_table(pools_pb2.ListPoolsResponse(instances=[instance]))
    assert (
        _pools_as_dict(pools_pb2.ListPoolsResponse(instances=[instance]))["instances"][0]["load"]["num_used_blocks"]
        == 40
    )


def test_it_finds_the_stack_that_runs_here(stack: Background) -> None:
    folder = StackFolder()
    try:
        stacks = RunningStack(stack.address, str(folder.path), os.getpid(), "demo", {}, 1.0, stack.admin_address)
        registry.announce(stacks)
        assert run()[0] == 0
    finally:
        folder.remove()


def test_the_pick_for_an_adapter_is_explained(stack: Background) -> None:
    status, output = run("explain", "--tokens", "200", "--lora", "poet", "--admin", stack.admin_address)
    assert status == 0, output
    assert "does not have the adapter poet" in output
    assert re.search(r"→ +decode-1 ", output), output


def test_a_pick_is_explained(stack: Background) -> None:
    status, output = run("explain", "--tokens", "200", "--admin", stack.admin_address)
    assert status == 0, output
    lines = output.splitlines()
    assert lines[0] == "decode pool, lowest score first"
    assert lines[1].split() == ["→", "decode-0", "0", "1", "×", "queue", "0"]
    assert lines[2].split() == ["decode-1", "6", "1", "×", "queue", "6"]
    assert "It would be split between the pools: 200 " in lines[-1]
    assert run("--admin", stack.admin_address, "explain", "a short text")[1].splitlines()[-1].startswith("It would run")


def test_an_explanation_in_json_has_every_part(stack: Background) -> None:
    status, output = run("explain", "--tokens", "200", "--json", "--admin", stack.admin_address)
    assert status == 0, output
    explained = json.loads(output)
    assert explained["disaggregated"] is True
    assert explained["decode"][0]["picked"]
    assert explained["decode"][1]["parts"] == [{"scorer": "queue", "value": 6.0, "weight": 1.0}]


def test_an_explanation_shows_the_pairs_while_two_versions_run() -> None:
    new = pools_pb2.Candidate(instance_id="new", partners=["p-0", "p-1"])
    answer = pools_pb2.ExplainPickResponse(decode=[new, pools_pb2.Candidate(instance_id="old")], disaggregated=True)
    lines = _pick_text(answer).splitlines()
    assert lines[1].endswith("pairs with p-0, p-1")
    assert lines[2].endswith("pairs with no prefill instance")
    answer.decode[1].partners.extend(["p-0", "p-1"])
    assert "pairs with" not in _pick_text(answer)


def listed(*outs: str) -> pools_pb2.ListPoolsResponse:
    """A decode pool of the instances i-0, i-1 and so on."""
    instances = [
        pools_pb2.PoolInstance(instance_id=f"i-{number}", address=f"h:{number}", role=instance_pb2.ROLE_DECODE, out=out)
        for number, out in enumerate(outs)
    ]
    return pools_pb2.ListPoolsResponse(instances=instances)


def test_of_an_instance_that_leaves_its_pool_only_the_end_is_shown() -> None:
    """Its process closes its port and its load stream before the router removes it."""
    assert pools.LEFT == LEFT

    lines: list[str] = []
    changes = pools.InstanceChanges(listed("", ""), lines.append)
    for outs in ((LEFT, "lost"), ("its load stream failed: UNAVAILABLE", ""), ("starting: nothing listens", "")):
        changes.update(listed(*outs))
    changes.update(pools_pb2.ListPoolsResponse(instances=listed("", "").instances[1:]))
    assert lines == [f"  i-0 is out: {LEFT}", "  i-1 is out: lost", "  i-1 is ready", "  i-0 is gone"]


@pytest.mark.parametrize("first", ["", LEFT])
def test_an_instance_that_comes_back_to_its_pool_is_shown_again(first: str) -> None:
    lines: list[str] = []
    changes = pools.InstanceChanges(listed(first), lines.append)
    for out in (LEFT, "connecting", "", "draining", "", LEFT):
        changes.update(listed(out))
    known = [] if first else [f"  i-0 is out: {LEFT}"]
    shown = ["is ready", "is out: draining", "is ready", f"is out: {LEFT}"]
    assert lines == known + [f"  i-0 {one}" for one in shown]


def test_an_ejection_is_shown_once_while_it_counts_down() -> None:
    lines: list[str] = []
    changes = pools.InstanceChanges(listed(""), lines.append)
    for out in ("ejected for 30 s more", "ejected for 29 s more", "ejected for 9 s more", "", "ejected for 60 s more"):
        changes.update(listed(out))
    assert lines == ["  i-0 is out: ejected for 30 s more", "  i-0 is ready", "  i-0 is out: ejected for 60 s more"]


def test_an_instance_that_is_listed_by_its_other_address_has_neither_started_nor_gone() -> None:
    def listed(address: str, out: str, epoch: str = "first") -> pools_pb2.ListPoolsResponse:
        role, load = instance_pb2.ROLE_DECODE, instance_pb2.WatchLoadResponse(instance_epoch=epoch)
        one = pools_pb2.PoolInstance(instance_id="i-0", address=address, role=role, out=out, load=load)
        return pools_pb2.ListPoolsResponse(instances=[one])

    lines: list[str] = []
    changes = pools.InstanceChanges(listed("a:1", ""), lines.append)
    for address, out in (("b:1", ""), ("b:1", "draining"), ("a:1", "draining"), ("a:1", LEFT), ("b:1", LEFT)):
        changes.update(listed(address, out))
    assert lines == ["  i-0 is out: draining", f"  i-0 is out: {LEFT}"]
    lines.clear()
    changes.update(listed("e:1", LEFT))  # by an address that was not listed before
    assert lines == []
    for address, epoch in (("c:1", "second"), ("d:1", "third")):  # other processes with the same name
        lines.clear()
        changes.update(listed(address, "", epoch))
        assert lines == ["  i-0 is ready", "  i-0 is gone"]


def test_an_address_that_is_given_for_both_pools_does_not_change_all_the_time() -> None:
    foreign = pools_pb2.PoolInstance(address="a:1", role=instance_pb2.ROLE_PREFILL, out="its role is decode")
    load = instance_pb2.WatchLoadResponse(instance_epoch="first")
    ready = pools_pb2.PoolInstance(instance_id="i-0", address="a:1", role=instance_pb2.ROLE_DECODE, load=load)
    listed = pools_pb2.ListPoolsResponse(instances=[foreign, ready])
    lines: list[str] = []
    changes = pools.InstanceChanges(listed, lines.append)
    changes.update(listed)
    assert lines == []
    changes.update(pools_pb2.ListPoolsResponse(instances=[foreign]))
    assert lines == ["  i-0 is gone"]


def test_a_drain_begins_and_shows(stack: Background) -> None:
    status, output = run("drain", "decode-1", "--grace-s", "5", "--admin", stack.admin_address)
    try:
        assert (status, "decode-1 is draining, 0 running requests" in output) == (0, True)
        assert "resize" not in output, "nothing keeps these pools at a size"
        for _ in range(500):
            listed = json.loads(run("--admin", stack.admin_address, "--json")[1])["instances"]
            if listed[-1]["out"] == "draining":
                break
        assert listed[-1]["load"]["draining"]
        assert "ignored" in run("explain", "--tokens", "200", "--admin", stack.admin_address)[1]
    finally:
        stack.decode[1].behaviour.draining = False


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ((), "tandem up"),
        ((), "--admin host:port"),
        (("explain", "hi"), "--admin host:port"),
        (("--admin", ""), "admin: is empty; give host:port of the router's admin listener"),
        (("drain", "decode-0", "--admin", " "), "admin: is empty; give host:port of the router's admin listener"),
        (("--admin", "127.0.0.1:99999"), "admin: '127.0.0.1:99999' has no valid port; allowed: 1..65535"),
        (("--admin", "127.0.0.1:1"), "--admin-listen"),
        (("explain", "hi", "--tokens", "3"), "exclude each other"),
        (("explain", "--tokens", "0"), "'0'; allowed: an integer, 1 to 16777216"),
        (("explain", "--tokens", "9" * 20), "allowed: an integer, 1 to 16777216"),
        (("explain", "caf\udce9", "--admin", "127.0.0.1:1"), "'\\udce9' in position 3: surrogates not allowed"),
        (("explain", "hi", "--session", "\udce9", "--admin", "127.0.0.1:1"), "surrogates not allowed"),
        (("drain", "decode-\udce9", "--admin", "127.0.0.1:1"), "surrogates not allowed"),
        (("drain",), "NAME"),
        (("drain", "x", "--grace-s", "-1"), "allowed: a number, 0 to 3600"),
        (("drain", "x", "--grace-s", "3601"), "'3601'; allowed: a number, 0 to 3600"),
        (("resize",), "POOL=SIZE"),
        (("resize", "decode"), "write decode=3"),
        (("resize", "decode+1"), "write decode=3"),
        (("resize", "decode", "3"), "write decode=3"),
        (("resize", "decod=3"), "did you mean decode=3?"),
        (("resize", "=3"), "the pools are prefill and decode"),
        (("resize", "decode=x"), "decode=3"),
        (("resize", "decode="), "decode=3"),
        (("resize", "decode=+1"), "the new size of the pool"),
        (("resize", "decode=-1"), "the new size of the pool"),
        (("resize", "decode=99999"), "whole number"),
        (("resize", "decode=2", "decode=3"), "decode is named twice"),
        (("resize", "decode=2"), "tandem up"),
        (("resize", "decode=2", "--timeout", "0"), "allowed: a number, above 0"),
        (("--watch", "--interval", "0"), "allowed: a number, 0.1 to 60"),
        (("--json", "resize", "decode=2"), "options of resize follow its name"),
        (("--timeout", "3", "drain", "decode-1"), "--timeout in front of drain"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(args: tuple[str, ...], hint: str) -> None:
    status, output = run(*args)
    assert status != 0
    assert hint in output
    assert "Traceback" not in output


@pytest.mark.parametrize("command", [(), ("explain", "hi")])
def test_a_timeout_of_centuries_is_not_over_at_once(stack: Background, command: tuple[str, ...]) -> None:
    status, output = run(*command, "--timeout", "9999999999", "--admin", stack.admin_address)
    assert status == 0, output


def test_the_clients_port_is_distinguished_from_the_admin_listener(stack: Background) -> None:
    status, output = run("--admin", stack.address)
    assert status != 0
    assert f"the server at {stack.address} is not an admin listener" in output
    assert "--admin-listen" in output


@pytest.mark.parametrize(
    ("fields", "size", "shown"),
    [
        ({"leads": True, "desired_size": 3, "reason": "load 0.9"}, 2, "desired size 3; load 0.9"),
        (
            {"reason": "load 0.9; another router resizes"},
            2,
            "this router does not lead; load 0.9; another router resizes",
        ),
        ({"reason": "no observation yet"}, 2, "this router does not lead; no observation yet"),
        ({"reason": "the owner does not answer"}, None, "the owner does not answer"),
        ({"leads": True, "reason": "the pool has no owner"}, None, "the pool has no owner"),
    ],
)
def test_the_autoscalers_line_claims_no_leader_and_no_size_that_it_does_not_know(
    fields: dict[str, Any], size: int | None, shown: str
) -> None:
    status = pools_pb2.AutoscalerStatus(min_size=1, max_size=4, **fields)
    pool = pools_pb2.PoolStatus(role=instance_pb2.ROLE_DECODE, size=size, autoscaler=status)
    assert pools.pool_lines(pool)[1] == f"  autoscaler 1..4: {shown}"


def test_an_unknown_name_is_answered_with_the_nearest(stack: Background) -> None:
    status, output = run("drain", "decode-9", "--admin", stack.admin_address)
    assert status != 0
    assert "did you mean decode-" in output


@pytest.mark.parametrize("command", [(), ("explain",), ("drain",), ("resize",)])
def test_help_has_examples(command: tuple[str, ...]) -> None:
    status, output = run(*command, "--help")
    assert status == 0
    assert output.count("tandem pools") >= 2
