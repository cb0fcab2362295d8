"""The settings of a gRPC server, and the options of gRPC's that hold under abuse."""

from __future__ import annotations

import resource

from pydantic import field_validator

from serving.channel import MAX_METADATA_BYTES
from serving.settings import Section, host_and_port, setting


class ServerSettings(Section):
    """The gRPC port of this process and what it lets in."""

    host: str = setting("127.0.0.1", "Address to listen on; a pod listens on its own IP.", flag="--host")
    port: int = setting(0, "Port to listen on; 0 takes a free one.", flag="--port", ge=0, le=65535)
    advertise: str | None = setting(None, "host:port that peers are told; none: the address listened on.")
    max_message_bytes: int = setting(4 << 20, "Longest request message in bytes.", ge=1024)
    max_calls: int = setting(4096, "Open calls in all.", ge=1)
    max_calls_per_peer: int = setting(128, "Open calls from one address.", ge=1)
    max_bad_calls_per_s: float = setting(
        100.0,
        "Calls per second from one address that may come to nothing, twice as many in a burst. Beyond it wrong requests"
        " wait for their answer, and a connection that begins calls and resets them before a message came is dropped.",
        gt=0,
    )
    max_streams_per_connection: int = setting(1024, "HTTP/2 streams on one connection; further calls wait.", ge=1)
    max_connections: int = setting(16384, "Open connections, at most 3/4 of the open files; others are closed.", ge=1)
    max_idle_s: float = setting(300.0, "Seconds that a connection without a call is kept.", ge=1)
    max_connection_age_s: float | None = setting(
        None,
        "Seconds after which a connection takes no new call, so that clients behind a balancer of connections dial"
        " again and spread; none: never. Calls that run on it run on.",
        gt=0,
    )
    max_connection_age_grace_s: float | None = setting(
        None, "Seconds after which calls that still run on such a connection are cut off; none: never.", gt=0
    )
    max_deadline_s: float = setting(600.0, "Longest call in seconds, whatever the client asked for.", gt=0)
    read_timeout_s: float = setting(10.0, "Seconds within which the message of a call must have come.", gt=0)
    write_timeout_s: float = setting(10.0, "Seconds a message may wait for a client that does not read.", gt=0)
    drain_accept_s: float = setting(5.0, "Seconds that a drain still accepts requests, until peers know.", ge=0)
    drain_grace_s: float = setting(30.0, "Seconds that a drain then waits for running requests.", ge=0)
    reflection: bool = setting(True, "Serve gRPC reflection, for grpcurl and `buf curl`.")


class HealthSettings(Section):
    """A plaintext port for probes beside one with TLS."""

    listen: str | None = setting(
        None, "host:port that serves grpc.health.v1 alone, in plaintext, for kubelet's probes; none: nowhere."
    )

    @field_validator("listen")
    @classmethod
    def _is_host_and_port(cls, listen: str | None) -> str | None:
        if listen is not None:
            host_and_port(listen)
        return listen


def server_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """gRPC's options for one server."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Soft = hard: between the two, gRPC refuses at random.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", settings.max_streams_per_connection),
        # Else who pings too often gets a farewell of 2 KiB for each further ping, without end if he does not read.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_connection_idle_ms", int(settings.max_idle_s * 1000)),
        ("grpc.max_allowed_incoming_connections", min(settings.max_connections, num_files * 3 // 4)),
        # Identity only: gRPC inflates a message whole before it looks at its size, so 4 KiB could become 4 GiB.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        *_milliseconds("grpc.max_connection_age_ms", settings.max_connection_age_s),
        *_milliseconds("grpc.max_connection_age_grace_ms", settings.max_connection_age_grace_s),
    ]


def _milliseconds(option: str, seconds: float | None) -> list[tuple[str, int]]:
    """One option, or none: gRPC's default is that neither age nor grace ever ends."""
    return [] if seconds is None else [(option, max(1, int(seconds * 1000)))]
