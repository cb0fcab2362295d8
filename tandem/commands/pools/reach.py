"""The way from a command to the router's admin listener, and what to type when nobody answers there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from tandem.commands.secured import given_credentials, secured

F = TypeVar("F", bound=Callable[..., Any])
_PORT_HINT = (
    "give the router's admin address, which is not its clients' port: `tandem up` tells it, and "
    "`python -m router --admin-listen host:port` sets it"
)

_admin_option = click.option(
    "--admin", metavar="HOST:PORT", help="The router's admin address; absent: the stack that runs on this machine."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
timeout_option = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
    help="Seconds to wait for the answer.",
)  # fmt: skip


def admin_option(function: F) -> F:
    """Where the router is asked, and with which credentials."""
    return _admin_option(secured(function))


def reaching_the_router(function: F) -> F:
    """The options of everything that asks the router once."""
    return admin_option(timeout_option(json_option(function)))


@contextmanager
def operating(admin: str | None) -> Iterator[Any]:
    """A stub of the admin listener at `admin`, or of the running stack's. What goes wrong while it is used becomes a
    ClickException with what to type."""
    import grpc

    from protos.tandem.v1 import pools_pb2_grpc
    from tandem.bearer import BearerToken
    from tandem.credentials import PLAINTEXT
    from tandem.errors import TandemError
    from tandem.redialled import open_blocking_channel
    from tandem.running import running_admin_address
    from tandem.tls_trouble import explained

    try:
        address = admin or running_admin_address()
        credentials = given_credentials(address) or PLAINTEXT
        with open_blocking_channel(address, (("grpc.use_local_subchannel_pool", 1),), credentials) as channel:
            try:
                called = grpc.intercept_channel(channel, BearerToken(credentials))
                yield pools_pb2_grpc.PoolsServiceStub(called)  # type: ignore[arg-type]  # typed for asyncio alone
            except grpc.RpcError as error:
                raise explained(error, address, credentials) from error
    except ValueError as error:  # a file of the credentials cannot be used
        raise click.ClickException(str(error)) from None
    except TandemError as error:
        if error.status == "UNAVAILABLE" and error.message.startswith("no router answers"):
            raise click.ClickException(f"nothing answers at {address}: {_PORT_HINT}") from None
        if error.status == "UNIMPLEMENTED":
            raise click.ClickException(
                f"what answers at {address} does not know `tandem pools`: {_PORT_HINT}"
            ) from None
        raise click.ClickException(error.message) from None


def aligned(rows: Sequence[Sequence[str]], right: set[int]) -> str:
    """A table of equally long rows; the columns in `right` are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = (
        [text.rjust(width) if column in right else text.ljust(width) for column, (text, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    )
    return "\n".join("  ".join(row).rstrip() for row in cells)


def pool_name(role: int) -> str:
    """prefill or decode, of a Role on the wire."""
    from protos.tandem.v1 import instance_pb2

    return {instance_pb2.ROLE_PREFILL: "prefill", instance_pb2.ROLE_DECODE: "decode"}.get(role, "-")  # type: ignore[call-overload, no-any-return]
