"""`tandem pools`: the instances as their router sees them; why a request would go where; and an instance's drain.

It talks to the router's admin listener, which is not the clients' port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from protos.tandem.v1 import pools_pb2

F = TypeVar("F", bound=Callable[..., Any])
_PORT_HINT = (
    "give the router's admin address, which is not its clients' port: `tandem up` tells it, and "
    "`python -m router --admin-listen host:port` sets it"
)


def _reaching_the_router(function: F) -> F:
    """The options of everything that asks the router."""
    admin = click.option(
        "--admin", metavar="HOST:PORT", help="The router's admin address; absent: the stack that runs on this machine."
    )
    timeout = click.option(
        "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
        help="Seconds to wait for the answer.",
    )  # fmt: skip
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    return admin(timeout(as_json(function)))


@click.group("pools", invoke_without_command=True)
@_reaching_the_router
@click.pass_context
def command(context: click.Context, admin: str | None, timeout_s: float, as_json: bool) -> None:
    """Show the instances of a running stack: state, queue, KV memory.

    \b
    Examples:
      tandem pools                                      a table of both pools
      tandem pools --json                               the same for programs
      tandem pools --admin 10.0.0.7:7001                a router elsewhere
      tandem pools explain "Once upon a time"           where it would run, and why
      tandem pools explain --tokens 4000                the same for any prompt of 4000 tokens
      tandem pools drain decode-1                       take it out without losing a request
    """
    context.obj = admin
    if context.invoked_subcommand is not None:
        return
    from protos.tandem.v1 import pools_pb2

    answer = _call(admin, timeout_s, "ListPools", pools_pb2.ListPoolsRequest())
    click.echo(json.dumps([_as_dict(one) for one in answer.instances], indent=2) if as_json else _table(answer))


@command.command("explain")
@click.argument("prompt", required=False)
@click.option(
    "--tokens", "num_tokens", type=click.IntRange(min=1), help="In place of PROMPT: any prompt of so many tokens."
)
@click.option("--session", default="", metavar="NAME", help="As if it belonged to this session.")
@click.option("--cache-salt", default="", metavar="TEXT", help="As if it were sent with this salt.")
@_reaching_the_router
@click.pass_obj
def explain(
    outer_admin: str | None,
    prompt: str | None,
    num_tokens: int | None,
    session: str,
    cache_salt: str,
    admin: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Say where PROMPT would run now: every instance's score and its parts, who was left out, and whether it is split.

    Nothing is generated. Without PROMPT or --tokens it is a prompt of one token.

    \b
    Examples:
      tandem pools explain "Once upon a time"
      tandem pools explain --tokens 4000 --json
      tandem pools explain "And then?" --session customer-7
    """
    from protos.tandem.v1 import common_pb2, pools_pb2

    if prompt is not None and num_tokens is not None:
        raise click.UsageError("PROMPT and --tokens exclude each other")
    request = pools_pb2.ExplainPickRequest(session=session, cache_salt=cache_salt, text=prompt or "")
    if prompt is None:
        request.token_ids.CopyFrom(common_pb2.TokenIds(ids=[0] * (num_tokens or 1)))
    answer = _call(admin or outer_admin, timeout_s, "ExplainPick", request)
    click.echo(json.dumps(_explained_as_dict(answer), indent=2) if as_json else _explained(answer))


@command.command("drain")
@click.argument("name")
@click.option(
    "--grace-s",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds that its running requests may take; 0: the instance's own setting.  [default: 0]",
)
@_reaching_the_router
@click.pass_obj
def drain(
    outer_admin: str | None, name: str, grace_s: float, admin: str | None, timeout_s: float, as_json: bool
) -> None:
    """Take the instance NAME (or its address) out: nothing new goes there, what runs finishes, then its process ends.

    It answers as soon as the drain has begun; `tandem pools` shows how far it is.

    \b
    Examples:
      tandem pools drain decode-1
      tandem pools drain 10.0.0.9:7000 --grace-s 120
    """
    from protos.tandem.v1 import pools_pb2

    request = pools_pb2.DrainInstanceRequest(instance=name, grace_s=grace_s)
    answer = _call(admin or outer_admin, timeout_s, "DrainInstance", request)
    if as_json:
        click.echo(json.dumps({"instance": answer.instance_id, "num_unfinished": answer.num_unfinished}))
    else:
        requests = (
            "1 request still runs" if answer.num_unfinished == 1 else f"{answer.num_unfinished} requests still run"
        )
        click.echo(f"{answer.instance_id} drains; {requests} there. `tandem pools` shows how far it is.")


