"""Errors between a caller and Tandem, as one tree; and the diagnosis of a connection that fails.

TandemError            the router answered with an error status, or could not be reached
├── ConnectionLost     it ended, or the connection to it broke, during the request
├── StreamError        tokens did not arrive once and in order: a bug, please report it
└── NotRunning         no address was given and no local stack runs

gRPC reports "Socket closed" for most TLS mistakes. After a call that could not connect, `explain` makes one handshake
with the same files and tells the cases apart. The handshake sends only the first bytes of every HTTP/2 connection: no
token and no request.
"""

from __future__ import annotations

import copyreg
import re
import socket
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tandem.client.credentials import Credentials

if TYPE_CHECKING:
    import grpc

NOT_REACHED = "no router answers"
"""Begins the messages about a connection that could not be made."""
_NO_CONNECTION = re.compile("failed to connect|connections to all backends|dns|resol", re.IGNORECASE)
_CONNECTION_LOST = re.compile(
    "socket closed|connection (reset|closed|timed out)|broken pipe|goaway|ping timeout|no route to host"
    "|(network|host) is unreachable|cancelling all calls",
    re.IGNORECASE,
)
"""In gRPC's own texts, with those of the system about a host that is gone; the last one is of a server that ends calls
itself, since their handlers have not."""
_PROBE_TIMEOUT_S = 2.0
_MISTAKES = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNAUTHENTICATED"})
"""Of the caller: the message says all of it, and the router's log no more."""
_TOO_LONG = re.compile(r"Received message larger than max \((\d+) vs\. (\d+)\)")
_CERTIFICATE_ALERT = re.compile("ALERT_(HANDSHAKE_FAILURE|UNKNOWN_CA|.*CERTIFICATE)")
"""OpenSSL's names of what a server says of a client's certificate, or of a missing one; gRPC's say nothing."""
_TLS_ALERT = re.compile("ALERT|^TLSV1|^$")
"""What the server says in TLS: not all names of alerts say so, and OpenSSL has none for new ones."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


class TandemError(Exception):
    """A request that failed.

    `status` is the name of the gRPC status code, `violations` are the invalid fields with the problem of each, and
    `retry_after_s` is how long to wait before a retry; None if the answer did not say.
    """

    def __init__(
        self,
        status: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        violations: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.violations = violations
        super().__init__(f"{status}: {message}")

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would call `__init__` with the text alone."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConnectionLost(TandemError):
    """A router that was reached ended before the answer did, or the connection to it broke."""


class StreamError(TandemError):
    """A token is missing, repeated or out of order, or the stream ended without a finish reason."""

    def __init__(self, message: str) -> None:
        super().__init__("DATA_LOSS", message)


class NotRunning(TandemError):
    """No local stack is ready; the message says what to type."""

    def __init__(self, flag: str = "--address", *, is_starting: bool = False) -> None:
        problem = "no local stack is running. Start one with `tandem up`"
        if is_starting:
            problem = "the stack of `tandem up` is still starting, or has another XDG_RUNTIME_DIR. Try again"
        super().__init__("UNAVAILABLE", f"{problem}, or give {flag} host:port")


def from_rpc(error: grpc.RpcError, address: str) -> TandemError:
    """The TandemError of a failed call to `address`."""
    from serving.errors import is_cut_off, read_details, without_request_id

    code, details = getattr(error, "code", None), getattr(error, "details", None)
    status = code().name if callable(code) and code() is not None else "UNKNOWN"
    message = (details() if callable(details) else None) or str(error)
    read_trailers = getattr(error, "trailing_metadata", None)
    trailers = (read_trailers() if callable(read_trailers) else None) or ()
    found, retry_after_s = read_details(trailers)
    # Every UNAVAILABLE of a router has a delay; its text may be about a connection too.
    if retry_after_s is None and (explained := _of_grpc(status, message, address)) is not None:
        return explained
    message = without_request_id(message) if status in _MISTAKES else message
    if status == "UNAUTHENTICATED":
        message += "; give it as token or token_file (--token-file)"
    violations = tuple((one.field, one.description) for one in found)
    kind = ConnectionLost if is_cut_off(trailers) else TandemError
    return kind(status, message, retry_after_s=retry_after_s, violations=violations)


def _of_grpc(status: str, message: str, address: str) -> TandemError | None:
    """The meaning of what gRPC reports by itself; None if it may be a server's own error."""
    if status == "UNIMPLEMENTED" and message == "Method not found!":
        return TandemError(status, f"the server at {address} is not a router: give the router's host:port")
    if lengths := _TOO_LONG.search(message):
        length, limit = lengths.groups()
        return TandemError(status, f"the request has {length} bytes; the server at {address} accepts at most {limit}")
    if status != "UNAVAILABLE":
        return None
    if "http1.x server" in message:
        hint = "as a router's OpenAI API does: give the host:port of its gRPC, which `tandem up` prints as router"
        return TandemError("UNIMPLEMENTED", f"the server at {address} speaks HTTP/1, {hint}")
    if _NO_CONNECTION.search(message):
        hint = "give host:port of a router, such as 127.0.0.1:50051; `tandem doctor` shows what runs here"
        return TandemError(status, f"no router answers at {address} ({hint}): {message}")
    if _CONNECTION_LOST.search(message):
        text = f"the connection to the router at {address} broke ({message}): send the request again"
        return ConnectionLost(status, text)
    return None


