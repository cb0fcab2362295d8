"""What is found out before a stack starts: addresses, and the store, which leaves room on its disk and in memory."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.local_stack.preflight import check_addresses, own_store
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.topology import Topology

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


def settings(**fields: object) -> StackSettings:
    return StackSettings(model=Path("/m"), model_name="demo", **fields)  # type: ignore[arg-type]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A file system of its own at tmp_path; 40 GiB of memory are available."""
    disk = SimpleNamespace(free=200 * GIB, fstype="ext4")

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(500 * GIB, 500 * GIB - disk.free, disk.free))
    root, own = SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path))
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: [root, SimpleNamespace(**vars(own), fstype=disk.fstype)])
    monkeypatch.setattr("tandem.local_stack.topology.available_bytes", lambda: 40 * GIB)
    return disk


def capacities(topology: Topology) -> list[str]:
    """Every one that an instance is given, as `--flag VALUE` or `--flag=VALUE`; the last one counts."""
    command = " ".join(topology.instance("decode-0", "127.0.0.1:7001").argv)
    return re.findall(r"--kv-capacity-bytes[ =](\S+)", command)


@pytest.mark.parametrize(("free", "size"), [(200 * GIB, 16 * GIB), (20 * GIB, 5 * GIB), (0, 64 << 20)])
def test_the_store_takes_a_quarter_of_its_disk_at_most(
    free: int, size: int, disk: SimpleNamespace, tmp_path: Path
) -> None:
    disk.free = free
    made = Topology(settings(), tmp_path)
    assert capacities(made) == [str(size)]
    assert made.kv_cache_bytes == 2 * GIB


@pytest.mark.parametrize(("memory", "size"), [(40, 10), (16, 4)])
def test_a_store_in_memory_is_counted_with_the_instances_memory(
    memory: int, size: int, disk: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.local_stack.topology.available_bytes", lambda: memory * GIB)
    disk.fstype = "tmpfs"
    made = Topology(settings(num_decode=15), tmp_path)
    assert capacities(made) == [str(size * GIB)]
    assert made.kv_cache_bytes == int((memory - size) * GIB * 0.4) // 16


def test_a_store_in_memory_leaves_the_kv_memory_that_was_asked_for(disk: SimpleNamespace, tmp_path: Path) -> None:
    disk.fstype = "tmpfs"
    made = Topology(settings(kv_cache_bytes=18 * GIB), tmp_path)
    assert capacities(made) == [str(GIB)]
    assert made.kv_cache_bytes == 18 * GIB


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize(
    ("fields", "environment", "given"),
    [
        ({"instance_args": ("--kv-capacity-bytes=5",)}, {}, ["5"]),
        ({"instance_args": ('--kv-options={"capacity_bytes": 5}',)}, {}, []),
        ({"instance_args": ("--kv-folder=/mnt/kv",)}, {}, []),
        ({}, {"TANDEM_TRANSFER__CAPACITY_BYTES": "5"}, []),
        ({"connector": "acme.kv:Connector,shared_storage"}, {}, []),
        ({"connector": "nixl"}, {}, []),
        ({"connector": "lmcache", "kv_url": "tcp://host:1"}, {}, []),
        ({"engine": "vllm", "num_prefill": 0}, {}, []),
        ({"instance_args": ("--max-num-seqs=2",)}, {"TANDEM_TRANSFER__LEASE_S": "9"}, [str(16 * GIB)]),
        ({"connector": "lmcache"}, {}, [str(16 * GIB)]),
        ({"connector": "nixl,shared_storage"}, {}, [str(16 * GIB)]),
    ],
)
def test_a_size_that_is_given_stays(
    fields: dict[str, object],
    environment: dict[str, str],
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert capacities(Topology(settings(**fields), tmp_path)) == given


def folders(topology: Topology) -> list[str]:
    """Every one that an instance is given as a flag; the last one counts."""
    command = " ".join(topology.instance("decode-0", "127.0.0.1:7001").argv)
    return re.findall(r"--kv-folder[ =](\S+)", command)


@pytest.mark.usefixtures("disk")
def test_a_folder_that_is_given_takes_the_place_of_the_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders(Topology(settings(), tmp_path)) == [str(tmp_path / "store")]
    assert folders(Topology(settings(instance_args=("--kv-folder=/mnt/kv",)), tmp_path)) == ["/mnt/kv"]
    (tmp_path / "instances.yaml").write_text("transfer: {folder: /mnt/kv}\n")
    in_file = settings(instance_args=(f"--config={tmp_path / 'instances.yaml'}",))
    assert folders(Topology(in_file, tmp_path)) == []
    monkeypatch.setenv("TANDEM_TRANSFER__FOLDER", "/mnt/kv")
    for connector in ("shared_storage", "lmcache", "acme.kv:Connector,shared_storage"):
        assert folders(Topology(settings(connector=connector), tmp_path)) == []


@pytest.mark.usefixtures("disk")
def test_a_size_alone_leaves_the_stacks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TRANSFER__CAPACITY_BYTES", "5")
    assert folders(Topology(settings(), tmp_path)) == [str(tmp_path / "store")]


def test_what_is_mounted_says_whether_a_folder_is_in_memory() -> None:
    size = own_store(settings(), Path("/dev/shm"), 40 * GIB)
    assert size is not None
    assert size.in_memory


def test_a_host_that_no_certificate_can_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"--host büro: .* --tls .* ASCII"):
        check_addresses(settings(host="büro", tls=True))


@pytest.mark.parametrize(
    ("arg", "instead"),
    [
        ("--listen=127.0.0.1:7000", "--host and --port"),
        ("--router-workers=2", "--router-workers"),
        ("--admin-listen", "nothing"),
    ],
)
def test_a_flag_of_the_router_that_the_stack_must_know_is_not_passed_on(arg: str, instead: str) -> None:
    """Or the stack waits for a router that listens elsewhere, and reports a part of its workers' figures as all."""
    with pytest.raises(ValueError, match=rf"--router-arg={arg}: the stack would not know it; give {instead}"):
        check_addresses(settings(router_args=("--log-level=debug", arg)))
    check_addresses(settings(router_args=("--http-listen=127.0.0.1:0",)))


def test_a_connector_class_of_ones_own_may_have_a_server() -> None:
    check_addresses(settings(connector="my.pages:Store", kv_url="s3://bucket"))
