"""One NIXL agent over UCX, typed: what this package calls of the two libraries, with their errors as ours.

    made ─▶ register ─▶ add_peer ⇄ remove_peer; prepare ─▶ make_read ─▶ post ─▶ is_done … ─▶ release_read ─▶ close

NIXL's own Python wrapper is not used because it fixes the progress thread's sleep at 0: it spins. On 2 busy cores an
idle agent took 0.4 of one, and transfers were 3 to 5 times slower than with the 100 µs set here.

UCX reads UCX_* when an agent is made, and opens its log when its library is loaded. The environment is the process's,
so it is changed for that call alone, in which no other process may be started. The log is a file without a name; it is
read back to name the transport and to forward warnings.

UCX 1.23 over TCP cannot cancel a read: released, it goes on writing; and an agent that is destroyed under a read makes
its peer fail an assertion when the peer next runs. Where a connection breaks, the read ends with a disconnect error on
this side, so before an agent is destroyed its connections are cut. They are identified by the keepalive time that UCX
was configured with, a different one for each agent. A healthy peer survives that, as it survives that this process is
killed. One that was frozen in the middle of a read does not: when it runs again, it answers requests from its socket on
a connection that has failed meanwhile, and UCX ends the process ("unexpected error: Endpoint timeout"). By then it
counts as dead, and its supervisor restarts it.

Not thread-safe: an agent belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import glob
import importlib
import ipaddress
import logging
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from engine.errors import EngineError
from serving.limits import reset_connection, tcp_connections

_log = logging.getLogger(__name__)
_environment_lock = threading.Lock()
_FIRST_MARK_S, _NUM_MARKS = 20, 60
_STORES_MARK_S = 30
"""Of connections to stores (kv_transfer/stores/base.py), which are not to be cut."""
_PROGRESS_DELAY_US = 100
_BINDINGS = "nixl._bindings"
MemoryType = Literal["DRAM", "VRAM"]
Handle = int
"""Of a prepared list or of a read."""
Spans = Sequence[int] | NDArray[np.int32]
"""Numbers in a prepared list."""


class NixlError(Exception):
    """NIXL refused or failed. `reason` is one word, fit for a counter's label."""

    def __init__(self, error: Exception) -> None:
        name = type(error).__name__.removeprefix("nixl").removesuffix("Error").lower()
        self.reason = f"nixl_{name or 'error'}"
        super().__init__(f"{self.reason}: {error}")


class NixlDisconnected(NixlError):
    """The peer is gone, or the connection to it. Reads in flight have ended."""


@dataclass(frozen=True, slots=True)
class Region:
    """Pages in one piece of memory: layer by layer, a span of each page, one after the other."""

    memory_type: MemoryType
    device_id: int
    address: int
    span_bytes: int
    num_pages: int
    num_layers: int = 1

    @property
    def page_bytes(self) -> int:
        return self.span_bytes * self.num_layers

    def spans(self, pages: Sequence[int]) -> NDArray[np.int32]:
        """Numbers of the spans of these pages, layer by layer."""
        first = np.arange(self.num_layers, dtype=np.int32) * self.num_pages
        numbers: NDArray[np.int32] = np.add.outer(first, np.asarray(pages, dtype=np.int32)).ravel()
        return numbers


