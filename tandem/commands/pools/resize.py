"""`tandem pools resize`: other numbers of instances, and how they come and go meanwhile."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from tandem.commands.pools.reach import admin_option, json_option, operating, pool_name

if TYPE_CHECKING:
    from protos.tandem.v1 import pools_pb2

_POOLS = ("prefill", "decode")
_ANSWER_S = 10.0
_LOOK_EVERY_S = 0.25
_INTERRUPTED = 130
"""What a shell makes of Ctrl-C."""


def wanted_sizes(words: Iterable[str]) -> dict[str, int]:
    """Sizes by pool, of words like decode=3. Raises UsageError, which says what to type instead."""
    sizes: dict[str, int] = {}
    for word in words:
        pool, equals, size = word.partition("=")
        if not equals:
            raise click.UsageError(f"{word!r} is not POOL=SIZE: write decode=3, with the number that there is to be")
        if pool not in _POOLS:
            similar = difflib.get_close_matches(pool, _POOLS, n=1, cutoff=0.5)
            hint = f"did you mean {similar[0]}={size}?" if similar else "the pools are prefill and decode"
            raise click.UsageError(f"there is no pool {pool!r}: {hint}")
        if not (size.isascii() and size.isdecimal() and len(size) <= 4):
            raise click.UsageError(f"{word!r}: the size is a whole number, the one that there is to be: {pool}=3")
        if pool in sizes:
            raise click.UsageError(f"{pool} is named twice: write the one size that it is to have")
        sizes[pool] = int(size)
    return sizes


@click.command("resize")
@click.argument("sizes", metavar="POOL=SIZE...", nargs=-1, required=True)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the pools have these sizes.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True,
    help="Seconds to wait for that. The resize goes on all the same.",
)  # fmt: skip
@admin_option
@json_option
@click.pass_obj
def resize(
    outer_admin: str | None, sizes: tuple[str, ...], wait: bool, timeout_s: float, admin: str | None, as_json: bool
) -> None:
    """Give a pool, or both, another number of instances.

    New ones are started; of those that are too many, the ones with the least to do drain: they take nothing new,
    finish what runs there (or hand it on), and end. No request is lost. Ctrl-C ends the waiting, not the resize.

    \b
    Examples:
      tandem pools resize decode=3
      tandem pools resize decode=1 prefill=2            both begin together, or neither does
      tandem pools resize decode=3 --no-wait            return as soon as it has begun
      tandem pools resize prefill=0                     decode instances prefill for themselves
    """
    from protos.tandem.v1 import instance_pb2, pools_pb2

    wanted = wanted_sizes(sizes)
    roles = {"prefill": instance_pb2.ROLE_PREFILL, "decode": instance_pb2.ROLE_DECODE}
    request = pools_pb2.ResizePoolsRequest(
        sizes=[pools_pb2.PoolSize(role=roles[pool], size=size) for pool, size in wanted.items()]
    )

    def tell(line: str) -> None:
        click.echo(line, err=as_json)

    with operating(admin or outer_admin) as stub:
        before = stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=_ANSWER_S)
        changes = stub.ResizePools(request, timeout=_ANSWER_S).changes
        told = [
            {"pool": pool, "previous_size": change.previous_size, "size": change.size}
            for pool, change in zip(wanted, changes, strict=True)
        ]
        for one in told:
            tell(f"{one['pool']}: {one['previous_size']} → {one['size']}")
        if wait:
            _wait(stub, wanted, Comings(before, tell), timeout_s)
    if as_json:
        click.echo(json.dumps({"changes": told, "complete": wait}))


class Comings:
    """Tells once of each instance that it comes, is ready, leaves and is gone."""

    def __init__(self, before: pools_pb2.ListPoolsResponse, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._out = {one.address: one.out for one in before.instances}
        self._names = {one.address: one.instance_id or one.address for one in before.instances}

    def look(self, now: pools_pb2.ListPoolsResponse) -> None:
        """Tells what has changed since the last look."""
        for one in now.instances:
            name = self._names[one.address] = one.instance_id or self._names.get(one.address, one.address)
            if one.address not in self._out and one.out:
                self._tell(f"  {pool_name(one.role)} instance at {one.address} starts")
            elif one.out != self._out.get(one.address):
                self._tell(f"  {name} {'is ready' if not one.out else f'is out: {one.out}'}")
            self._out[one.address] = one.out
        for address in self._out.keys() - {one.address for one in now.instances}:
            del self._out[address]
            self._tell(f"  {self._names[address]} is gone")


def _wait(stub: Any, wanted: Mapping[str, int], comings: Comings, timeout_s: float) -> None:
    """Returns when the pools have these sizes; raises ClickException when they will not, or not in time."""
    from protos.tandem.v1 import pools_pb2

    started_s = time.monotonic()
    call = stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=_LOOK_EVERY_S))
    try:
        for answer in call:
            comings.look(answer.pools)
            waited_s = time.monotonic() - started_s
            if _is_complete(answer.pools, wanted):
                return
            if waited_s > timeout_s:
                raise click.ClickException(f"not there after {timeout_s:g} s; it goes on, `tandem pools` shows how far")
        raise click.ClickException("the router ends; the resize goes on without it")
    except KeyboardInterrupt:
        click.echo("no longer waiting; the resize goes on, `tandem pools` shows how far", err=True)
        raise click.exceptions.Exit(_INTERRUPTED) from None
    finally:
        call.cancel()


def _is_complete(pools: pools_pb2.ListPoolsResponse, wanted: Mapping[str, int]) -> bool:
    """Whether every pool has its size: so many are ready, and nobody else is there."""
    complete = True
    for pool in pools.pools:
        name = pool_name(pool.role)
        if name not in wanted:
            continue
        if pool.HasField("size") and pool.size != wanted[name]:
            raise click.ClickException(
                f"the {name} pool is to have {pool.size} instances by now, not {wanted[name]}: somebody else has "
                "resized it, or one could not be started, which `tandem up` tells where it runs"
            )
        num_there = sum(pool_name(one.role) == name for one in pools.instances)
        complete = complete and pool.num_ready == num_there == wanted[name]
    return complete
