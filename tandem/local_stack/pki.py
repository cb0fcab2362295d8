"""A certificate authority for one local stack, so that one flag, `tandem up --tls`, shows mTLS.

The CA's private key is never written: once the stack's certificates exist it is gone, and no more can be issued.
Real deployments use an issuer of their own (cert-manager, for example); docs/security.md says what it must issue.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.client.credentials import INSTANCE, OPERATOR, ROUTER

_LIFETIME = timedelta(days=365)
_CLOCK_SKEW = timedelta(days=1)
"""How far a clock may be set back after the start: more than the offset of any time zone."""
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class StackCa:
    """Issues certificates for both ends of a connection."""

    def __init__(self, name: str = "Tandem stack") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        now = datetime.now(UTC)
        self._certificate = (
            self._builder(self._name, self._key, now - _CLOCK_SKEW, now + _LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        """The CA's own certificate, PEM."""
        return self._certificate.public_bytes(_PEM)

    def issue(
        self,
        name: str,
        hosts: Iterable[str] = (),
        *,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
    ) -> Issued:
        """A certificate for `name` at `hosts` (DNS names and IP addresses), by default valid for a year."""
        now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = [_alternative_name(host) for host in dict.fromkeys((name, *hosts))]
        certificate = (
            self._builder(_common_name(name), key, not_before or now - _CLOCK_SKEW, not_after or now + _LIFETIME)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(certificates=False), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(usage, critical=False)
            # Distinguishes two CAs of one name, such as an old one and its successor.
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return Issued(certificate.public_bytes(_PEM), key.private_bytes(_PEM, pkcs8, plain))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, not_before: datetime, not_after: datetime
    ) -> x509.CertificateBuilder:
        serial = x509.random_serial_number()
        return x509.CertificateBuilder(self._name, subject, key.public_key(), serial, not_before, not_after)


def write_stack_files(folder: Path, host: str) -> None:
    """Creates `folder` (0700) with ca.crt and a .crt and .key (0600) for the router, the instances and the operator.

    `host` is the router's, ASCII.
    """
    folder.mkdir(mode=0o700)
    authority = StackCa()
    own = [name for name in (socket.gethostname(),) if name.isascii()]  # as the names in certificates must be
    hosts = (host, "127.0.0.1", "::1", "localhost", *own)
    issued = {name: authority.issue(name, hosts) for name in (ROUTER, INSTANCE, OPERATOR)}
    files = {"ca.crt": authority.certificate}
    files |= {f"{name}.crt": one.certificate for name, one in issued.items()}
    files |= {f"{name}.key": one.key for name, one in issued.items()}
    for name, content in files.items():
        (folder / name).touch(mode=0o600, exist_ok=False)
        (folder / name).write_bytes(content)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    """What the key signs. Python's ssl requires it of a CA from 3.13 on (VERIFY_X509_STRICT)."""
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
