"""Authorization of callers: bearer tokens of tenants, and names in client certificates.

A file of tokens has a line `tenant: sha256 of a token` per token, in hexadecimal; a tenant may have several, so that a
new one can be issued before the old one is revoked. The tokens themselves are stored only by their owners:

    TOKEN=$(openssl rand -hex 32); printf %s "$TOKEN" | sha256sum

The file is read again when it changes (file_watcher.py).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

from serving.errors import PermissionDenied, Unauthenticated
from serving.file_watcher import FileWatcher, read_bytes
from serving.interceptor import Authorizer, Context
from serving.settings import SettingsError

_LINE = re.compile(r"(?P<tenant>[A-Za-z0-9._@/-]{1,128})\s*:\s*(?:sha256:)?(?P<digest>[0-9a-fA-F]{64})")
_KEY = "authorization"
_BEARER = re.compile(r"(?i:bearer) +(?P<token>[!-~]{1,4096})")
_HOW = "send `authorization: Bearer <token>`, as metadata or as a header of HTTP"
_CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")

Metadata = Iterable[tuple[str, str | bytes]]


class BearerTokens:
    """The tokens of one file. Safe to use from every thread."""

    def __init__(self, path: Path, setting: str) -> None:
        """Reads the file named by `setting`. Raises SettingsError for an unusable one."""
        self._watched = FileWatcher([path], lambda: _tenants(path, setting))

    def tenant_of(self, metadata: Metadata | None) -> str:
        """The tenant of the call's token. Raises Unauthenticated; neither its text nor the duration of the comparison
        reveals what is wrong with the token."""
        given = [value for key, value in metadata or () if key == _KEY]
        if not given:
            raise Unauthenticated(f"no bearer token: {_HOW}")
        matched = _BEARER.fullmatch(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
        digest = hashlib.sha256(matched["token"].encode() if matched else b"").digest()
        owners = [tenant for known, tenant in self._watched.current() if hmac.compare_digest(digest, known)]
        if matched is None or not owners:
            raise Unauthenticated(f"unknown bearer token: {_HOW}")
        return owners[0]

    @property
    def has_several_tenants(self) -> bool:
        return len({tenant for _, tenant in self._watched.current()}) > 1

    def authorize(self, context: Context) -> None:
        self.tenant_of(context.invocation_metadata())


def comparable_names(names: Iterable[str]) -> frozenset[str]:
    """Names of certificates in a form that is equal for equal ones: that of an IP address is its shortest."""
    return frozenset(_comparable(name) for name in names)


def certificate_authorizer(names: tuple[str, ...]) -> Authorizer:
    """Admits callers whose certificate carries one of `names`. The handshake has verified the certificate."""
    allowed = comparable_names(names)

    def authorize(context: Context) -> None:
        properties = context.auth_context()
        carried = (name.decode(errors="replace") for key in _CERTIFICATE_NAMES for name in properties.get(key, ()))
        if allowed.isdisjoint(comparable_names(carried)):
            raise PermissionDenied("the client certificate carries none of the allowed names (tls.client_names)")

    return authorize


def all_authorizers(*authorizers: Authorizer | None) -> Authorizer | None:
    """One authorizer that applies all of these in order; None where there is none."""
    present = [authorizer for authorizer in authorizers if authorizer is not None]

    def authorize(context: Context) -> None:
        for authorizer in present:
            authorizer(context)

    return authorize if present else None


def _comparable(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def _tenants(path: Path, setting: str) -> tuple[tuple[bytes, str], ...]:
    """Digest and tenant of every line. A problem names the line's number, never the line: it may be a token."""
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
                "as printed by `printf %s TOKEN | sha256sum`"
            )
        digest = bytes.fromhex(matched["digest"])
        if found.setdefault(digest, matched["tenant"]) != matched["tenant"]:
            raise SettingsError(f"{setting}: {path} line {number} assigns a token to a second tenant")
    if not found:
        raise SettingsError(f"{setting}: {path} has no tokens, so no client could call")
    return tuple(found.items())
