"""The router's admin listener, for the commands that call it: its address, credentials, calls and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from protos.tandem.v1 import instance_pb2
from tandem.commands.options import credential_options, given_credentials, option_group, unusable

if TYPE_CHECKING:
    from tandem.client.credentials import Credentials
    from tandem.client.errors import TandemError

ROLES = {"prefill": instance_pb2.ROLE_PREFILL, "decode": instance_pb2.ROLE_DECODE}
CALL_TIMEOUT_S = 10.0
_ADMIN = "tandem.commands.admin"
_PORT_HINT = (
    "give the router's admin address, which is not its clients' port: `tandem up` prints it, and "
    "`python -m router --admin-listen host:port` sets it"
)


def pool_name(role: int) -> str:
    """prefill or decode, of a Role on the wire."""
    return next((name for name, value in ROLES.items() if value == role), "-")


def _keep_admin(context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is None:
        return  # `tandem pools` may have been given it before its subcommand
    if not value.strip():
        raise click.ClickException("admin: is empty; give host:port of the router's admin listener")
    from tandem.client.channel import check_port

    try:
        check_port("admin", value)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    context.meta[_ADMIN] = value


admin_options = option_group(
    click.option(
        "--admin", metavar="HOST:PORT", expose_value=False, callback=_keep_admin,
        help="The router's admin address; absent: the stack that runs on this machine.",
    ),
    credential_options,
)  # fmt: skip
"""The router's admin address, and credentials for it, both for `admin_calls`."""


def admin_target() -> tuple[str, Credentials]:
    """The address that --admin gives, or the running stack's, and the credentials for it.

    Raises NotRunning, and ClickException for options that exclude each other."""
    from tandem.client.credentials import PLAINTEXT
    from tandem.client.registry import running_admin_address

    address = click.get_current_context().meta.get(_ADMIN) or running_admin_address()
    return address, given_credentials(address) or PLAINTEXT


def admin_problem(error: TandemError, address: str) -> str:
    """What to print for a failed call to the admin listener at `address`."""
    from tandem.client.errors import NOT_REACHED

    if error.status == "UNAVAILABLE" and error.message.startswith(NOT_REACHED):
        return f"nothing answers at {address}: {_PORT_HINT}"
    if error.status == "UNIMPLEMENTED":
        return f"the server at {address} is not an admin listener: {_PORT_HINT}"
    return error.message


@contextmanager
def admin_calls() -> Iterator[Callable[..., Any]]:
    """Calls a method of the admin listener that --admin gives, or of the running stack's: `call(name, request)`, with
    `timeout` in seconds. Errors become a ClickException."""
    import grpc

    from protos.tandem.v1 import pools_pb2_grpc
    from tandem.client.channel import ADMIN_OPTIONS, MAX_TIMEOUT_S, open_blocking_channel
    from tandem.client.errors import TandemError, explain

    address = ""
    try:
        address, credentials = admin_target()
        with open_blocking_channel(address, ADMIN_OPTIONS, credentials) as channel:
            stub: Any = pools_pb2_grpc.PoolsServiceStub(channel)  # type: ignore[arg-type]  # typed for asyncio alone
            try:
                yield lambda method, request, timeout=MAX_TIMEOUT_S: getattr(stub, method)(
                    request, metadata=credentials.metadata(), timeout=min(timeout, MAX_TIMEOUT_S)
                )
            except grpc.RpcError as error:
                raise explain(error, address, credentials) from error
    except ValueError as error:  # an unusable file of the credentials
        raise unusable(error) from None
    except TandemError as error:
        raise click.ClickException(admin_problem(error, address)) from None
