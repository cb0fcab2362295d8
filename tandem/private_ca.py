"""A certificate authority for one local stack, so that `tandem up --tls` shows mTLS with one flag.

Its own key is never written down: when the stack's certificates are made it is forgotten, so nobody can add to them.
Real deployments have an issuer of their own (cert-manager, for example); docs/security.md says what it is to issue.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.credentials import INSTANCE, OPERATOR, ROUTER

_LIFE = timedelta(days=365)
_SKEW = timedelta(minutes=5)
"""A certificate is valid a little before it is made: clocks differ."""


@dataclass(frozen=True, slots=True)
class Issued:
    """One certificate, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class PrivateCa:
    """Issues certificates for both ends of a connection."""

    def __init__(self, name: str = "Tandem stack") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        made = _unsigned(self._name, self._name, self._key, _life(None, None))
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        self._certificate = made.sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        """What others have to believe, PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str,
        hosts: Iterable[str] = (),
        *,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
    ) -> Issued:
        """A certificate for `name`, reached at `hosts` (DNS names and IP addresses), by default for a year from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_alternative(host) for host in dict.fromkeys((name, *hosts))]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _unsigned(_name(name), self._name, key, _life(not_before, not_after))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(usage, critical=False)
            # Without it two CAs of one name, the old one and its successor, are taken for each other.
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return Issued(
            certificate.public_bytes(pem),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )


def write_stack_files(folder: Path, host: str) -> None:
    """Makes `folder` (0700) with what a stack on this machine needs: ca.crt, and certificate and key of the router, of
    the instances and of its operator. `host` is where the router listens."""
    folder.mkdir(mode=0o700)
    authority = PrivateCa()
    hosts = (host, "127.0.0.1", "::1", "localhost", socket.gethostname())
    _write(folder / "ca.crt", authority.certificate)
    for name in (ROUTER, INSTANCE, OPERATOR):
        issued = authority.issue(name, hosts)
        _write(folder / f"{name}.crt", issued.certificate)
        _write(folder / f"{name}.key", issued.key)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _life(not_before: datetime | None, not_after: datetime | None) -> tuple[datetime, datetime]:
    now = datetime.now(UTC)
    return not_before or now - _SKEW, not_after or now + _LIFE


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: tuple[datetime, datetime]
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(life[0])
        .not_valid_after(life[1])
    )
