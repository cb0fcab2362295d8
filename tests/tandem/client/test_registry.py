"""A stack is found while it lives, what a killed one left is swept, and addresses of this machine are known."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tandem import Client
from tandem.client import registry
from tandem.client.credentials import API_KEY_FILE, PLAINTEXT, Credentials
from tandem.client.errors import NotRunning
from tandem.client.registry import RunningStack, StackFolder, is_here


@pytest.fixture(autouse=True)
def _own_folders(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))


def announced(folder: Path, address: str = "127.0.0.1:1", started_s: float = 1.0) -> Path:
    return registry.announce(RunningStack(address, str(folder), os.getpid(), "demo", {}, started_s))


def test_a_running_stack_is_found_and_the_newest_wins() -> None:
    with pytest.raises(NotRunning, match="Start one with `tandem up`"):
        registry.running_address()
    older, newer = StackFolder(), StackFolder()
    announced(older.path, "older:1", 1.0)
    announced(newer.path, "newer:1", 2.0)
    assert registry.running_address() == "newer:1"
    newer.remove()
    assert registry.running_address() == "older:1"
    older.remove()
    with pytest.raises(NotRunning):
        registry.running_address()


def test_a_stack_that_is_not_ready_yet_is_said_to_be_starting() -> None:
    folder = StackFolder()
    for find in (registry.running_address, registry.running_admin_address):
        with pytest.raises(NotRunning, match=r"is still starting.*Try again, or give --a[a-z]* host:port"):
            find()
    folder.remove()


def test_a_full_disk_leaves_no_part_of_an_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = StackFolder()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.json'"):
        announced(folder.path)
    assert list(registry.state_dir().iterdir()) == []
    folder.remove()


def test_metrics_are_those_of_the_stack_with_that_admin_address_unless_they_need_credentials() -> None:
    folder = StackFolder()
    stack = RunningStack("r:1", str(folder.path), os.getpid(), "demo", {}, 1.0, "admin:1", http_address="http:1")
    registry.announce(stack)
    assert registry.metrics_address_of("admin:1") == "http:1"
    assert registry.metrics_address_of("elsewhere:1") is None
    (folder.path / API_KEY_FILE).touch()
    assert registry.metrics_address_of("admin:1") is None
    folder.remove()


def test_a_stack_that_listens_at_a_name_is_on_this_machine_while_it_runs() -> None:
    folder = StackFolder()
    stack = RunningStack("laptop:1", str(folder.path), os.getpid(), "demo", {}, 1.0, http_address="laptop:2")
    registry.announce(stack)
    assert registry.is_local("laptop:1")
    assert registry.is_local("laptop:2")
    assert not registry.is_local("laptop:3")
    assert registry.is_local("localhost:3")
    folder.remove()
    assert not registry.is_local("laptop:1")


@pytest.mark.parametrize(
    ("announced", "given", "is_the_same"),
    [
        ("0.0.0.0:5", "127.0.0.1:5", True),
        ("0.0.0.0:5", "LocalHost:5", False),
        ("0.0.0.0:5", "[::1]:5", False),
        ("0.0.0.0:5", "127.0.0.2:5", True),
        ("[::]:5", "ipv6:[::1]:5", True),
        ("0.0.0.0:5", "ipv4:127.0.0.1:5", True),
        ("0.0.0.0:5", "localhost:6", False),
        ("0.0.0.0:5", "10.0.0.7:5", False),
        ("0.0.0.0:5", "localhost.example.org:5", False),
        ("0.0.0.0:5", "127.0.0.1:5,10.0.0.7:5", False),
        ("0.0.0.0:5", "127.0.0.1:5,10.0.0.7:5,0.0.0.0:5", False),
        ("127.0.0.1:5", "localhost:5", False),
        ("127.0.0.1:5", "0.0.0.0:5", True),
        ("127.0.0.1:5", "127.0.0.2:5", False),  # another process may listen there
        ("127.0.0.1:5", "[::1]:5", False),
        ("[::1]:5", "[::]:5", True),
        ("localhost:5", "localhost:5", True),
        ("10.0.0.7:5", "10.0.0.7:5", True),
        ("10.0.0.7:5", "127.0.0.1:5", False),
    ],
)
def test_a_stack_is_found_by_each_address_that_reaches_it_and_its_key_goes_nowhere_else(
    announced: str, given: str, is_the_same: bool
) -> None:
    folder = StackFolder()
    (folder.path / API_KEY_FILE).touch()
    place = str(folder.path)
    registry.announce(RunningStack(announced, place, os.getpid(), "demo", {}, 1.0, announced, "/checkpoint"))
    key = Credentials(token_file=folder.path / API_KEY_FILE)
    assert registry.credentials_for(given) == (key if is_the_same else PLAINTEXT)
    assert registry.model_folder_of(given) == (Path("/checkpoint") if is_the_same else None)
    (folder.path / API_KEY_FILE).unlink()
    assert registry.metrics_address_of(given) is None
    registry.announce(RunningStack(announced, place, os.getpid(), "demo", {}, 1.0, announced, http_address="http:1"))
    assert registry.metrics_address_of(given) == ("http:1" if is_the_same else None)
    folder.remove()


def test_folder_and_state_file_are_private() -> None:
    folder = StackFolder()
    path = announced(folder.path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    folder.remove()


def test_systemd_tmpfiles_finds_the_folder_locked() -> None:
    """It skips a folder, with all that lies in it, that it cannot lock."""
    folder = StackFolder()
    descriptor = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.remove()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_what_a_killed_stack_left_is_swept_and_what_a_living_one_has_is_not() -> None:
    living = StackFolder()
    kept = announced(living.path)
    code = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from tandem.client.registry import *\n"
        "folder = StackFolder()\n"
        "announce(RunningStack('x:1', str(folder.path), os.getpid(), 'demo', {}, 9.0))\n"
        "(folder.path / 'store').mkdir(); (folder.path / 'store' / 'page').write_bytes(b'kv')\n"
        "print(folder.path, flush=True); os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, tempfile.gettempdir()], capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    assert registry.running_address() == "127.0.0.1:1", "the dead one is newer, but dead"
    assert registry.sweep() == 1
    assert not left.exists()
    assert living.path.is_dir()
    assert list(registry.state_dir().glob("stack-*.json")) == [kept]
    living.remove()


def test_the_state_file_of_a_stack_that_sees_another_temporary_directory_is_kept_for_a_day(short_folder: Path) -> None:
    """As of a service with PrivateTmp, or in another container with the same home: it may run."""
    path = announced(short_folder / f"tandem-{os.getuid()}-elsewhere")
    registry.sweep()
    assert path.exists()
    assert registry.running_stacks() == []
    os.utime(path, (0, 0))
    registry.sweep()
    assert not path.exists()


def test_a_stack_that_starts_meanwhile_keeps_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def flock_after_a_sweep(descriptor: int, operation: int) -> None:
        sweeping.setattr(fcntl, "flock", flock)
        registry.sweep()
        flock(descriptor, operation)

    with monkeypatch.context() as sweeping:
        sweeping.setattr(fcntl, "flock", flock_after_a_sweep)
        folder = StackFolder()
    registry.sweep()
    assert folder.path.is_dir()
    folder.remove()


def test_a_stack_that_ends_while_it_is_looked_at_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StackFolder()
    (folder.path / "lock").unlink()

    def removed_meanwhile() -> float:
        folder.remove()
        return 0.0

    monkeypatch.setattr(registry, "time", SimpleNamespace(time=removed_meanwhile))
    announced(folder.path)
    assert registry.running_stacks() == []


def test_a_dead_stack_is_dead_for_two_commands_that_look_at_once(short_folder: Path) -> None:
    folder = short_folder / f"tandem-{os.getuid()}-dead"
    folder.mkdir()
    (folder / "lock").touch()
    announced(folder)
    with (folder / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the other command's look
        assert registry.running_stacks() == []
        assert registry.sweep() == 1


def test_a_link_in_the_temporary_folder_is_not_followed(short_folder: Path) -> None:
    target = short_folder / "precious"
    target.mkdir()
    (target / "lock").touch()
    (short_folder / f"tandem-{os.getuid()}-link").symlink_to(target)
    assert registry.sweep() == 0
    assert target.is_dir()


def test_a_stack_of_a_later_version_is_found() -> None:
    folder = StackFolder()
    path = announced(folder.path, "later:1")
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_a_later_version": [1]}))
    assert registry.running_address() == "later:1"
    folder.remove()


@pytest.mark.parametrize("content", ["{", "[]", "null", "{}", '{"address": "of-another-form:1"}'])
def test_a_broken_state_file_is_no_running_stack(content: str) -> None:
    registry.state_dir().mkdir()
    (registry.state_dir() / "stack-1-x.json").write_text(content)
    assert registry.running_stacks() == []


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    path = registry.made_state_dir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda tried, mode: tried != path and access(tried, mode))  # root may write all
    with pytest.raises(OSError, match=rf"^{path}, .*, cannot be written; remove it, or set XDG_RUNTIME_DIR to"):
        registry.made_state_dir()


@pytest.mark.parametrize("home", ["absent", "file/home", None])
def test_a_client_needs_no_home(home: str | None, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short_folder / "file").touch()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path if home is None else str(short_folder / home))
    assert registry.running_stacks() == []
    assert registry.credentials_for("127.0.0.1:1") == PLAINTEXT
    Client("127.0.0.1:1").close()
    assert list(short_folder.iterdir()) == [short_folder / "file"]


def test_a_temporary_directory_too_deep_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "/tmp/" + "deep/" * 20
    monkeypatch.setattr(tempfile, "tempdir", deep)
    assert registry.temporary_folder() == Path("/tmp")


def test_what_is_on_this_machine() -> None:
    assert is_here("ipv6:[::1]:1,[::]:2")
    assert not is_here("ipv4:127.0.0.1:1,203.0.113.1:1")
    assert not is_here("dns:///router:1")
    assert is_here("dns:///localhost:1")
    assert is_here("dns://10.0.0.53/localhost:1")
    assert is_here("dns://10.0.0.53:53/127.0.0.1:1")
    assert not is_here("dns://127.0.0.1:53/router:1")


def test_addresses_of_network_interfaces_are_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [
        SimpleNamespace(family=socket.AF_INET, address="10.0.0.5"),
        SimpleNamespace(family=socket.AF_INET6, address="2001:db8::5"),
        SimpleNamespace(family=psutil.AF_LINK, address="02:42:0a:00:00:05:00:01"),
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": addresses})
    assert is_here("10.0.0.5:1")
    assert is_here("ipv4:127.0.0.1:1,10.0.0.5:1")
    assert is_here("[2001:db8::5]:1")
    assert not is_here("10.0.0.6:1")
    assert not is_here("ipv4:10.0.0.5:1,10.0.0.6:1")
    assert not is_here("[2:42:a:0:0:5:0:1]:1"), "a hardware address"
