"""TLS files of one process: read together, read again when they change, never used half written.

    read ──▶ current ──a file changes──▶ read again ──complete, key and certificate match──▶ current
                ▲                             └──incomplete, or the key of another certificate──┐
                └───────── the last good ones stay current, one warning (file_watcher.py) ──────┘

Each handshake of a server, each call of a channel and each scrape checks for changes, so replaced files (by
cert-manager, a mounted Secret, `cp`) need no notification and no restart. docs/security.md lists what is rotated how.
"""

from __future__ import annotations

import contextlib
import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from prometheus_client import Metric
from prometheus_client.registry import Collector
from pydantic import model_validator

from serving.file_watcher import FileWatcher, read_bytes
from serving.metrics import counter, gauge
from serving.settings import Section, SettingsError, environment_name, setting

HANDSHAKE_TIMEOUT_S = 5.0
"""For the handshake of a new connection to a server."""
_log = logging.getLogger(__name__)
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_LEVELS = {
    "is valid": logging.INFO,
    "expires soon": logging.WARNING,
    "expired": logging.ERROR,
    "not yet valid": logging.ERROR,
}
_EXPIRES_SOON = 0.1
"""Fraction of a certificate's life left when a warning is logged; issuers renew when a third is left."""


class TlsSettings(Section):
    """TLS of this process, as server and as client of its peers. All three files, or none for plaintext."""

    cert_file: Path | None = setting(None, "PEM file: this process's certificate, then its intermediates.")
    key_file: Path | None = setting(None, "PEM file: the certificate's private key, without a passphrase.")
    ca_file: Path | None = setting(None, "PEM file: the CAs whose certificates peers and clients may have.")
    peer_name: str | None = setting(None, "DNS name in every instance's certificate; none: the host in its address.")
    client_names: tuple[str, ...] = setting(
        (), "Names, one of which a caller's certificate must carry; empty: any certificate of ca_file is accepted."
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        given = {name: getattr(self, name) for name in ("cert_file", "key_file", "ca_file")}
        missing = [f"tls.{name} ({environment_name(('tls', name))})" for name, path in given.items() if path is None]
        if 0 < len(missing) < len(given):
            raise ValueError(f"cert_file, key_file and ca_file go together; missing: {', '.join(missing)}")
        if len(missing) == len(given) and (self.peer_name is not None or self.client_names):
            raise ValueError("peer_name and client_names need tls.cert_file, key_file and ca_file")
        return self

    def files(self) -> TlsFiles | None:
        """The files; None for plaintext. Raises SettingsError, which names the setting."""
        return None if self.ca_file is None else TlsFiles(self.ca_file, self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Consistent content of the files at one moment, in PEM."""

    ca: bytes
    chain: bytes | None  # None, like the key, for a client without a certificate
    key: bytes | None = field(repr=False)
    names: tuple[str, ...] = ()
    not_before: datetime | None = None
    not_after: datetime | None = None

    def state(self, now: datetime) -> str:
        """Whether it "is valid" (as is no certificate), "expires soon", is "expired" or "not yet valid"."""
        if self.not_after is None or self.not_before is None:
            return "is valid"
        if now < self.not_before:
            return "not yet valid"
        left, life = self.not_after - now, self.not_after - self.not_before
        if left <= timedelta(0):
            return "expired"
        return "expires soon" if left < _EXPIRES_SOON * life else "is valid"


class TlsFiles(FileWatcher[TlsMaterial], Collector):
    """The files of one process. Safe to use from every thread; gRPC calls from its own."""

    def __init__(self, ca_file: Path, cert_file: Path | None = None, key_file: Path | None = None) -> None:
        """Reads the files. Raises SettingsError for unusable ones: there is no last good state yet."""
        self._ca_file, self._cert_file, self._key_file = ca_file, cert_file, key_file
        self._logged: tuple[TlsMaterial, str] | None = None
        super().__init__([path for path in (ca_file, cert_file, key_file) if path is not None], self._load)
        self._log_state(super().current())

    def current(self) -> TlsMaterial:
        material = super().current()
        self._log_state(material)
        return material

    def collect(self) -> Iterator[Metric]:
        """The certificate's expiry, and reloads. A scrape checks the files, like a handshake."""
        material = self.current()
        if material.not_after is not None:
            yield gauge(
                "tandem_tls_certificate_expiry_timestamp_seconds",
                "When this process's TLS certificate expires, in seconds since 1970.",
                material.not_after.timestamp(),
            )
        yield counter("tandem_tls_reloads", "Changed TLS files now in use.", self.num_reloads)
        rejected = "Changed TLS files rejected: half written, not matching each other, or not supported by OpenSSL."
        yield counter("tandem_tls_refused_reloads", rejected, self.num_rejected)

    def _load(self) -> TlsMaterial:
        ca = read_bytes(self._ca_file, "tls.ca_file")
        _certificates("ca_file", self._ca_file, ca)
        if self._cert_file is None or self._key_file is None:
            return TlsMaterial(ca, None, None)
        chain, key = read_bytes(self._cert_file, "tls.cert_file"), read_bytes(self._key_file, "tls.key_file")
        leaf, *_ = _certificates("cert_file", self._cert_file, chain)
        with _checked("key_file", self._key_file, "contains no complete PEM private key without a passphrase"):
            public_key = serialization.load_pem_private_key(key, password=None).public_key()
        with _checked("cert_file", self._cert_file, "contains an invalid or unsupported certificate"):
            is_its_key, names = public_key == leaf.public_key(), tuple(dict.fromkeys(_names(leaf)))
        if not is_its_key:
            raise _problem("key_file", self._key_file, f"is not the key of the certificate in {self._cert_file}")
        return TlsMaterial(ca, chain, key, names, leaf.not_valid_before_utc, leaf.not_valid_after_utc)

    def _log_state(self, material: TlsMaterial) -> None:
        """One line for a new certificate, and one whenever its state changes: valid, expires soon, expired."""
        if material.not_after is None:
            return
        state = material.state(datetime.now(UTC))
        if self._logged == (material, state):
            return
        self._logged = (material, state)
        names = ", ".join(material.names) or "no names"
        life = f"until {material.not_after}"
        if state == "not yet valid":
            life = f"from {material.not_before} {life}"
        _log.log(_LEVELS[state], "the TLS certificate in %s, of %s, %s: %s", self._cert_file, names, state, life)
        if self._key_file is not None and _is_world_readable(self._key_file):
            _log.warning("tls.key_file: %s is readable by all users of this machine; chmod 600", self._key_file)


def _is_world_readable(path: Path) -> bool:
    """Group-readable is fine: a mounted Secret has to be."""
    with contextlib.suppress(OSError):
        return bool(path.stat().st_mode & stat.S_IROTH)
    return False


def _certificates(name: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    """Every certificate of a PEM file, at least one; a truncated one is an error."""
    problem = "contains no complete PEM certificate"
    with _checked(name, path, problem):
        found = x509.load_pem_x509_certificates(pem)
    if len(found) != pem.count(_BEGIN):
        raise _problem(name, path, problem)
    return found


@contextlib.contextmanager
def _checked(name: str, path: Path, problem: str) -> Iterator[None]:
    """Raises SettingsError for every exception of cryptography; their types have no base, and their text may quote the
    file."""
    try:
        yield
    except Exception:
        raise _problem(name, path, problem) from None


def _names(certificate: x509.Certificate) -> Iterator[str]:
    for attribute in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME):
        yield str(attribute.value)
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return
    yield from extension.value.get_values_for_type(x509.DNSName)


def _problem(name: str, path: Path, what: str) -> SettingsError:
    return SettingsError(f"tls.{name}: {path} {what}")
