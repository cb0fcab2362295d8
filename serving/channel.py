"""Client channels between the services, and from clients to the router: one factory, so that all behave alike.

Measured (a peer stopped with SIGSTOP): keepalive of 1 s alone notices nothing in 40 s; with `ping_timeout_ms` 1000 the
call fails within 2 s. gRPC's own retries are off, since the router alone may decide to send a request twice.
With TLS files the peer has to show a certificate of their CA, and it is shown theirs (redialled.py).
"""

from __future__ import annotations

import grpc
import grpc.aio

from serving.redialled import RedialledChannel
from serving.settings import Section, setting
from serving.tls import Pair, TlsFiles

MAX_METADATA_BYTES = 8192


class ChannelSettings(Section):
    """Connections from this process to other instances."""

    keepalive_ms: int = setting(1000, "Milliseconds between pings to a silent peer.", ge=500)
    ping_timeout_ms: int = setting(1000, "Milliseconds after which an unanswered ping ends a connection.", ge=100)
    max_backoff_ms: int = setting(500, "Longest wait in milliseconds between attempts to connect.", ge=100)
    max_message_bytes: int = setting(4 << 20, "Longest message in bytes that is accepted from a peer.", ge=1024)


def channel_options(settings: ChannelSettings) -> list[tuple[str, str | int]]:
    """gRPC's options for one channel."""
    return [
        ("grpc.keepalive_time_ms", settings.keepalive_ms),
        ("grpc.keepalive_timeout_ms", settings.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", settings.ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", settings.max_backoff_ms),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),  # an instance is never behind the environment's web proxy
    ]


def open_channel(
    address: str,
    settings: ChannelSettings | None = None,
    *,
    tls: TlsFiles | None = None,
    peer_name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to `address` (host:port or any gRPC target); it connects at the first call. Close it when done.

    `tls` None speaks plaintext. `peer_name` is the name that the peer's certificate must carry; None: the address's
    host.
    """
    options = channel_options(settings or ChannelSettings())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if peer_name is not None:
        options.append(("grpc.ssl_target_name_override", peer_name))

    def dial(pair: Pair) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, channel_credentials(pair), options=options)

    return RedialledChannel(tls, dial)


def channel_credentials(pair: Pair) -> grpc.ChannelCredentials:
    """gRPC's credentials of a client with these files."""
    return grpc.ssl_channel_credentials(pair.ca, pair.key, pair.chain)
