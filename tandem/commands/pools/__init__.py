"""`tandem pools`: the instances as their router sees them; other sizes; why a request would go where; a drain.

It talks to the router's admin listener, which is not the clients' port.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from tandem.commands.pools.drain import drain
from tandem.commands.pools.explain import explain
from tandem.commands.pools.listing import as_dict, table
from tandem.commands.pools.reach import operating, reaching_the_router
from tandem.commands.pools.resize import resize

_CLEAR_SCREEN = "\x1b[H\x1b[J"


@click.group("pools", invoke_without_command=True)
@click.option("--watch", is_flag=True, help="Show them again and again, until Ctrl-C.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 60.0),
    default=1.0,
    show_default=True,
    help="With --watch: seconds between two looks.",
)
@reaching_the_router
@click.pass_context
def command(
    context: click.Context, watch: bool, interval_s: float, admin: str | None, timeout_s: float, as_json: bool
) -> None:
    """Show the instances of a running stack (state, queue, KV memory) and how many there are to be.

    \b
    Examples:
      tandem pools                                      a table of both pools
      tandem pools --watch                              the same, live
      tandem pools --json                               the same for programs; with --watch a line each time
      tandem pools --admin 10.0.0.7:7001                a router elsewhere
      tandem pools resize decode=3                      start or drain instances until there are three
      tandem pools explain "Once upon a time"           where it would run, and why
      tandem pools explain --tokens 4000                the same for any prompt of 4000 tokens
      tandem pools drain decode-1                       take it out without losing a request
    """
    context.obj = admin
    if context.invoked_subcommand is not None:
        return
    from protos.tandem.v1 import pools_pb2

    with operating(admin) as stub:
        if watch:
            _watch(stub, interval_s, as_json)
        else:
            answer = stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=timeout_s)
            click.echo(json.dumps(as_dict(answer), indent=2) if as_json else table(answer))


for _subcommand in (resize, explain, drain):
    command.add_command(_subcommand)


def _watch(stub: Any, interval_s: float, as_json: bool) -> None:
    """Until Ctrl-C, or the router ends. On a terminal each table takes the place of the last one."""
    from protos.tandem.v1 import pools_pb2

    try:
        for answer in stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=interval_s)):
            if as_json:
                click.echo(json.dumps(as_dict(answer.pools)))
            else:
                click.echo((_CLEAR_SCREEN if sys.stdout.isatty() else "") + table(answer.pools) + "\n")
    except KeyboardInterrupt:
        return
    click.echo("the router ends", err=True)
