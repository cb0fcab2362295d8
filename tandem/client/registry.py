"""The registry of local stacks: the state files by which `tandem generate` finds what `tandem up` started, and the
addresses that are on this machine.

A running stack has a private folder in the system's temporary directory and holds a lock (flock) on the file `lock` in
it. The kernel releases the lock when the process ends, however it ends, so the lock says whether the stack runs, and a
reused process id cannot be mistaken for it. The state file holds that folder and the router's address. A lock on the
folder itself keeps systemd-tmpfiles from removing files in it that were not used for days (tmpfiles.d(5), "Age").

    StackFolder() ─▶ running (locked) ─remove()─▶ gone
                         └─ killed ─▶ stale (unlocked) ─sweep(), at the next start─▶ gone

Stacks that see different temporary directories, as services with PrivateTmp and containers do, may share the folder of
the state files. A running stack writes its own again where it is gone.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import math
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tandem.client.credentials import PLAINTEXT, Credentials, stack_credentials
from tandem.client.errors import NotRunning

_LOCK = "lock"
_UNLOCKED_GRACE_S = 60.0
_UNSEEN_KEPT_S = 86_400.0
"""How long the state file is kept of a stack whose folder is not seen here."""
MAX_FOLDER_BYTES = 40
"""A socket's path has at most 107 bytes, of which up to 67 are below this folder."""
_SCHEME = re.compile(r"^(ipv4:|ipv6:|dns://[^/]*/|dns:/*)")
"""gRPC's, in front of an address; that of DNS may name the server to ask."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PROXY_VARIABLES = ("all_proxy", "grpc_proxy", "http_proxy", "https_proxy")
"""What gRPC, curl and httpx read; some of them in capitals too."""


@dataclass(frozen=True, slots=True)
class RunningStack:
    """The content of a stack's state file."""

    address: str
    """host:port of the router."""
    folder: str
    """The stack's private folder."""
    pid: int
    """Of the process that owns the stack."""
    model: str
    instances: dict[str, str]
    """Name → host:port of every prefill and decode instance."""
    started_s: float
    """Wall-clock time of the start; the newest stack is preferred."""
    admin_address: str = ""
    """host:port of the router's admin listener; empty in a file of an older version."""
    model_folder: str = ""
    """Of the checkpoint; empty in a file of an older version."""
    http_address: str = ""
    """host:port of the router's HTTP API; empty without one."""
    router_workers: int = 1
    """Processes of the router: the HTTP API's metrics are those of the one that answers."""


class StackFolder:
    """The private folder of one stack: secret, sockets, ready files, logs, the shared store. Owned by LocalStack."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_folder_prefix(), dir=temporary_folder()))  # mkdtemp makes it 0700
        self._fds: list[int] = []
        try:
            unlocked = self.path / f"{_LOCK}.tmp"
            self._lock(unlocked, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self.path / _LOCK)  # locked from its first moment: another stack's sweep may come any time
            self._lock(self.path, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_SH)  # by age it is not removed either
        except BaseException:
            self._unlock()
            for name in (f"{_LOCK}.tmp", _LOCK):  # without a descriptor, of which there may be none
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
            raise

    def _lock(self, path: Path, flags: int, operation: int) -> None:
        self._fds.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
        fcntl.flock(self._fds[-1], operation)

    @property
    def is_alone(self) -> bool:
        """Whether no other stack of this user starts or runs. Of two that start at once, at least one is not alone."""
        return all(folder == self.path for folder in _locked_folders())

    def remove(self) -> None:
        """Deletes the folder and its content; called once."""
        self._unlock()  # first, so that there is a descriptor to delete with
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        for fd in self._fds:
            os.close(fd)


def temporary_folder() -> Path:
    """The parent of stacks' folders: the system's temporary directory, or /tmp if that path is too long for sockets."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= MAX_FOLDER_BYTES else "/tmp")


