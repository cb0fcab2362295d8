"""`tandem bench`: measurements, one module per subcommand. They import what they measure when they are called."""

from __future__ import annotations

import click

from tandem.commands.bench import latency, serve, throughput, transfer


@click.group("bench")
def command() -> None:
    """Measure what is served here, and this machine.

    \b
    Examples:
      tandem bench serve                         latency and throughput of the running stack under load
      tandem bench serve --rate 1,2,4,8          over the request rate
      tandem bench transfer                      how fast KV blocks move, by connector
      tandem bench latency                       one batch on the engine alone
      tandem bench throughput                    many requests on the engine alone
    """


command.add_command(serve.command)
command.add_command(transfer.command)
command.add_command(latency.command)
command.add_command(throughput.command)
