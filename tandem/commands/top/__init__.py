"""`tandem top`: the pools of a running stack on a full screen."""

from __future__ import annotations

import importlib.util
import sys
import time

import click

from engine.errors import to_install
from tandem.commands.admin import CALL_TIMEOUT_S, admin_calls, admin_options, admin_target
from tandem.commands.options import FloatRange, is_terminal


@click.command("top")
@click.option(
    "--interval", "interval_s", type=FloatRange(0.1, 60.0), default=1.0, show_default=True,
    help="Seconds between two updates.",
)  # fmt: skip
@click.option(
    "--metrics", metavar="HOST:PORT",
    help="For TTFT and TPOT: the metrics port (--metrics-listen); the HTTP port only of a router with one worker and "
    "neither TLS nor tokens; absent: that of the stack on this machine.",
)  # fmt: skip
@admin_options
def command(interval_s: float, metrics: str | None) -> None:
    """Show pools, instances, load and tokens per second on a full screen; resize and drain by key.

    + and - change the size of the selected instance's pool by one, d drains the instance; each asks before it acts.
    Requires textual, the extra `top`, which `make run` installs. `tandem pools --watch` shows a plain table without it.

    \b
    Examples:
      tandem top
      tandem top --admin 10.0.0.7:50052                           a router elsewhere
      tandem top --admin 10.0.0.7:50052 --metrics 10.0.0.7:9090   with its TTFT and TPOT
    """
    if importlib.util.find_spec("textual") is None:
        raise click.ClickException(
            f"tandem top requires textual: {to_install('top')}; `tandem pools --watch` needs nothing more"
        )
    from protos.tandem.v1 import pools_pb2
    from tandem.client.registry import metrics_address_of

    with admin_calls() as call:  # a wrong address is an error of the command line, not of the screen
        first = call("ListPools", pools_pb2.ListPoolsRequest(), timeout=CALL_TIMEOUT_S)
    read_at_s = time.monotonic()  # the import of the screen takes a while
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise click.ClickException("tandem top needs a terminal; `tandem pools` and `tandem pools --watch` do not")
    from tandem.commands.top.screen import TopApp

    address, credentials = admin_target()
    metrics = metrics or metrics_address_of(address)
    TopApp(address, credentials, first, read_at_s=read_at_s, interval_s=interval_s, metrics=metrics).run()
