"""Why a connection does not come about, in words: gRPC says "Socket closed" for most of what can be wrong with TLS.

After a call has failed to connect, one handshake of our own with the same files tells the cases apart. Nothing is sent
in it but the first bytes of every HTTP/2 connection: no token, no request. What it needs is imported then.
"""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime

import grpc

from tandem.credentials import Credentials
from tandem.errors import TandemError, from_rpc

_TIMEOUT_S = 2.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_TLS = "ca_file (--ca-file)"
_CERTIFICATE = "cert_file and key_file (--cert-file, --key-file)"


def explained(error: grpc.RpcError, address: str, credentials: Credentials) -> TandemError:
    """The TandemError of a failed call to `address`, which may be several; blocks if it could not connect."""
    told = from_rpc(error, address)
    if told.status != "UNAVAILABLE" or not told.message.startswith("no router answers"):
        return told
    one = address.removeprefix("dns:").lstrip("/").partition(",")[0]
    why = trouble(one, credentials)
    return told if why is None else TandemError(told.status, why)


def trouble(address: str, credentials: Credentials) -> str | None:
    """What is wrong with how `address`, one host:port, is spoken to; None where that is not it. Takes 2 s at most,
    blocking."""
    from serving.settings import host_and_port

    try:
        host, port = host_and_port(address)
        context = _context(credentials)
        is_heard = _is_heard(context, (host, port), credentials.server_name or host)
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of what answers at {address} is not believed: {error.verify_message.rstrip('.')}; "
            f"believed are the CAs in {credentials.ca_file}"
        )
    except ssl.SSLError:
        if credentials.ca_file is None:
            return None
        return f"what answers at {address} speaks plaintext, not TLS: leave {_TLS} out if that is right"
    except (OSError, ValueError):
        return None
    if credentials.ca_file is None:
        return f"what answers at {address} speaks TLS: say with {_TLS} whom to believe"
    return None if is_heard else _refused(address, credentials)


def _is_heard(context: ssl.SSLContext, address: tuple[str, int], name: str) -> bool:
    """Whether the peer goes on after the handshake; in TLS 1.3 it looks at the client's certificate only then."""
    with (
        socket.create_connection(address, timeout=_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as wrapped,
    ):
        wrapped.sendall(_HTTP2_PREFACE)
        return bool(wrapped.recv(1))


def _context(credentials: Credentials) -> ssl.SSLContext:
    if credentials.ca_file is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # only to see whether it is TLS
    else:
        context = ssl.create_default_context(cafile=credentials.ca_file)
        if credentials.cert_file is not None:
            context.load_cert_chain(credentials.cert_file, credentials.key_file)
    context.set_alpn_protocols(["h2"])
    return context


def _refused(address: str, credentials: Credentials) -> str:
    """The server has ended the connection when it should have read our certificate: gRPC's servers do not say why."""
    if credentials.ca_file is None or credentials.cert_file is None:
        return f"what answers at {address} demands a client certificate: give {_CERTIFICATE}"
    from serving.tls import TlsFiles

    pair = TlsFiles(credentials.ca_file, credentials.cert_file, credentials.key_file).current()
    if pair.not_after is not None and pair.left_s(datetime.now(UTC)) <= 0:
        return f"the client certificate in {credentials.cert_file} expired at {pair.not_after:%Y-%m-%d %H:%M} UTC"
    return (
        f"what answers at {address} does not believe the client certificate in {credentials.cert_file}: "
        "it is of another CA, or not valid yet by that machine's clock"
    )
