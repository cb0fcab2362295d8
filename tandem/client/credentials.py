"""What a client presents to a router, and which CA it trusts: TLS files and a bearer token."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

TLS_FOLDER = "tls"
"""In the private folder of a stack with TLS: ca.crt, and a .crt and a .key for each of these names."""
ROUTER, INSTANCE, OPERATOR = "router", "instance", "operator"
API_KEY_FILE = "api_key"
"""In the private folder of a stack with `--api-key`: the clients' bearer token."""
TOKEN = re.compile(r"[!-~]{1,4096}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of one client. Files are read again when they change. Raises ValueError for fields that exclude each other."""

    ca_file: Path | None = None
    """PEM: the CAs that may have issued the router's certificate. None: plaintext."""
    cert_file: Path | None = None
    """PEM: this client's certificate, if the router requires one; with its key."""
    key_file: Path | None = None
    server_name: str | None = None
    """Name in the router's certificate; None: the host of its address. Required for a list of several hosts."""
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """File with the bearer token, read for each request."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together: give both or neither")
        if self.ca_file is None and (self.cert_file is not None or self.server_name is not None):
            raise ValueError("cert_file and server_name are for TLS, which requires ca_file")
        if self.token is not None and self.token_file is not None:
            raise ValueError("give token or token_file, not both")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of one call. Raises ValueError if the token cannot be read."""
        token = self.token
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
                raise ValueError(f"token_file: {self.token_file} cannot be read: {reason}") from None
        if token is None:
            return ()
        if not TOKEN.fullmatch(token):
            raise ValueError(f"the token of {self.token_file or 'this client'} is empty or not printable ASCII")
        return (("authorization", f"Bearer {token}"),)


PLAINTEXT = Credentials()
"""No TLS and no token."""


def stack_credentials(folder: Path) -> Credentials:
    """The operator's credentials for the local stack with this private folder."""
    files, key = folder / TLS_FOLDER, folder / API_KEY_FILE
    token_file = key if key.is_file() else None
    if not files.is_dir():
        return Credentials(token_file=token_file)
    certificate, private_key = files / f"{OPERATOR}.crt", files / f"{OPERATOR}.key"
    return Credentials(files / "ca.crt", certificate, private_key, token_file=token_file)
