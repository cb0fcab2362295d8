"""Which addresses are on this machine, and which of them reach one process."""

from __future__ import annotations

import ipaddress
import re

_SCHEME = re.compile(r"^(ipv4:|ipv6:|dns:/*)")
"""gRPC's, in front of an address."""
_LOCALHOST = "127.0.0.1"


def is_here(target: str) -> bool:
    """Whether host:port is on this machine; of several, with or without gRPC's scheme, whether all are."""
    return all(_is_here(_host_and_port(one)[0]) for one in _SCHEME.sub("", target).split(","))


def reaches(address: str, listener: str) -> bool:
    """Whether a client of `address` (host:port, with or without gRPC's scheme) connects to what listens at `listener`
    of this machine. Another process may listen at the same port of another address, also of loopback."""
    if address == listener:
        return True
    (host, port), (own_host, own_port) = _host_and_port(_SCHEME.sub("", address)), _host_and_port(listener)
    if port != own_port or not _is_here(host):
        return False
    return _is_unspecified(own_host) or _connected(host) == _connected(own_host)


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]").lower(), port


def _connected(host: str) -> str:
    """The address that a client of `host` connects to."""
    return _LOCALHOST if host in ("localhost", "0.0.0.0") else host


def _is_here(host: str) -> bool:
    address = _ip_address(host)
    return host == "localhost" or (address is not None and (address.is_loopback or address.is_unspecified))


def _is_unspecified(host: str) -> bool:
    address = _ip_address(host)
    return address is not None and address.is_unspecified


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
