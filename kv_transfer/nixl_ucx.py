"""What UCX is told through the environment, what it says in its log, and how its connections are cut.

UCX reads UCX_* when an agent is made, and where its log goes when its library is loaded. The environment belongs to
the whole process, so it is changed for the length of that call alone, in which no other process may be started. The log
goes to a file that has no name any more once it is open; it is read back to name the transport and to pass warnings on.

Cutting. UCX 1.23 over TCP cannot cancel a read: released, it goes on writing; and an agent that is destroyed under a
read makes its peer fail an assertion when the peer next runs. Where a connection breaks, the read ends with a
disconnect error on this side, so before an agent is destroyed its connections are broken. They are known by the
keepalive time that UCX was told to give them, another one for each agent.

A healthy peer survives that, as it survives that this process is killed. One that was frozen in the middle of a read
does not: when it runs again, it answers requests that waited in its socket on a connection that has failed meanwhile,
and UCX ends the process ("unexpected error: Endpoint timeout"). By then everybody takes it for dead, and its supervisor
starts it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from serving.connections import end, tcp_connections

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_FIRST_MARK_S, _NUM_MARKS = 20, 60


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """`tls` and `net_devices` empty: what the environment says, else UCX's choice and the device of `address`."""

    tls: str = ""
    net_devices: str = ""
    address: str = "127.0.0.1"
    """Address that peers reach this instance at."""

    def environment(self, keepalive_s: int) -> dict[str, str]:
        """Variables for one agent."""
        variables = {
            "UCX_NET_DEVICES": self.net_devices or os.environ.get("UCX_NET_DEVICES") or net_device_of(self.address),
            "UCX_TCP_KEEPIDLE": f"{keepalive_s}.5s",  # half a second against rounding; the socket has whole ones
        }
        tls = self.tls or os.environ.get("UCX_TLS", "")
        if tls:
            variables["UCX_TLS"] = with_tcp(tls)
        return variables


def with_tcp(tls: str) -> str:
    """A list of transports with TCP in it, which UCX needs to notice that a peer has died."""
    names = tls.split(",")
    if tls.startswith("^") or "all" in names or any(name.partition(":")[0] == "tcp" for name in names):
        return tls
    return f"{tls},tcp"


def net_device_of(address: str) -> str:
    """The name of the network device that has this address; "all" where none has it."""
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return "lo"
    for device, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            return device
    return "all"


class UcxLog:
    """The log of the one UCX in this process."""

    def __init__(self) -> None:
        self._descriptor, self._path = tempfile.mkstemp(prefix="ucx-", suffix=".log")
        self._begun = ""  # a line that is not whole yet
        self.environment = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": self._path}
        self._chosen: dict[str, str] = {}
        self._lock = threading.Lock()

    def loaded(self) -> None:
        """UCX has the file open."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def transport(self, agent_name: str) -> str | None:
        """What UCX chose for the last peer of this agent; None: it has not said."""
        self.read()
        return self._chosen.get(agent_name[:_WORKER_NAME_LEN])

    def read(self) -> None:
        """Take in what is new; warnings and errors go on to the log of this process."""
        with self._lock:
            ctypes.CDLL(None).fflush(None)  # UCX writes through C's buffers, and leaves the text there
            while new := os.read(self._descriptor, 1 << 16):
                self._begun += new.decode(errors="replace")
            *lines, self._begun = self._begun.split("\n")
            for line in lines:
                if (chosen := _CHOSEN.search(line)) is not None:
                    self._chosen[chosen["agent"][:_WORKER_NAME_LEN]] = f"{chosen['where']} {chosen['lanes'].strip()}"
                elif (said := _SAID.search(line)) is not None:
                    level = logging.DEBUG if said["level"] == "WARN" else logging.WARNING
                    _log.log(level, "UCX: %s", said["text"])


_WORKER_NAME_LEN = 24  # UCX cuts the names of its workers
_CHOSEN = re.compile(r"UCX  INFO\s+(?P<agent>\S+) (?P<where>int\S+) cfg#\d+ (?P<lanes>.*)")
_SAID = re.compile(r"UCX  (?P<level>WARN|ERROR|FATAL)\s+(?P<text>.*)")


class UcxProcess:
    """UCX in this process: at most one log, and the next agent's mark."""

    def __init__(self) -> None:
        self._log: UcxLog | None = None
        self._loaded = False
        self._num_agents = 0

    @contextlib.contextmanager
    def prepared(self, settings: UcxSettings) -> Iterator[int]:
        """Make an agent in here. Gives the mark of its connections."""
        with _lock:
            # The first agent lends and lives as long as the process: no later one has its mark.
            mark = _FIRST_MARK_S + (self._num_agents and 1 + (self._num_agents - 1) % (_NUM_MARKS - 1))
            self._num_agents += 1
            variables = settings.environment(mark)
            if not self._loaded and not {"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys():
                self._log = UcxLog()
                variables |= self._log.environment
            before = {name: os.environ.get(name) for name in variables}
            os.environ.update(variables)
            try:
                yield mark
                if self._log is not None and not self._loaded:
                    self._log.loaded()
                self._loaded = True
            finally:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def transport(self, agent_name: str) -> str:
        """What UCX chose for the last peer of this agent, in its words."""
        if self._log is None:
            return "see UCX's own log"
        return self._log.transport(agent_name) or "not told by UCX"

    def pass_on_log(self) -> None:
        """See UcxLog.read."""
        if self._log is not None:
            self._log.read()


ucx = UcxProcess()


def cut_connections(mark: int) -> int:
    """Break every TCP connection that the agent with this mark has opened; returns how many there were."""
    num_cut = 0
    for connection in tcp_connections():
        with contextlib.suppress(OSError):
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == mark:
                end(connection)
                num_cut += 1
    return num_cut
