"""The options by which a command is told its credentials; every command that calls a router has them.

They also come from the environment (TANDEM_CLIENT__CA_FILE and so on). For a stack of this machine none are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_META = "tandem.credentials"
_OPTIONS = {
    "ca_file": "PEM: whose certificates the router may have; makes it TLS.",
    "cert_file": "PEM: your certificate, where the router wants one.",
    "key_file": "PEM: the certificate's private key.",
    "server_name": "Name in the router's certificate; absent: the host of its address.",
    "token_file": "File with your bearer token.",
}


def secured(function: F) -> F:
    """Adds the options; what was given is found by `given_credentials`, and the command's own signature stays."""
    for name, text in reversed(_OPTIONS.items()):
        is_file = name.endswith("_file")
        option = click.option(
            f"--{name.replace('_', '-')}",
            name,
            metavar="FILE" if is_file else "NAME",
            type=click.Path(dir_okay=False, path_type=Path) if is_file else str,
            envvar=f"TANDEM_CLIENT__{name.upper()}",
            expose_value=False,
            callback=_keep,
            help=text,
        )
        function = option(function)
    return function


def given_credentials(address: str | None) -> Any:
    """The Credentials of the command line and the environment; without any, those of the local stack that has
    `address`, or None to look for one. Raises ClickException for what does not go together."""
    from tandem.credentials import Credentials, found

    given = click.get_current_context().meta.get(_META, {})
    try:
        if given:
            return Credentials(**given)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    return None if address is None else found(address)


def _keep(context: click.Context, option: click.Parameter, value: Any) -> Any:
    if value is not None:  # a subcommand's options are said at its group as well
        context.meta.setdefault(_META, {})[option.name] = value
    return value
