"""`tandem pools drain`: one instance is taken out without losing a request."""

from __future__ import annotations

import json

import click

from tandem.commands.pools.reach import operating, reaching_the_router


@click.command("drain")
@click.argument("name")
@click.option(
    "--grace-s",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds that its running requests may take; 0: the instance's own setting.  [default: 0]",
)
@reaching_the_router
@click.pass_obj
def drain(
    outer_admin: str | None, name: str, grace_s: float, admin: str | None, timeout_s: float, as_json: bool
) -> None:
    """Take the instance NAME (or its address) out: nothing new goes there, what runs finishes, then its process ends.

    It answers as soon as the drain has begun; `tandem pools` shows how far it is. The size of its pool stays: a local
    stack starts it again. To have fewer, `tandem pools resize`.

    \b
    Examples:
      tandem pools drain decode-1
      tandem pools drain 10.0.0.9:7000 --grace-s 120
    """
    from protos.tandem.v1 import pools_pb2

    request = pools_pb2.DrainInstanceRequest(instance=name, grace_s=grace_s)
    with operating(admin or outer_admin) as stub:
        answer = stub.DrainInstance(request, timeout=timeout_s)
    if as_json:
        click.echo(json.dumps({"instance": answer.instance_id, "num_unfinished": answer.num_unfinished}))
    else:
        requests = (
            "1 request still runs" if answer.num_unfinished == 1 else f"{answer.num_unfinished} requests still run"
        )
        click.echo(f"{answer.instance_id} drains; {requests} there. `tandem pools` shows how far it is.")
