"""Which local stacks run: the small files by which `tandem generate` finds what `tandem up` started.

A running stack has a private folder in the system's temporary directory and holds a lock (flock) on the file `lock` in
it. The kernel drops the lock when the process ends, however it ends, so the lock says whether the stack lives, and no
process id can be mistaken for another's. The state file names that folder and the router's address.

    create() ─▶ running (locked) ─remove()─▶ gone
                    └─ killed ─▶ stale (unlocked) ─sweep(), at the next start─▶ gone
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import NotRunning

_LOCK = "lock"
_UNLOCKED_GRACE_S = 60.0
_MAX_FOLDER_CHARS = 40
"""A socket's path has 107 characters at the most, and below this folder it needs up to 67."""


@dataclass(frozen=True, slots=True)
class RunningStack:
    """What a stack tells about itself in its state file."""

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
    """Wall-clock time of the start, to prefer the newest."""
    admin_address: str = ""
    """host:port at which the router answers `tandem pools`; empty in what an older version wrote."""


class StackFolder:
    """The private folder of one stack: secret, sockets, ready files, logs, the shared store. Owned by LocalStack."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_folder_prefix(), dir=temporary_folder()))  # mkdtemp makes it 0700
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Deletes the folder with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def temporary_folder() -> Path:
    """Where stacks have their folders: the system's temporary directory, or /tmp where that is too deep for sockets."""
    folder = tempfile.gettempdir()
    return Path(folder if len(folder) <= _MAX_FOLDER_CHARS else "/tmp")


def state_dir() -> Path:
    """$XDG_RUNTIME_DIR/tandem, or ~/.tandem where there is none; made 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "tandem" if runtime and os.access(runtime, os.W_OK) else Path.home() / ".tandem"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def announce(stack: RunningStack) -> Path:
    """Writes the state file of `stack`, 0600, whole or not at all; returns its path."""
    path = state_dir() / f"stack-{stack.pid}-{Path(stack.folder).name[-8:]}.json"
    unfinished = path.with_suffix(".tmp")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(stack), file)
    unfinished.rename(path)
    return path


def running_stacks() -> list[RunningStack]:
    """The announced stacks whose owner lives, the newest first."""
    stacks = [stack for _, stack in _announced() if _is_locked(Path(stack.folder))]
    return sorted(stacks, key=lambda stack: stack.started_s, reverse=True)


def running_address() -> str:
    """The router's address of the newest running stack; raises NotRunning."""
    stacks = running_stacks()
    if not stacks:
        raise NotRunning
    return stacks[0].address


def running_admin_address() -> str:
    """Where the newest running stack answers its operators; raises NotRunning."""
    stacks = [stack for stack in running_stacks() if stack.admin_address]
    if not stacks:
        raise NotRunning("--admin")
    return stacks[0].admin_address


def sweep() -> int:
    """Removes folders and state files that killed stacks of this user left behind; returns how many folders."""
    num_removed = 0
    for folder in temporary_folder().glob(_folder_prefix() + "*"):
        if _is_ours(folder) and not _is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
            num_removed += 1
    for path, stack in _announced():
        if not _is_locked(Path(stack.folder)):
            path.unlink(missing_ok=True)
    return num_removed


def _folder_prefix() -> str:
    return f"tandem-{os.getuid()}-"


def _is_ours(folder: Path) -> bool:
    """Whether it is a real folder of this user: /tmp is everybody's, and a link there may point anywhere."""
    try:
        return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _is_locked(folder: Path) -> bool:
    """Whether the stack of `folder` lives. A folder made a moment ago may not have its lock yet and counts as alive."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return folder.is_dir() and time.time() - folder.stat().st_mtime < _UNLOCKED_GRACE_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _announced() -> Iterator[tuple[Path, RunningStack]]:
    for path in state_dir().glob("stack-*.json"):
        try:
            yield path, RunningStack(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # half written by another version, or just removed: not a running stack for us
