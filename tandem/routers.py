"""How a client reaches its routers: one, several by their addresses, or all that are behind a name.

Of several, each request goes to one that is SERVING, in turn, and one that is refused with UNAVAILABLE before any part
of its answer has come is tried again at another: gRPC's own round_robin, health checks and retries. So a router that
restarts is not noticed, and no token can come twice.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.health import ROUTER_SERVICE
from tandem.running import running_address

MAX_RETRIES = 4
"""gRPC makes five attempts at the most: with the pauses below some three seconds, in which a router that has just begun
is found again (half a second, and its health)."""
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # two clients must not share a connection, or one's death is the other's
)
_SEVERAL: tuple[tuple[str, int | str], ...] = (
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


@dataclass(frozen=True, slots=True)
class Routers:
    """What a channel is made of."""

    address: str
    """For people: what the caller gave, or the local stack's."""
    target: str
    """For gRPC."""
    options: tuple[tuple[str, int | str], ...]


def routers(address: str | Sequence[str] | None, retries: int | None) -> Routers:
    """What `address` names: host:port, several IP addresses with ports (a list, or with commas between), or
    dns:name:port for every address of a name; None for the local stack.

    `retries` is how often a refused request is tried again; None: not at a single address, else as often as gRPC does.
    Raises ValueError, which says what to write, and NotRunning.
    """
    if retries is not None and not 0 <= retries <= MAX_RETRIES:
        raise ValueError(f"retries: is {retries}; allowed: 0..{MAX_RETRIES}")
    given = address.split(",") if isinstance(address, str) else address
    addresses = [running_address()] if given is None else [one.strip() for one in given]
    if not all(addresses):
        raise ValueError("address: is empty; give host:port of a router")
    name = ",".join(addresses)
    if len(addresses) > 1:
        target, is_several = f"{_family(addresses)}:{name}", True
    else:
        is_several = name.startswith("dns:")
        target = f"dns:///{name.removeprefix('dns:').lstrip('/')}" if is_several else name
    retries = (MAX_RETRIES if is_several else 0) if retries is None else retries
    config = ("grpc.service_config", json.dumps(_service_config(is_several, retries)))
    options = (*_OPTIONS, *(_SEVERAL if is_several else ()), config)
    return Routers(address=name, target=target, options=options)


def _family(addresses: Sequence[str]) -> str:
    """ipv4 or ipv6, of which gRPC takes a list; of names it takes only one, which may stand for several addresses."""
    versions = set()
    for address in addresses:
        host, colon, port = address.rpartition(":")
        try:
            versions.add(ipaddress.ip_address(host.strip("[]")).version)
        except ValueError:
            colon = ""
        if not (colon and port.isdecimal()):
            raise ValueError(
                f"address: several routers are given by their IP addresses with ports, which {address!r} is not; "
                "for a name with several addresses write dns:name:port, alone"
            )
    if len(versions) > 1:
        raise ValueError("address: IPv4 and IPv6 addresses do not go together in one list")
    return f"ipv{versions.pop()}"


def _service_config(is_several: bool, retries: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if is_several:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ROUTER_SERVICE}
    if retries:
        policy = {
            "maxAttempts": retries + 1,
            "initialBackoff": "0.2s",
            "maxBackoff": "2s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        config["methodConfig"] = [{"name": [{"service": ROUTER_SERVICE}], "retryPolicy": policy}]
    return config
