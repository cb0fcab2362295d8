"""Who may call: bearer tokens that stand for tenants, and names in the certificates of callers.

A file of tokens has a line `tenant: sha256 of a token` for each token, in hexadecimal; a tenant may have several, so
that a new one is handed out before the old one goes. The tokens themselves are nowhere but with their owners:

    TOKEN=$(openssl rand -hex 32); printf %s "$TOKEN" | sha256sum

The file is read again when it changes (watched.py).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from serving.calls import Context, Gate
from serving.errors import PermissionDenied, Unauthenticated
from serving.settings import SettingsError
from serving.watched import Watched, read_bytes

_LINE = re.compile(r"(?P<tenant>[A-Za-z0-9._@/-]{1,128})\s*:\s*(?:sha256:)?(?P<digest>[0-9a-fA-F]{64})")
_KEY = "authorization"
_BEARER = re.compile(r"(?i:bearer) +(?P<token>[!-~]{1,4096})")
_HOW = "send the metadata `authorization: Bearer <token>`"
_CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")

Metadata = Iterable[tuple[str, str | bytes]]


class Tokens:
    """The tokens of one file. Safe to use from every thread."""

    def __init__(self, path: Path, setting: str) -> None:
        """Reads the file, whose path was given by `setting`. Raises SettingsError where it cannot be used."""
        self._watched = Watched([path], lambda: _tenants(path, setting))

    def tenant_of(self, metadata: Metadata | None) -> str:
        """Whose token the call carries. Raises Unauthenticated, which does not tell what of it is wrong.

        The token's digest is compared with every known one, each in constant time: how long it takes says nothing.
        """
        given = [value for key, value in metadata or () if key == _KEY]
        if not given:
            raise Unauthenticated(f"no bearer token: {_HOW}")
        matched = _BEARER.fullmatch(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
        digest = hashlib.sha256(matched["token"].encode() if matched else b"").digest()
        owners = [tenant for known, tenant in self._watched.current() if hmac.compare_digest(digest, known)]
        if matched is None or not owners:
            raise Unauthenticated(f"the bearer token is not known here: {_HOW}")
        return owners[0]

    def gate(self, context: Context) -> None:
        """Lets calls with a known token pass."""
        self.tenant_of(context.invocation_metadata())


def certificate_gate(names: tuple[str, ...]) -> Gate:
    """Lets callers pass whose certificate carries one of `names`. That it is genuine the handshake has made sure of."""

    def gate(context: Context) -> None:
        told = context.auth_context()
        carried = {name.decode(errors="replace") for key in _CERTIFICATE_NAMES for name in told.get(key, ())}
        if carried.isdisjoint(names):
            raise PermissionDenied("your certificate carries none of the names that may call here (tls.client_names)")

    return gate


def all_of(*gates: Gate | None) -> Gate | None:
    """One gate of several, passed in this order; None where there is none."""
    present = [gate for gate in gates if gate is not None]

    def passed(context: Context) -> None:
        for gate in present:
            gate(context)

    return passed if present else None


def _tenants(path: Path, setting: str) -> tuple[tuple[bytes, str], ...]:
    """Digest and tenant of every line. A problem tells the line's number, never the line: it may be a token."""
    try:
        lines = read_bytes(path, setting).decode().splitlines()
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {path} is not text in UTF-8") from None
    found: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        matched = _LINE.fullmatch(line.strip())
        if matched is None:
            raise SettingsError(
                f"{setting}: {path} line {number} is not `tenant: sha256 of a token`, 64 hexadecimal digits "
                "as `printf %s TOKEN | sha256sum` tells them"
            )
        digest = bytes.fromhex(matched["digest"])
        if found.setdefault(digest, matched["tenant"]) != matched["tenant"]:
            raise SettingsError(f"{setting}: {path} line {number} gives a token to a second tenant")
    if not found:
        raise SettingsError(f"{setting}: {path} has no tokens, so nobody could call")
    return tuple(found.items())
