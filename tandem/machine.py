"""How processes on this machine share it: ports that are free, and cores that each has for itself."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below the range from which Linux takes the ports of outgoing connections, so none of those can be in the way."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens on now, all different. They are not held: another program could take one meanwhile."""
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        ports.append(port)
    if len(ports) < count:
        raise OSError(f"{host} has fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop - 1}")
    return ports


def share_cores(cores: list[int], num_instances: int, pin: bool) -> list[tuple[int, ...]]:
    """The cores of each instance: equal, separate shares, or empty tuples where pinning is off or cores are too few."""
    per_instance = len(cores) // max(1, num_instances)
    if not pin or per_instance == 0:
        return [()] * num_instances
    return [tuple(cores[index * per_instance : (index + 1) * per_instance]) for index in range(num_instances)]
