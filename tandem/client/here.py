"""Which addresses are on this machine, and which of them reach one process."""

from __future__ import annotations

import ipaddress
import os
import re
import socket

_SCHEME = re.compile(r"^(ipv4:|ipv6:|dns://[^/]*/|dns:/*)")
"""gRPC's, in front of an address; that of DNS may name the server to ask."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PROXY_VARIABLES = ("all_proxy", "grpc_proxy", "http_proxy", "https_proxy")
"""What gRPC, curl and httpx read; some of them in capitals too."""


def has_proxy() -> bool:
    """Whether the environment names a web proxy."""
    return any(value and name.lower() in _PROXY_VARIABLES for name, value in os.environ.items())


def is_here(target: str) -> bool:
    """Whether host:port is an address of this machine, of loopback or of a network interface; of several, with or
    without gRPC's scheme, whether all are."""
    hosts = [_host_and_port(one)[0] for one in _SCHEME.sub("", target).split(",")]
    others = {_ip_address(host) for host in hosts if not _is_loopback(host)}
    return not others or (None not in others and others <= _interface_addresses())


def reaches(address: str, listener: str) -> bool:
    """Whether a client of `address` (host:port, with or without gRPC's scheme) connects to what listens at `listener`
    of this machine, and never to another process, which may listen at the same port of another address: of loopback,
    or of the other family, which the name localhost may mean."""
    if address == listener:
        return True
    (host, port), (own_host, own_port) = _host_and_port(_SCHEME.sub("", address)), _host_and_port(listener)
    reached, own = _ip_address(host), _ip_address(own_host)
    if port != own_port or reached is None or own is None or reached.version != own.version or not _is_loopback(host):
        return False
    return own.is_unspecified or (_loopback(reached) if reached.is_unspecified else reached) == own


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]").lower(), port


def _loopback(address: Address) -> Address:
    """What a client of an unspecified address connects to."""
    return ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")


def _interface_addresses() -> set[Address | None]:
    import psutil  # late: few clients need it

    try:
        every = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    except OSError:
        return set()
    return {_ip_address(one.address) for one in every if one.family in (socket.AF_INET, socket.AF_INET6)}


def _is_loopback(host: str) -> bool:
    """Whether a client of it connects to loopback."""
    address = _ip_address(host)
    return host == "localhost" or (address is not None and (address.is_loopback or address.is_unspecified))


def _ip_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
