"""What a client shows and whom it believes: a CA, a certificate of its own, a bearer token.

A stack that `tandem up --tls` started keeps what its owner needs in its private folder, where clients of the same user
find it by themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tandem.running import running_stacks

TLS_FOLDER = "tls"
"""In the private folder of a stack that speaks TLS: ca.crt, and a .crt and a .key of each of these."""
ROUTER, INSTANCE, OPERATOR = "router", "instance", "operator"
_TOKEN = re.compile(r"[!-~]{1,4096}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of one client. Files are read again when they change. Raises ValueError for what does not go together."""

    ca_file: Path | None = None
    """PEM: the CAs whose certificates the router may have. None: plaintext."""
    cert_file: Path | None = None
    """PEM: this client's certificate, where it needs one; with its key."""
    key_file: Path | None = None
    server_name: str | None = None
    """Name in the router's certificate; None: the host of its address."""
    token: str | None = field(default=None, repr=False)
    """Bearer token."""
    token_file: Path | None = None
    """File with the token, read for each request."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together: give both or neither")
        if self.ca_file is None and (self.cert_file is not None or self.server_name is not None):
            raise ValueError("cert_file and server_name are for TLS, which needs ca_file: whom to believe")
        if self.token is not None and self.token_file is not None:
            raise ValueError("give token or token_file, not both")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries. Raises ValueError where there is no token to be had."""
        token = self.token
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"token_file: {self.token_file} cannot be read: {type(error).__name__}") from None
        if token is None:
            return ()
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"the token of {self.token_file or 'this client'} is empty or not printable ASCII")
        return (("authorization", f"Bearer {token}"),)


PLAINTEXT = Credentials()
"""Nothing to show, nobody to believe."""


def of_stack(folder: Path) -> Credentials:
    """Those of the owner of the local stack with this private folder."""
    files = folder / TLS_FOLDER
    if not files.is_dir():
        return PLAINTEXT
    return Credentials(files / "ca.crt", files / f"{OPERATOR}.crt", files / f"{OPERATOR}.key")


def found(address: str) -> Credentials:
    """Those for `address` if a local stack of this user answers there, else none."""
    for stack in running_stacks():
        if address in (stack.address, stack.admin_address, *stack.instances.values()):
            return of_stack(Path(stack.folder))
    return PLAINTEXT