class NixlAgent:
    """Owns one agent: its registrations, its peers and its reads."""

    def __init__(self, name: str, settings: UcxSettings) -> None:
        self.name = name
        self._devices = settings.devices
        with ucx.prepared(settings) as self._mark:
            bindings = self._bindings = load_bindings()
            config = bindings.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = _PROGRESS_DELAY_US
            config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
            try:
                self._agent = bindings.nixlAgent(name, config)
                self._agent.createBackend("UCX", {})
            except Exception as error:
                warning = ucx.take_device_warning()
                self._devices.check(warning)
                why = f"{error} ({warning})" if warning else str(error)
                raise EngineError(f"NIXL cannot make an agent over UCX: {why}") from error
            self._device_warning = ucx.take_device_warning()

    def check_devices(self) -> None:
        """Raises EngineError if UCX cannot use a given device."""
        self._devices.check(self._device_warning)

    # Memory

    def register(self, region: Region) -> None:
        """Allow reads into this memory and, by peers that have the metadata, from it."""
        spans = [(region.address, region.page_bytes * region.num_pages, region.device_id, b"")]
        with self._errors():
            self._agent.registerMem(self._bindings.nixlRegDList(self._segment(region), spans), [])

    def metadata(self) -> bytes:
        """What a peer needs to read from here; complete once everything is registered."""
        with self._errors():
            return bytes(self._agent.getLocalMD())

    def prepare(self, region: Region, peer: str | None = None) -> Handle:
        """A list of all spans of a region, of this agent or of a peer; `make_read` refers to them by number. NIXL
        checks that they were registered."""
        num_spans = region.num_pages * region.num_layers
        row = (region.address, region.span_bytes, region.device_id, region.span_bytes, num_spans)
        table = np.array([row], dtype=np.uint64)
        name = self._bindings.NIXL_INIT_AGENT if peer is None else peer
        with self._errors():
            return int(self._agent.prepXferDlist(name, self._segment(region), table, []))

    def release_list(self, handle: Handle) -> None:
        with contextlib.suppress(NixlError), self._errors():
            self._agent.releasedDlistH(handle)

    # Peers

    def add_peer(self, metadata: bytes) -> str:
        """Returns the peer's name."""
        with self._errors():
            name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer and close the connection to it. Its reads and lists must have been released."""
        with contextlib.suppress(NixlError), self._errors():
            self._agent.invalidateRemoteMD(name)

    # Reads

    def make_read(self, into: Handle, into_ids: Spans, source: Handle, source_ids: Spans) -> Handle:
        """A read of spans of a peer's list into spans of one of ours; `post` begins it."""
        ids = (np.asarray(into_ids, dtype=np.int32), np.asarray(source_ids, dtype=np.int32))
        with self._errors():
            return int(self._agent.makeXferReq(self._bindings.NIXL_READ, into, ids[0], source, ids[1], b"", [], False))

    def post(self, read: Handle) -> bool:
        """Begin; True: it has already succeeded. Over shared memory this is where the bytes are copied."""
        with self._errors():
            return self._is_done(self._agent.postXferReq(read, b""))

    def is_done(self, read: Handle) -> bool:
        """Whether it has succeeded. Raises NixlDisconnected where it has failed; after another NixlError it may still
        be in flight."""
        with self._errors():
            return self._is_done(self._agent.getXferStatus(read))

    def release_read(self, read: Handle) -> None:
        """Forget a read. One in flight goes on all the same."""
        with contextlib.suppress(NixlError), self._errors():
            self._agent.releaseXferReq(read)

    @property
    def transport(self) -> str:
        """What UCX chose for the peer that was added last, in its words."""
        return "(see UCX's own log)" if ucx.log is None else ucx.log.transport(self.name)

    def cut_connections(self) -> int:
        """Break this agent's connections: reads in flight over them end with NixlDisconnected. See the module."""
        return cut_connections(self._mark)

    def keep(self) -> None:
        """Leave the agent to the end of the process, whatever refers to it: its destructor would end reads of peers,
        in a way that may end the peers too."""
        keep_to_process_end(self._agent)

    def close(self) -> None:
        """Destroy the agent, which then writes to memory no more. Cut the connections and release everything first."""
        del self._agent
        ucx.forward_warnings()

    # Inside

    def _segment(self, region: Region) -> Any:
        return self._bindings.VRAM_SEG if region.memory_type == "VRAM" else self._bindings.DRAM_SEG

    def _is_done(self, status: Any) -> bool:
        if status == self._bindings.NIXL_SUCCESS:
            return True
        if status == self._bindings.NIXL_IN_PROG:
            return False
        raise NixlError(RuntimeError(str(status)))

    @contextlib.contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except NixlError:
            raise
        except self._bindings.nixlRemoteDisconnectError as error:
            raise NixlDisconnected(error) from error
        except Exception as error:
            raise NixlError(error) from error