def explain(error: grpc.RpcError, address: str, credentials: Credentials) -> TandemError:
    """The TandemError of a failed call to `address` (one or several); blocks up to 2 s if it could not connect."""
    reported = from_rpc(error, address)
    if reported.status != "UNAVAILABLE" or not reported.message.startswith(NOT_REACHED):
        return reported
    first = dns_parts(address)[1].partition(",")[0]
    problem = tls_problem(first, credentials)
    return reported if problem is None else TandemError(reported.status, problem)


def dns_parts(address: str) -> tuple[str, str]:
    """The DNS server, "" for the system's, and the rest of dns:name:port, dns:///name:port or dns://server/name:port;
    of another address "" and itself."""
    rest = address.removeprefix("dns:")
    if rest.startswith("//"):
        server, _, named = rest[2:].partition("/")
        if named:
            return server, named
    return "", rest.lstrip("/")


def tls_problem(address: str, credentials: Credentials) -> str | None:
    """What TLS has against a connection to `address` (host:port); None if TLS is not the problem."""
    from serving.settings import parse_address

    try:
        host, port = parse_address(address)
        is_accepted = _probe(_ssl_context(credentials), (host, port), credentials.server_name or host)
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the server at {address} is not trusted: {error.verify_message.rstrip('.')}; "
            f"trusted are the CAs in {credentials.ca_file}"
        )
    except ssl.SSLError as error:
        reason = error.reason or ""
        if credentials.ca_file is not None and not _TLS_ALERT.search(reason):
            return f"the server at {address} speaks plaintext, not TLS: omit ca_file (--ca-file) if that is intended"
        if not _CERTIFICATE_ALERT.search(reason):
            return None
        is_accepted = False
    except (OSError, ValueError):
        return None
    if credentials.ca_file is None:
        return f"the server at {address} speaks TLS: give the CA to trust as ca_file (--ca-file)"
    return None if is_accepted else _client_certificate_problem(address, credentials)


def _probe(context: ssl.SSLContext, address: tuple[str, int], name: str) -> bool:
    """Whether the peer answers after the handshake; in TLS 1.3 it checks the client's certificate only then."""
    with (
        socket.create_connection(address, timeout=_PROBE_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as wrapped,
    ):
        try:
            wrapped.sendall(_HTTP2_PREFACE)
            return bool(wrapped.recv(1))
        except ssl.SSLError:  # its alert
            return False


def _ssl_context(credentials: Credentials) -> ssl.SSLContext:
    if credentials.ca_file is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # only to detect TLS
    else:
        context = ssl.create_default_context(cafile=credentials.ca_file)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python sets it from 3.13 on, gRPC does not
        if credentials.cert_file is not None:
            context.load_cert_chain(credentials.cert_file, credentials.key_file)
    context.set_alpn_protocols(["h2"])
    return context


def _client_certificate_problem(address: str, credentials: Credentials) -> str:
    """Why the server closed the connection when it read the client's certificate: gRPC servers do not say."""
    if credentials.ca_file is None or credentials.cert_file is None:
        return (
            f"the server at {address} requires a client certificate: "
            "give cert_file and key_file (--cert-file, --key-file)"
        )
    from serving.tls import TlsFiles

    material = TlsFiles(credentials.ca_file, credentials.cert_file, credentials.key_file).current()
    state = material.state(datetime.now(UTC))
    if state == "expired":
        return f"the client certificate in {credentials.cert_file} expired at {material.not_after:%Y-%m-%d %H:%M} UTC"
    if state == "not yet valid":
        since = f"{material.not_before:%Y-%m-%d %H:%M} UTC"
        return f"the client certificate in {credentials.cert_file} is not valid before {since}"
    return (
        f"the server at {address} does not trust the client certificate in {credentials.cert_file}: "
        "another CA issued it, or it is not valid yet by that server's clock"
    )
