"""TLS files of one process: read together, read again when they change, never taken half written.

    read ──▶ current ──a file changes──▶ read again ──whole, the key is the certificate's──▶ the new ones are current
                ▲                             └──cut off, or the key of another certificate──┐
                └───────── the last good ones stay current, one warning (watched.py) ────────┘

Each handshake of a server, each call of a channel and each scrape looks whether they changed. They are replaced by
whoever issues them: cert-manager, a mounted Secret, `cp`. Nothing here is told of it, so nothing has to be restarted.
docs/security.md says what is rotated how.
"""

from __future__ import annotations

import contextlib
import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import model_validator

from serving.settings import Section, SettingsError, environment_name, setting
from serving.watched import Watched, read_bytes

_log = logging.getLogger(__name__)
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_LATE = 0.1
"""Part of a certificate's life that is left when its end is warned of: issuers renew when a third is left."""


class TlsSettings(Section):
    """TLS of this process, as server and as client of its peers. All three files, or none: then it speaks plaintext."""

    cert_file: Path | None = setting(None, "PEM file: this process's certificate, then its intermediates.")
    key_file: Path | None = setting(None, "PEM file: the certificate's private key, without a passphrase.")
    ca_file: Path | None = setting(None, "PEM file: the CAs whose certificates peers and clients may have.")
    peer_name: str | None = setting(
        None, "DNS name in the certificate of every instance that is dialled; none: the host in its address."
    )
    client_names: tuple[str, ...] = setting(
        (), "Names one of which the certificate of a caller must carry; empty: every certificate of ca_file will do."
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        given = {name: getattr(self, name) for name in ("cert_file", "key_file", "ca_file")}
        missing = [f"tls.{name} ({environment_name(('tls', name))})" for name, path in given.items() if path is None]
        if 0 < len(missing) < len(given):
            raise ValueError(f"cert_file, key_file and ca_file go together; missing: {', '.join(missing)}")
        if len(missing) == len(given) and (self.peer_name is not None or self.client_names):
            raise ValueError("peer_name and client_names say nothing without tls.cert_file, key_file and ca_file")
        return self

    def files(self) -> TlsFiles | None:
        """The files, read; None for plaintext. Raises SettingsError, which names the setting."""
        return None if self.ca_file is None else TlsFiles(self.ca_file, self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class Pair:
    """What was in the files at one moment: PEM, consistent."""

    ca: bytes
    chain: bytes | None
    """None, like the key, for a client that shows no certificate."""
    key: bytes | None = field(repr=False)
    names: tuple[str, ...] = ()
    not_before: datetime | None = None
    not_after: datetime | None = None

    def left_s(self, now: datetime) -> float:
        """Seconds until the certificate expires; infinite without one."""
        return float("inf") if self.not_after is None else (self.not_after - now).total_seconds()

    def is_late(self, now: datetime) -> bool:
        """Whether little of its life is left, so that whoever was to renew it has not."""
        if self.not_after is None or self.not_before is None:
            return False
        return self.left_s(now) < _LATE * (self.not_after - self.not_before).total_seconds()


class TlsFiles:
    """The files of one process. Safe to use from every thread; gRPC asks from its own."""

    def __init__(self, ca_file: Path, cert_file: Path | None = None, key_file: Path | None = None) -> None:
        """Reads them. Raises SettingsError where they cannot be used: there is no last good state yet."""
        if (cert_file is None) != (key_file is None):
            raise SettingsError("cert_file and key_file go together: give both or neither")
        self._ca_file, self._cert_file, self._key_file = ca_file, cert_file, key_file
        self._told: tuple[Pair, str] | None = None
        self._watched = Watched([path for path in (ca_file, cert_file, key_file) if path is not None], self._read)
        self._tell(self._watched.current())

    @property
    def num_taken(self) -> int:
        """New files that are in use, or were."""
        return self._watched.num_taken

    @property
    def num_refused(self) -> int:
        """New files that were half written, or did not fit each other."""
        return self._watched.num_refused

    def current(self) -> Pair:
        """What is to be used now; the same object for as long as it stays so. Never raises."""
        pair = self._watched.current()
        self._tell(pair)
        return pair

    def _read(self) -> Pair:
        ca = read_bytes(self._ca_file, "tls.ca_file")
        _certificates("ca_file", self._ca_file, ca)
        if self._cert_file is None or self._key_file is None:
            return Pair(ca, None, None)
        chain, key = read_bytes(self._cert_file, "tls.cert_file"), read_bytes(self._key_file, "tls.key_file")
        leaf, *_ = _certificates("cert_file", self._cert_file, chain)
        if _public_key(self._key_file, key) != leaf.public_key():
            raise _problem("key_file", self._key_file, f"is not the key of the certificate in {self._cert_file}")
        names = tuple(dict.fromkeys(_names(leaf)))
        return Pair(ca, chain, key, names, leaf.not_valid_before_utc, leaf.not_valid_after_utc)

    def _tell(self, pair: Pair) -> None:
        """One line for a new certificate, and one when it is late, and one when it is over."""
        if pair.not_after is None:
            return
        now = datetime.now(UTC)
        state = "expired" if pair.left_s(now) <= 0 else "expires soon" if pair.is_late(now) else "is valid"
        if self._told == (pair, state):
            return
        self._told = (pair, state)
        level = {"is valid": logging.INFO, "expires soon": logging.WARNING, "expired": logging.ERROR}[state]
        names = ", ".join(pair.names) or "nobody"
        _log.log(level, "the TLS certificate in %s, of %s, %s: until %s", self._cert_file, names, state, pair.not_after)
        if self._key_file is not None and _is_open_to_all(self._key_file):
            _log.warning("tls.key_file: %s can be read by everybody on this machine: chmod 600", self._key_file)


def tls_collectors(files: TlsFiles | None) -> list[Collector]:
    """What /metrics tells of them; nothing for plaintext."""
    return [] if files is None else [_TlsCollector(files)]


class _TlsCollector(Collector):
    """When the certificate ends, and what became of new files. A scrape looks at the files, like a handshake."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files

    def collect(self) -> Iterator[Metric]:
        pair = self._files.current()
        if pair.not_after is not None:
            yield GaugeMetricFamily(
                "tandem_tls_certificate_expiry_timestamp_seconds",
                "When this process's TLS certificate expires, in seconds since 1970.",
                value=pair.not_after.timestamp(),
            )
        yield CounterMetricFamily("tandem_tls_reloads", "TLS files taken after a change.", value=self._files.num_taken)
        yield CounterMetricFamily(
            "tandem_tls_refused_reloads",
            "TLS files not taken after a change: half written, or not fitting each other.",
            value=self._files.num_refused,
        )


def _is_open_to_all(path: Path) -> bool:
    """To the world, that is: a mounted Secret is its group's, and has to be."""
    with contextlib.suppress(OSError):
        return bool(path.stat().st_mode & stat.S_IROTH)
    return False


def _certificates(name: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    """Every certificate of a PEM file, at least one; one that is cut off is an error, not one fewer."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        found = []
    if not found or len(found) != pem.count(_BEGIN):
        raise _problem(name, path, "holds no whole PEM certificates")
    return found


def _public_key(path: Path, pem: bytes) -> PublicKeyTypes:
    try:
        return serialization.load_pem_private_key(pem, password=None).public_key()
    except (ValueError, TypeError):  # its text may quote the file
        raise _problem("key_file", path, "holds no whole PEM private key without a passphrase") from None


def _names(certificate: x509.Certificate) -> Iterator[str]:
    """Common name, then DNS names."""
    for attribute in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME):
        yield str(attribute.value)
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return
    yield from extension.value.get_values_for_type(x509.DNSName)


def _problem(name: str, path: Path, what: str) -> SettingsError:
    return SettingsError(f"tls.{name}: {path} {what}")
