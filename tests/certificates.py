"""Certificates for tests: files of a service or a client, replaced as an issuer would."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from serving.tls import TlsFiles
from tandem.client.credentials import Credentials
from tandem.local_stack.pki import Issued, StackCa

HOSTS = ("127.0.0.1", "localhost")


def long_ago() -> dict[str, Any]:
    """The life of a certificate that expired an hour ago."""
    now = datetime.now(UTC)
    return {"not_before": now - timedelta(days=2), "not_after": now - timedelta(hours=1)}


@dataclass(frozen=True, slots=True)
class Files:
    """A certificate, its key and the CAs to believe, in a folder."""

    ca: Path
    certificate: Path
    key: Path

    def tls(self) -> TlsFiles:
        return TlsFiles(self.ca, self.certificate, self.key)

    def section(self, **fields: Any) -> dict[str, Any]:
        """As the section `tls` of a service's settings."""
        return {"ca_file": self.ca, "cert_file": self.certificate, "key_file": self.key, **fields}

    def credentials(self, **fields: Any) -> Credentials:
        """As a client's."""
        return Credentials(ca_file=self.ca, cert_file=self.certificate, key_file=self.key, **fields)

    def replace(self, issued: Issued, *believed: StackCa) -> None:
        """New ones, each file whole: the key first, so that for a moment it is of another certificate."""
        replace(self.key, issued.key)
        replace(self.certificate, issued.certificate)
        if believed:
            replace(self.ca, b"".join(authority.certificate for authority in believed))


def replace(path: Path, content: bytes) -> None:
    """By a rename, which readers see whole."""
    unfinished = path.with_name(f"{path.name}.new")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    unfinished.replace(path)


def files_of(folder: Path, name: str, issuer: StackCa, *believed: StackCa, **life: datetime) -> Files:
    """Files of `name` in `folder`, trusting `issuer` if no other CA is given."""
    files = Files(folder / f"{name}-ca.crt", folder / f"{name}.crt", folder / f"{name}.key")
    files.replace(issuer.issue(name, HOSTS, **life), *(believed or (issuer,)))
    return files
