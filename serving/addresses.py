"""How an address is written, and which are of a private network: where plaintext may be spoken and what may be dialled
without TLS.

Not among them: link-local ones, at one of which every cloud keeps the machine's credentials; and 0.0.0.0 and [::],
which are all addresses of a machine, its public ones too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

_PRIVATE = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "::1/128"),  # this machine
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # RFC 1918
        "100.64.0.0/10",  # RFC 6598: pods of several clouds
        "fc00::/7",  # RFC 4193
    )
)


def is_private(ip: str) -> bool:
    """Whether an IP address, without brackets, is one of a private network. Raises ValueError for anything else."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:8.8.8.8 reaches 8.8.8.8
    address = mapped or address
    return any(address in network for network in _PRIVATE if network.version == address.version)


def is_ip(host: str) -> bool:
    """Whether `host` is an address and not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def listens_privately(host: str) -> bool:
    """Whether a server bound to `host`, an address or a name, is reached from private networks alone. Raises OSError
    for a name that cannot be resolved."""
    ips = [host] if is_ip(host) else [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    return all(map(is_private, ips))


async def resolved(host: str) -> str:
    """One address of a name. Raises OSError."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(entries[0][4][0])


def joined(host: str, port: int) -> str:
    """host:port as gRPC writes it, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