def keep_to_process_end(*objects: object) -> None:
    """Never free these. A reference without an owner: one in a module would be cleared when the interpreter ends, as
    it does in vLLM's workers."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def load_bindings() -> Any:
    """The library. Raises EngineError that says how to install it."""
    try:
        return importlib.import_module(_BINDINGS)
    except ImportError as error:
        raise EngineError(
            f"the nixl connector needs the NIXL library: pip install 'nixl>=1.5.1,<1.6' ({error})"
        ) from error


@dataclass(frozen=True, slots=True)
class NetDevices:
    """UCX's list: devices such as mlx5_0:1 (device and port), eth0 or eth[0-3]; "all"; or ^ and those left out."""

    source: str
    """The option or variable that gave it."""
    given: str
    added: str
    """The device that TCP uses besides the given ones."""

    @property
    def used(self) -> str:
        return ",".join(filter(None, (self.given, self.added)))

    def check(self, warning: str) -> None:
        """Raises EngineError if UCX has warned that it cannot use a given device: reads would go over the others."""
        unavailable = set(_QUOTED.findall(warning.partition(" not available")[0]))
        if devices_named_by(self.given) and unavailable - {self.added}:
            raise EngineError(
                f"{self.source} {self.given!r}: UCX cannot use all of them: {warning}; "
                "UCX_WARN_INVALID_CONFIG=n starts without those"
            )


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """`tls` and `net_devices` empty: the environment's, else UCX's choice and the device of `address`. What TCP needs
    is added to both."""

    tls: str = ""
    net_devices: str = ""
    address: str = "127.0.0.1"
    """Address that peers reach this instance at."""

    @property
    def devices(self) -> NetDevices:
        """From the settings, or the environment as it is now."""
        source = "ucx_net_devices" if self.net_devices else "UCX_NET_DEVICES"
        given = self.net_devices or os.environ.get("UCX_NET_DEVICES", "")
        return NetDevices(source, given, tcp_device_besides(given, self.address))

    def environment(self, keepalive_s: int) -> dict[str, str]:
        variables = {
            "UCX_NET_DEVICES": self.devices.used,
            "UCX_TCP_KEEPIDLE": f"{keepalive_s}.5s",  # half a second against rounding; the socket has whole ones
        }
        has_gpu = bool(glob.glob("/dev/nvidia[0-9]*"))
        if tls := self.tls or os.environ.get("UCX_TLS", ""):
            variables["UCX_TLS"] = with_needed(tls, has_gpu=has_gpu)
        if has_gpu:
            # Else UCX 1.23 reads the memory of GPUs on this machine over TCP where they have no NVLink.
            variables["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = os.environ.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
        return variables


def with_needed(tls: str, *, has_gpu: bool) -> str:
    """A list of transports that includes TCP, which UCX needs to notice that a peer has died, and CUDA's where there is
    a GPU: NIXL makes no agent there without it, not even for host memory."""
    names = tls.split(",")
    if tls.startswith("^") or "all" in names:
        return tls
    if not any(name.partition(":")[0] == "tcp" for name in names):
        names.append("tcp")
    if has_gpu and not {"cuda", "cuda_copy"} & set(names):
        names.append("cuda_copy")
    return ",".join(names)


def tcp_device_besides(devices: str, address: str) -> str:
    """The device of `address`, for TCP; empty where it can use one of `devices`. An RDMA device, such as mlx5_0:1, is
    no network interface, and TCP cannot use it."""
    own = net_device_of(address)
    if not devices:
        return own
    names, interfaces = devices_named_by(devices), psutil.net_if_addrs()
    if not names or own == "all" or any(fnmatch.filter(interfaces, name) for name in names):
        return ""
    return own


def devices_named_by(devices: str) -> list[str]:
    """Names and ranges (eth[0-3]) of a list; none if it is empty, allows all devices, or only excludes some."""
    names = devices.split(",") if devices else []
    return [] if devices.startswith("^") or "all" in names else names


def net_device_of(address: str) -> str:
    """The name of the network device that has this address; "all" where none has it."""
    with contextlib.suppress(OSError, UnicodeError):  # a label that is empty, or has more than 63 characters
        address = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return "lo"
    for device, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            return device.partition(":")[0]  # eth0:1 is a label of eth0
    return "all"


class UcxLog:
    """The log of the one UCX in this process. `shows_warnings`: harmless ones too."""

    def __init__(self, *, shows_warnings: bool) -> None:
        self._shows_warnings = shows_warnings
        self._descriptor, self._path = tempfile.mkstemp(prefix="ucx-", suffix=".log")
        self._partial_line = ""
        self.environment = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": self._path}
        self.device_warning = ""
        self._transports: dict[str, str] = {}
        self._lock = threading.Lock()

    def unlink(self) -> None:
        """UCX has the file open."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def transport(self, agent_name: str) -> str:
        """What UCX chose for the last peer of this agent."""
        self.read()
        return self._transports.get(agent_name[:_WORKER_NAME_LEN], "(transport not logged)")

    def read(self) -> None:
        """Read what is new; warnings and errors go to the log of this process."""
        with self._lock:
            ctypes.CDLL(None).fflush(None)  # UCX writes through C's buffers, and leaves the text there
            try:
                while new := os.read(self._descriptor, 1 << 16):
                    self._partial_line += new.decode(errors="replace")
            except OSError as error:
                _log.debug("the log of UCX cannot be read: %s", error)
            *lines, self._partial_line = self._partial_line.split("\n")
            for line in lines:
                if (chosen := _TRANSPORT.search(line)) is not None:
                    transport = f"{chosen['where']} {chosen['lanes'].strip()}"
                    self._transports[chosen["agent"][:_WORKER_NAME_LEN]] = transport
                elif (warning := _WARNING.search(line)) is not None:
                    is_about_devices = _UNAVAILABLE.match(warning["text"]) is not None
                    if is_about_devices:
                        self.device_warning = warning["text"]
                    is_shown = is_about_devices or self._shows_warnings or warning["level"] != "WARN"
                    _log.log(logging.WARNING if is_shown else logging.DEBUG, "UCX: %s", warning["text"])


_WORKER_NAME_LEN = 24  # UCX cuts the names of its workers
_TRANSPORT = re.compile(r"UCX  INFO\s+(?P<agent>\S+) (?P<where>int\S+) cfg#\d+ (?P<lanes>.*)")
_WARNING = re.compile(r"UCX  (?P<level>WARN|ERROR|FATAL)\s+(?P<text>.*)")
_UNAVAILABLE = re.compile(r"network devices? .* not available")
_QUOTED = re.compile(r"'([^']*)'")
_COARSE_LEVELS = ("", "fatal", "error", "warn")
"""Of UCX_LOG_LEVEL. Where it asks for more, UCX's own log is wanted."""


class UcxProcess:
    """UCX in this process: its log, unless the environment asks for one, and the next agent's mark."""

    def __init__(self) -> None:
        self.log: UcxLog | None = None
        self._loaded = False
        self._num_agents = 0

    @contextlib.contextmanager
    def prepared(self, settings: UcxSettings) -> Iterator[int]:
        """Make an agent in here. Gives the mark of its connections."""
        with _environment_lock:
            # The first agent lends and lives as long as the process: no later one has its mark.
            mark = _marks()[self._num_agents and 1 + (self._num_agents - 1) % (_NUM_MARKS - 1)]
            self._num_agents += 1
            variables = settings.environment(mark)
            level = os.environ.get("UCX_LOG_LEVEL", "").lower()
            if not self._loaded and "UCX_LOG_FILE" not in os.environ and level in _COARSE_LEVELS:
                self.log = UcxLog(shows_warnings=level == "warn")
                variables |= self.log.environment
            try:
                with _environment(variables):
                    yield mark
            finally:
                if self.log is not None and not self._loaded:
                    self.log.unlink()
                self._loaded |= sys.modules.get(_BINDINGS) is not None  # also where no agent could be made with it

    def forward_warnings(self) -> None:
        """Pass on what UCX has logged since the last call."""
        if self.log is not None:
            self.log.read()

    def take_device_warning(self) -> str:
        """UCX's new warning that devices are not available; empty if there is none, or if the log is elsewhere."""
        if self.log is None:
            return ""
        self.log.read()
        warning, self.log.device_warning = self.log.device_warning, ""
        return warning


ucx = UcxProcess()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _marks() -> list[int]:
    """Keepalive times of agents' connections, in seconds: no other connection of this process has one of them."""
    others = {_STORES_MARK_S, default_keepalive_s()}
    return [mark for mark in range(_FIRST_MARK_S, _FIRST_MARK_S + _NUM_MARKS + 2) if mark not in others][:_NUM_MARKS]


def default_keepalive_s() -> int:
    """The system's (net.ipv4.tcp_keepalive_time): every connection has it that was given no other."""
    with socket.socket() as unconnected:
        return unconnected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)


def cut_connections(mark: int) -> int:
    """Break every TCP connection that the agent with this mark has opened; returns how many there were."""
    num_cut = 0
    for connection in tcp_connections():
        with contextlib.suppress(OSError):
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == mark:
                reset_connection(connection)
                num_cut += 1
    return num_cut
