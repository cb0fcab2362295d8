"""`tandem bench`: measurements. The subcommands import what they measure when they are called."""

from __future__ import annotations

import click

from tandem.commands import Group
from tandem.commands.bench import offline, serve, transfer


@click.group("bench", cls=Group)
def command() -> None:
    """Measure a running stack under load, KV transfers, and the engine alone.

    \b
    Examples:
      tandem bench serve                         latency and throughput of the running stack under load
      tandem bench serve --rate 1,2,4,8          over the request rate
      tandem bench transfer                      the speed of KV transfers, by connector
      tandem bench latency                       one batch on the engine alone
      tandem bench throughput                    many requests on the engine alone
    """


command.add_command(serve.command)
command.add_command(transfer.command)
command.add_command(offline.latency)
command.add_command(offline.throughput)
