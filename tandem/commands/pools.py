"""`tandem pools`: shows and resizes the pools, explains a pick, drains an instance.

It calls the router's admin listener, which is not the clients' port.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from protos.tandem.v1 import common_pb2, instance_pb2, pools_pb2
from tandem.commands import Group
from tandem.commands.admin import CALL_TIMEOUT_S, ROLES, admin_calls, admin_options, pool_name
from tandem.commands.options import (
    INTERRUPTED,
    FloatRange,
    IntRange,
    counted,
    given_options,
    is_terminal,
    option_group,
)
from tandem.local_stack.settings import unknown_pool

_CLEAR_SCREEN = "\x1b[H\x1b[J"
_POLL_INTERVAL_S = 0.25
_MAX_TOKENS = 1 << 24
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
_timeout_option = click.option(
    "--timeout", "timeout_s", type=FloatRange(min=0, min_open=True), default=CALL_TIMEOUT_S, show_default=True,
    help="Seconds to wait for the answer.",
)  # fmt: skip
_call_options = option_group(admin_options, _timeout_option, _json_option)
"""Those of a command that makes a single call."""


@click.group("pools", cls=Group, invoke_without_command=True)
@click.option("--watch", is_flag=True, help="Show them repeatedly, until Ctrl-C.")
@click.option(
    "--interval", "interval_s", type=FloatRange(0.1, 60.0), default=1.0, show_default=True,
    help="With --watch: seconds between two updates.",
)  # fmt: skip
@_call_options
@click.pass_context
def command(context: click.Context, watch: bool, interval_s: float, timeout_s: float, as_json: bool) -> None:
    """Show the instances of a running stack (state, queue, KV memory) and the desired sizes of its pools.

    \b
    Examples:
      tandem pools                                      a table of both pools
      tandem pools --watch                              the same, live
      tandem pools --json                               the same for programs; with --watch a line for each update
      tandem pools --admin 10.0.0.7:50052               a router elsewhere
      tandem pools resize decode=3                      start or drain instances until there are three
      tandem pools explain "Once upon a time"           where it would run, and why
      tandem pools explain --tokens 4000                the same for any prompt of 4000 tokens
      tandem pools drain decode-1                       end its process without losing a request
    """
    if context.invoked_subcommand is not None:
        _reject_own_options(context, context.invoked_subcommand)
        return
    with admin_calls() as call:
        if watch:
            _watch(call, interval_s, as_json)
        else:
            answer = call("ListPools", pools_pb2.ListPoolsRequest(), timeout=timeout_s)
            click.echo(json.dumps(_pools_as_dict(answer), indent=2) if as_json else _pools_table(answer))


def _reject_own_options(context: click.Context, subcommand: str) -> None:
    """Those of the table, which have no effect on a subcommand; raises UsageError."""
    for option in given_options(context):
        if option.expose_value:
            raise click.UsageError(
                f"{option.opts[0]} in front of {subcommand} is of `tandem pools` alone; "
                f"options of {subcommand} follow its name"
            )


def _watch(call: Callable[..., Any], interval_s: float, as_json: bool) -> None:
    """Until Ctrl-C, or the router stops. On a terminal each table replaces the last one."""
    try:
        for answer in call("WatchPools", pools_pb2.WatchPoolsRequest(interval_s=interval_s)):
            if as_json:
                click.echo(json.dumps(_pools_as_dict(answer.pools)))
            else:
                click.echo((_CLEAR_SCREEN if is_terminal(sys.stdout) else "") + _pools_table(answer.pools) + "\n")
    except KeyboardInterrupt:
        return
    click.echo("the router stopped", err=True)


@command.command("resize")
@click.argument("sizes", metavar="POOL=SIZE...", nargs=-1, required=True)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the pools have these sizes.")
@click.option(
    "--timeout", "timeout_s", type=FloatRange(min=0, min_open=True), default=600.0, show_default=True,
    help="Seconds to wait for that. The resize continues in any case.",
)  # fmt: skip
@admin_options
@_json_option
def _resize(sizes: tuple[str, ...], wait: bool, timeout_s: float, as_json: bool) -> None:
    """Change the size of one pool, or of both.

    New instances are started. Of those to remove, the least loaded drain: they accept no new requests, finish their
    running ones (or hand them over), and end. No request is lost. Ctrl-C ends the waiting, not the resize.

    \b
    Examples:
      tandem pools resize decode=3
      tandem pools resize decode=1 prefill=2            both start together, or neither does
      tandem pools resize decode=3 --no-wait            return as soon as it has started
      tandem pools resize prefill=0                     decode instances also prefill
    """
    desired = _parse_sizes(sizes)
    request = pools_pb2.ResizePoolsRequest(
        sizes=[pools_pb2.PoolSize(role=ROLES[pool], size=size) for pool, size in desired.items()]
    )

    def echo(line: str) -> None:
        click.echo(line, err=as_json)

    with admin_calls() as call:
        before = call("ListPools", pools_pb2.ListPoolsRequest(), timeout=CALL_TIMEOUT_S)
        changes = [
            {"pool": pool, "previous_size": change.previous_size, "size": change.size}
            for pool, change in zip(desired, call("ResizePools", request, timeout=CALL_TIMEOUT_S).changes, strict=True)
        ]
        for change in changes:
            echo(f"{change['pool']}: {change['previous_size']} → {change['size']}")
        if wait:
            _wait_resized(call, desired, InstanceChanges(before, echo), timeout_s)
    if as_json:
        click.echo(json.dumps({"changes": changes, "complete": wait}))


def _parse_sizes(arguments: Iterable[str]) -> dict[str, int]:
    """Sizes by pool, of arguments like decode=3. Raises UsageError, which says what to type."""
    sizes: dict[str, int] = {}
    for argument in arguments:
        pool, equals, size = argument.partition("=")
        if not equals:
            raise click.UsageError(f"{argument!r} is not POOL=SIZE: write decode=3, with the new size of the pool")
        if pool not in ROLES:
            raise click.UsageError(unknown_pool(pool, f"={size}"))
        if not (size.isascii() and size.isdecimal() and len(size) <= 4):
            raise click.UsageError(f"{argument!r}: the size must be a whole number, the new size of the pool: {pool}=3")
        if pool in sizes:
            raise click.UsageError(f"{pool} is named twice: give one size")
        sizes[pool] = int(size)
    return sizes


LEFT = "its address has left the pool"
"""`out` of an instance that drains because its pool has become smaller, as the router words it."""


class InstanceChanges:
    """Reports once for each instance that it starts, is ready, is out and is gone. Of one that leaves its pool only the
    end is of interest: that its process ends before its last report is known is no failure. One with two addresses is
    listed by either of them, and is one instance."""

    def __init__(self, before: pools_pb2.ListPoolsResponse, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._shown = {
            place_of(one): _Shown(one.instance_id or one.address, one.out, _process(one)) for one in before.instances
        }

    def update(self, now: pools_pb2.ListPoolsResponse) -> None:
        self._follow_addresses(now)
        for one in now.instances:
            before = self._shown.get(place_of(one))
            name, out = one.instance_id or (before.name if before else one.address), one.out
            if before is None and out not in ("", LEFT):
                self._echo(f"  {pool_name(one.role)} instance at {one.address} starts")
            elif before is not None and before.out == LEFT and out:
                out = LEFT  # it ends, or its address has come back and it is not ready yet
            elif before is None or _without_digits(out) != _without_digits(before.out):
                self._echo(f"  {name} {'is ready' if not out else f'is out: {out}'}")
            self._shown[place_of(one)] = _Shown(name, out, _process(one))
        for place in self._shown.keys() - set(map(place_of, now.instances)):
            self._echo(f"  {self._shown.pop(place).name} is gone")

    def _follow_addresses(self, now: pools_pb2.ListPoolsResponse) -> None:
        """What is known of a process that is listed by its other address applies to that one."""
        unlisted = self._shown.keys() - set(map(place_of, now.instances))
        places = {self._shown[place].process: place for place in unlisted}
        for one in now.instances:
            before = places.get(_process(one))
            if before is not None and place_of(one) not in self._shown and one.load.instance_epoch:
                self._shown[place_of(one)] = self._shown.pop(before)


class _Shown(NamedTuple):
    """What was last shown of an instance."""

    name: str
    out: str
    process: tuple[int, str]


def place_of(one: pools_pb2.PoolInstance) -> str:
    """Its pool and address, for a key: an address that is given for both pools is listed in each."""
    return f"{pool_name(one.role)} {one.address}"


def _process(one: pools_pb2.PoolInstance) -> tuple[int, str]:
    """Its pool and, once it has reported, its process."""
    return one.role, one.load.instance_epoch


def _without_digits(out: str) -> str:
    """`out` without what an ejection counts down."""
    return "".join(char for char in out if not char.isdigit())


def _wait_resized(
    call: Callable[..., Any], desired: Mapping[str, int], changes: InstanceChanges, timeout_s: float
) -> None:
    """Returns when the pools have these sizes; raises ClickException if they will not, or not in time."""
    import grpc

    watch = call("WatchPools", pools_pb2.WatchPoolsRequest(interval_s=_POLL_INTERVAL_S), timeout=timeout_s)
    try:
        for answer in watch:
            changes.update(answer.pools)
            if _is_resized(answer.pools, desired):
                return
        raise click.ClickException("the router stopped; the resize continues without it")
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise click.ClickException(
            f"not complete after {timeout_s:g} s; the resize continues, `tandem pools` shows its progress"
        ) from None
    except KeyboardInterrupt:
        click.echo("stopped waiting; the resize continues, `tandem pools` shows its progress", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        watch.cancel()


def _is_resized(answer: pools_pb2.ListPoolsResponse, desired: Mapping[str, int]) -> bool:
    """Whether each pool has exactly as many instances as desired, and all are ready."""
    complete = True
    for pool in answer.pools:
        name = pool_name(pool.role)
        if name not in desired:
            continue
        if pool.HasField("size") and pool.size != desired[name]:
            raise click.ClickException(
                f"the desired size of the {name} pool is now {pool.size}, not {desired[name]}: another resize changed "
                "it, or an instance could not start; the output of `tandem up` says which"
            )
        num_present = sum(pool_name(one.role) == name for one in answer.instances)
        complete = complete and pool.num_ready == num_present == desired[name]
    return complete


@command.command("explain")
@click.argument("prompt", required=False)
@click.option(
    "--tokens", "num_tokens", type=IntRange(1, _MAX_TOKENS), help="Instead of PROMPT: a prompt of so many tokens."
)
@click.option("--session", default="", metavar="NAME", help="As if it belonged to this session.")
@click.option("--cache-salt", default="", metavar="TEXT", help="As if it were sent with this salt.")
@click.option("--lora", default="", metavar="NAME", help="As if it were for this LoRA adapter.")
@_call_options
def _explain(prompt: str | None, num_tokens: int | None, timeout_s: float, as_json: bool, **fields: Any) -> None:
    """Say where PROMPT would run now: every instance's score and its parts, ignored instances, and whether it is split.

    Nothing is generated. Without PROMPT or --tokens it is a prompt of one token.

    \b
    Examples:
      tandem pools explain "Once upon a time"
      tandem pools explain --tokens 4000 --json
      tandem pools explain "And then?" --session customer-7
    """
    if prompt is not None and num_tokens is not None:
        raise click.UsageError("PROMPT and --tokens exclude each other")
    with admin_calls() as call:
        request = pools_pb2.ExplainPickRequest(text=prompt or "", **fields)
        if prompt is None:
            request.token_ids.CopyFrom(common_pb2.TokenIds(ids=[0] * (num_tokens or 1)))
        answer = call("ExplainPick", request, timeout=timeout_s)
    click.echo(json.dumps(_pick_as_dict(answer), indent=2) if as_json else _pick_text(answer))


def _pick_text(answer: pools_pb2.ExplainPickResponse) -> str:
    lines: list[str] = []
    is_mixed = len({tuple(one.partners) for one in answer.decode if not one.rejected}) > 1
    for pool, candidates in (("decode", answer.decode), ("prefill", answer.prefill)):
        lines += [f"{pool} pool, lowest score first" if candidates else f"{pool} pool: empty"]
        rows = [
            (
                "  →" if one.picked else "   ",
                one.instance_id or one.address,
                "ignored" if one.rejected else f"{one.score:g}",
                one.rejected or _scored(one, with_partners=is_mixed and pool == "decode"),
            )
            for one in candidates
        ]
        lines += [_aligned(rows, right={2})] if rows else []
    if not answer.HasField("disaggregated"):
        lines.append(f"It could not be served now: {answer.reason}.")
    else:
        pool = "prefill" if any(one.picked for one in answer.prefill) else "decode"
        verb = "would be split between the pools" if answer.disaggregated else f"would run on the {pool} instance alone"
        lines.append(f"It {verb}: {answer.reason}.")
    return "\n".join(lines)


def _scored(candidate: pools_pb2.Candidate, *, with_partners: bool) -> str:
    """The parts of its score, and while the instances do not all pair with each other, those that it pairs with."""
    parts = " + ".join(f"{part.weight:g} × {part.scorer} {part.value:g}" for part in candidate.parts)
    partners = ", ".join(candidate.partners) or "no prefill instance"
    return f"{parts}; pairs with {partners}" if with_partners else parts


def _pick_as_dict(answer: pools_pb2.ExplainPickResponse) -> dict[str, Any]:
    def candidate(one: pools_pb2.Candidate) -> dict[str, Any]:
        parts = [_fields(part, "scorer", "value", "weight") for part in one.parts]
        result = {"rejected": one.rejected} if one.rejected else {"score": one.score, "parts": parts}
        return {"instance": one.instance_id, "address": one.address, "picked": one.picked, **result}

    return {
        "decode": [candidate(one) | {"partners": [*one.partners]} for one in answer.decode],
        "prefill": [candidate(one) for one in answer.prefill],
        "disaggregated": answer.disaggregated if answer.HasField("disaggregated") else None,
        "reason": answer.reason,
    }


@command.command("drain")
@click.argument("name")
@click.option(
    "--grace-s", type=FloatRange(0, 3600), default=0.0,
    help="Seconds that its running requests may take; 0: the instance's own setting.  [default: 0]",
)  # fmt: skip
@_call_options
def _drain(name: str, grace_s: float, timeout_s: float, as_json: bool) -> None:
    """Drain the instance NAME (or its address): no new requests go there, running ones finish, then its process ends.

    It returns as soon as the drain has started; `tandem pools` shows its progress. The desired size of its pool stays:
    a local stack, or Kubernetes, starts it again. To have fewer instances, use `tandem pools resize`.

    \b
    Examples:
      tandem pools drain decode-1
      tandem pools drain 10.0.0.9:7000 --grace-s 120
    """
    with admin_calls() as call:
        request = pools_pb2.DrainInstanceRequest(instance=name, grace_s=grace_s)
        listed = call("ListPools", pools_pb2.ListPoolsRequest(), timeout=timeout_s)
        answer = call("DrainInstance", request, timeout=timeout_s)
    if as_json:
        click.echo(json.dumps({"instance": answer.instance_id, "num_unfinished": answer.num_unfinished}))
    else:
        requests = counted(answer.num_unfinished, "running request")
        click.echo(f"{answer.instance_id} is draining, {requests}. `tandem pools` shows its progress.")
        click.echo(restart_hint(listed, answer.instance_id), nl=False)


def restart_hint(listed: pools_pb2.ListPoolsResponse, instance_id: str) -> str:
    """What follows the drain where something keeps the pool at its size; empty elsewhere."""
    roles = {one.role for one in listed.instances if one.instance_id == instance_id}
    return "".join(
        f"The {pool_name(pool.role)} pool keeps its size, {pool.size}, so the instance is started again once it has "
        f"ended. To make the pool smaller: tandem pools resize {pool_name(pool.role)}=SIZE\n"
        for pool in listed.pools
        if pool.role in roles and pool.HasField("size")
    )


def _pools_table(answer: pools_pb2.ListPoolsResponse) -> str:
    """A row for each instance, then a line for each pool."""
    rows: list[tuple[str, ...]] = [
        ("POOL", "INSTANCE", "STATE", "WAITING", "RUNNING", "LOADING", "KV USED", "OURS", "DTYPE", "ADDRESS")
    ]
    rows += [instance_row(one) for one in answer.instances]
    if len({one.weights_digest for one in answer.instances if one.weights_digest}) > 1:
        weights = ["WEIGHTS", *(one.weights_digest[:12] or "-" for one in answer.instances)]
        rows = [(*row, one) for row, one in zip(rows, weights, strict=True)]
    instances = "the pools are empty" if len(rows) == 1 else _aligned(rows, right={3, 4, 5, 6, 7})
    return "\n".join([instances, "", *(line for pool in answer.pools for line in pool_lines(pool))])


def instance_row(one: pools_pb2.PoolInstance) -> tuple[str, ...]:
    has_load, load = one.HasField("load"), one.load
    numbers = [load.num_waiting, load.num_running, load.num_loading] if has_load else ["-"] * 3
    used = f"{_num_used_blocks(load) / one.num_blocks:.0%} of {one.num_blocks}" if has_load and one.num_blocks else "-"
    return (
        pool_name(one.role),
        one.instance_id or "-",
        one.out or "ready",
        *map(str, numbers),
        used,
        str(one.num_running_here),
        one.dtype or "-",
        one.address,
    )


def _num_used_blocks(load: instance_pb2.WatchLoadResponse) -> int:
    """Those that are neither free nor cached, as `vllm:kv_cache_usage_perc` counts them."""
    return load.blocks.running + load.blocks.held + load.blocks.quarantined


def pool_lines(pool: pools_pb2.PoolStatus) -> list[str]:
    """Ready and desired size, the last change, and the autoscaler's state."""
    size = f" of {pool.size}" if pool.HasField("size") else ""
    lines = [f"{pool_name(pool.role)}: {pool.num_ready}{size} ready"]
    if pool.HasField("last_change"):
        lines[0] += f"; {change_text(pool.last_change, f', {format_age(pool.last_change.age_s)} ago')}"
    if pool.HasField("autoscaler"):
        status = pool.autoscaler
        decision = f"desired size {status.desired_size}; " if status.leads else "this router does not lead; "
        decision = decision if pool.HasField("size") else ""  # no owner, or it does not answer: the reason says so
        lines.append(f"  autoscaler {status.min_size}..{status.max_size}: {decision}{status.reason}")
    return lines


