"""Which addresses are on this machine, and which of them reach one process."""

from __future__ import annotations

import ipaddress
import re

_SCHEME = re.compile(r"^(ipv4:|ipv6:|dns://[^/]*/|dns:/*)")
"""gRPC's, in front of an address; that of DNS may name the server to ask."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_here(target: str) -> bool:
    """Whether host:port is on this machine; of several, with or without gRPC's scheme, whether all are."""
    return all(_is_here(_host_and_port(one)[0]) for one in _SCHEME.sub("", target).split(","))


def reaches(address: str, listener: str) -> bool:
    """Whether a client of `address` (host:port, with or without gRPC's scheme) connects to what listens at `listener`
    of this machine, and never to another process, which may listen at the same port of another address: of loopback,
    or of the other family, which the name localhost may mean."""
    if address == listener:
        return True
    (host, port), (own_host, own_port) = _host_and_port(_SCHEME.sub("", address)), _host_and_port(listener)
    reached, own = _ip_address(host), _ip_address(own_host)
    if port != own_port or reached is None or own is None or reached.version != own.version or not _is_here(host):
        return False
    return own.is_unspecified or (_loopback(reached) if reached.is_unspecified else reached) == own


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]").lower(), port


def _loopback(address: Address) -> Address:
    """What a client of an unspecified address connects to."""
    return ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")


def _is_here(host: str) -> bool:
    address = _ip_address(host)
    return host == "localhost" or (address is not None and (address.is_loopback or address.is_unspecified))


def _ip_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