def _call(admin: str | None, timeout_s: float, method: str, request: Any) -> Any:
    """One answer of the admin listener; raises ClickException with what to type."""
    import grpc

    from protos.tandem.v1 import pools_pb2_grpc
    from tandem.errors import TandemError, from_rpc
    from tandem.running import running_admin_address

    try:
        address = admin or running_admin_address()
        with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            stub: Any = pools_pb2_grpc.PoolsServiceStub(channel)  # type: ignore[arg-type]  # typed for asyncio alone
            try:
                return getattr(stub, method)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                raise from_rpc(error, address) from error
    except TandemError as error:
        if error.status == "UNAVAILABLE" and error.message.startswith("no router answers"):
            raise click.ClickException(f"nothing answers at {address}: {_PORT_HINT}") from None
        if error.status == "UNIMPLEMENTED":
            raise click.ClickException(
                f"what answers at {address} does not know `tandem pools`: {_PORT_HINT}"
            ) from None
        raise click.ClickException(error.message) from None


def _table(answer: pools_pb2.ListPoolsResponse) -> str:
    rows: list[tuple[str, ...]] = [
        ("POOL", "INSTANCE", "STATE", "WAITING", "RUNNING", "LOADING", "KV USED", "OURS", "ADDRESS")
    ]
    for one in answer.instances:
        told = one.HasField("load")
        load = one.load
        numbers = [load.num_waiting, load.num_running, load.num_loading] if told else ["-"] * 3
        used = f"{load.blocks.running / one.num_blocks:.0%} of {one.num_blocks}" if told and one.num_blocks else "-"
        rows.append(
            (
                _pool(one),
                one.instance_id or "-",
                one.out or "ready",
                *map(str, numbers),
                used,
                str(one.num_running_here),
                one.address,
            )
        )
    if len(rows) == 1:
        return "the pools are empty"
    return _aligned(rows, right={3, 4, 5, 6, 7})


def _explained(answer: pools_pb2.ExplainPickResponse) -> str:
    lines: list[str] = []
    for pool, candidates in (("decode", answer.decode), ("prefill", answer.prefill)):
        lines += [f"{pool} pool, lowest score first" if candidates else f"{pool} pool: empty"]
        rows = [
            (
                "  →" if one.picked else "   ",
                one.instance_id or one.address,
                "left out" if one.rejected else f"{one.score:g}",
                one.rejected or " + ".join(f"{part.weight:g} × {part.scorer} {part.value:g}" for part in one.parts),
            )
            for one in candidates
        ]
        lines += [_aligned(rows, right={2})] if rows else []
    if not answer.HasField("disaggregated"):
        lines.append(f"It could not be served now: {answer.reason}.")
    else:
        verb = "would be split between the pools" if answer.disaggregated else "would run at the decode instance alone"
        lines.append(f"It {verb}: {answer.reason}.")
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]], right: set[int]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = (
        [text.rjust(width) if column in right else text.ljust(width) for column, (text, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    )
    return "\n".join("  ".join(row).rstrip() for row in cells)


def _pool(instance: pools_pb2.PoolInstance) -> str:
    from protos.tandem.v1 import instance_pb2

    return {instance_pb2.ROLE_PREFILL: "prefill", instance_pb2.ROLE_DECODE: "decode"}.get(instance.role, "-")


def _as_dict(instance: pools_pb2.PoolInstance) -> dict[str, Any]:
    load = instance.load
    known = {
        "num_waiting": load.num_waiting,
        "num_running": load.num_running,
        "num_loading": load.num_loading,
        "num_waiting_tokens": load.num_waiting_tokens,
        "num_blocks": instance.num_blocks,
        "num_used_blocks": load.blocks.running,
        "num_cached_blocks": load.blocks.cached,
        "step_s": load.step_s,
        "draining": load.draining,
    }
    return {
        "pool": _pool(instance),
        "instance": instance.instance_id,
        "address": instance.address,
        "out": instance.out or None,
        "num_running_here": instance.num_running_here,
        "load": known if instance.HasField("load") else None,
    }


def _explained_as_dict(answer: pools_pb2.ExplainPickResponse) -> dict[str, Any]:
    def candidate(one: pools_pb2.Candidate) -> dict[str, Any]:
        parts = [{"scorer": part.scorer, "value": part.value, "weight": part.weight} for part in one.parts]
        standing = {"rejected": one.rejected} if one.rejected else {"score": one.score, "parts": parts}
        return {"instance": one.instance_id, "address": one.address, "picked": one.picked, **standing}

    return {
        "decode": [candidate(one) for one in answer.decode],
        "prefill": [candidate(one) for one in answer.prefill],
        "disaggregated": answer.disaggregated if answer.HasField("disaggregated") else None,
        "reason": answer.reason,
    }