def change_text(change: pools_pb2.PoolChange, ago: str = "") -> str:
    """A resize: its sizes, who made it and, of the autoscaler, why."""
    reason = f": {change.reason}" if change.reason else ""
    return f"{change.previous_size} → {change.size} by the {change.cause}{ago}{reason}"


def format_age(seconds: float) -> str:
    """A duration in whole seconds, minutes or hours."""
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _pools_as_dict(answer: pools_pb2.ListPoolsResponse) -> dict[str, Any]:
    return {
        "pools": [_pool_as_dict(pool) for pool in answer.pools],
        "instances": [_instance_as_dict(one) for one in answer.instances],
    }


def _pool_as_dict(pool: pools_pb2.PoolStatus) -> dict[str, Any]:
    change = _fields(pool.last_change, "previous_size", "size", "cause", "reason", "age_s")
    autoscaler = _fields(pool.autoscaler, "min_size", "max_size", "leads", "desired_size", "reason", "age_s")
    return {
        "pool": pool_name(pool.role),
        "num_ready": pool.num_ready,
        "size": pool.size if pool.HasField("size") else None,
        "last_change": change if pool.HasField("last_change") else None,
        "autoscaler": autoscaler if pool.HasField("autoscaler") else None,
    }


def _instance_as_dict(instance: pools_pb2.PoolInstance) -> dict[str, Any]:
    load = instance.load
    report = {
        **_fields(load, "num_waiting", "num_running", "num_loading", "num_waiting_tokens"),
        "num_blocks": instance.num_blocks,
        "num_used_blocks": _num_used_blocks(load),
        "num_cached_blocks": load.blocks.cached,
        **_fields(load, "step_s", "draining"),
    }
    return {
        "pool": pool_name(instance.role),
        "instance": instance.instance_id,
        "address": instance.address,
        "out": instance.out or None,
        "weights": instance.weights_digest or None,
        "dtype": instance.dtype or None,
        "num_running_here": instance.num_running_here,
        "load": report if instance.HasField("load") else None,
    }


def _fields(message: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def _aligned(rows: Sequence[Sequence[str]], right: set[int]) -> str:
    """A table of equally long rows; the columns in `right` are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = (
        [text.rjust(width) if column in right else text.ljust(width) for column, (text, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    )
    return "\n".join("  ".join(row).rstrip() for row in cells)