def state_dir() -> Path:
    """$XDG_RUNTIME_DIR/tandem, or ~/.tandem without one. Raises OSError for a user without a home."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    try:
        return Path(runtime) / "tandem" if runtime and os.access(runtime, os.W_OK) else Path.home() / ".tandem"
    except RuntimeError:
        raise OSError("this user has no home: set HOME, or XDG_RUNTIME_DIR to a folder of this user") from None


def made_state_dir() -> Path:
    """`state_dir`, created with mode 0700. Raises OSError if files cannot be written there."""
    path, hint = state_dir(), "remove it, or set XDG_RUNTIME_DIR to a folder of this user"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path}, where running stacks are announced, cannot be made: {error.strerror}; {hint}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"{path}, where running stacks are announced, cannot be written; {hint}")
    return path


def state_file(stack: RunningStack) -> Path:
    """Where `stack` is announced. Raises OSError for a user without a home."""
    return state_dir() / f"stack-{stack.pid}-{Path(stack.folder).name[-8:]}.json"


def announce(stack: RunningStack) -> Path:
    """Writes the state file of `stack` atomically, with mode 0600; returns its path. Raises OSError, which names it."""
    made_state_dir()
    path = state_file(stack)
    unfinished = path.with_suffix(".tmp")
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_text(json.dumps(asdict(stack)))
        return unfinished.rename(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # a failed write names no file


def running_stacks() -> list[RunningStack]:
    """The announced stacks whose owner runs, newest first."""
    stacks = [stack for _, stack in _announced() if _is_locked(Path(stack.folder))]
    return sorted(stacks, key=lambda stack: stack.started_s, reverse=True)


def running_address() -> str:
    """The router's address of the newest running stack; raises NotRunning."""
    stacks = running_stacks()
    if not stacks:
        raise NotRunning(is_starting=any(_locked_folders()))
    return stacks[0].address


def running_admin_address() -> str:
    """The admin address of the newest running stack; raises NotRunning."""
    stacks = [stack for stack in running_stacks() if stack.admin_address]
    if not stacks:
        raise NotRunning("--admin", is_starting=any(_locked_folders()))
    return stacks[0].admin_address


def model_folder_of(address: str) -> Path | None:
    """The checkpoint's folder of the local stack of this user whose router `address` reaches."""
    folders = [stack.model_folder for stack in running_stacks() if reaches(address, stack.address)]
    return Path(folders[0]) if folders and folders[0] else None


def metrics_address_of(admin_address: str) -> str | None:
    """Where the local stack of this user at `admin_address` serves its router's metrics, all of them, to clients
    without TLS and tokens."""
    for stack in running_stacks():
        if reaches(admin_address, stack.admin_address) and stack_credentials(Path(stack.folder)) == PLAINTEXT:
            return (stack.http_address or None) if stack.router_workers == 1 else None
    return None


def credentials_for(address: str) -> Credentials:
    """Those of the local stack of this user that `address` reaches; without one, plaintext."""
    for stack in running_stacks():
        if any(reaches(address, one) for one in (stack.address, stack.admin_address, *stack.instances.values())):
            return stack_credentials(Path(stack.folder))
    return PLAINTEXT


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


def is_local(target: str) -> bool:
    """Whether `target` is an address of this machine, or that of a router of this user's local stacks, which may listen
    at a name of this machine."""
    if is_here(target):
        return True
    stacks = running_stacks()
    return any(reaches(target, one) for stack in stacks for one in (stack.address, stack.http_address))


def sweep() -> int:
    """Removes folders and state files left behind by killed stacks of this user; returns the number of folders."""
    num_removed = 0
    for path, stack in _announced():
        if _is_left_behind(path, Path(stack.folder)):
            path.unlink(missing_ok=True)
    for folder in temporary_folder().glob(_folder_prefix() + "*"):
        if _is_ours(folder) and not _is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
            num_removed += 1
    return num_removed


def _is_left_behind(state_file: Path, folder: Path) -> bool:
    """Whether a state file may go. A stack whose folder is not seen may run, and announces itself again if it does."""
    return not _is_locked(folder) and (_is_ours(folder) or _age_s(state_file) > _UNSEEN_KEPT_S)


def _locked_folders() -> Iterator[Path]:
    """Of this user's stacks that start or run."""
    return filter(_is_locked, filter(_is_ours, temporary_folder().glob(_folder_prefix() + "*")))


def _folder_prefix() -> str:
    return f"tandem-{os.getuid()}-"


def _is_ours(folder: Path) -> bool:
    """Whether it is a real folder of this user: any user may write to /tmp, and a link there may point anywhere."""
    try:
        return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _is_locked(folder: Path) -> bool:
    """Whether the stack of `folder` runs. A new folder may not have its lock yet and counts as running."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return _age_s(folder) < _UNLOCKED_GRACE_S and _is_ours(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: other commands may look at the same time
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _age_s(path: Path) -> float:
    """Seconds since its last change; infinite if it is gone, which may happen at any time."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def _announced() -> Iterator[tuple[Path, RunningStack]]:
    """Without fields that a later version has added, and without damaged files. None where this user has no home, or
    none that can be read, as in a pod of an application."""
    try:
        paths = [*state_dir().glob("stack-*.json")]
    except OSError:
        return
    for path in paths:
        try:
            found = json.loads(path.read_text())
            stack = RunningStack(**{one.name: found[one.name] for one in fields(RunningStack) if one.name in found})
        except (OSError, ValueError, TypeError):
            continue  # damaged, or just removed
        yield path, stack


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
