"""UCX's connections in this process: found by their mark, cut, and nothing is left open by the search."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_transfer.nixl.agent
from kv_transfer.nixl.agent import (
    NixlAgent,
    UcxLog,
    UcxProcess,
    UcxSettings,
    cut_connections,
    default_keepalive_s,
    net_device_of,
    ucx,
)
from kv_transfer.nixl.connector import NixlConnector
from kv_transfer.secret import ensure_secret
from kv_transfer.stores.base import KEEPALIVE_IDLE_S
from kv_transfer.transfer.connector import IOThreads, Job
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT
from tests.kv_transfer.scripted_io import ScriptedNixlConnector


def marked(mark: int) -> tuple[socket.socket, socket.socket]:
    """A connection over loopback with UCX's mark on its near end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near, far = socket.create_connection(server.getsockname()), server.accept()[0]
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, mark)
    return near, far


def test_connections_of_one_mark_are_cut_and_no_descriptor_is_left() -> None:
    ours, others = marked(77), marked(78)
    pipe = os.pipe()  # no socket, as most descriptors are
    before = len(os.listdir("/proc/self/fd"))
    assert cut_connections(77) == 1
    assert cut_connections(76) == 0
    assert len(os.listdir("/proc/self/fd")) == before
    assert ours[1].recv(1) == b""
    others[0].sendall(b"x")
    assert others[1].recv(1) == b"x"
    for each in (*ours, *others):
        each.close()
    for descriptor in pipe:
        os.close(descriptor)


def test_an_agent_that_cannot_be_made_leaves_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("UCX_LOG_LEVEL", raising=False)
    process = UcxProcess()
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError), process.prepared(UcxSettings()):
            importlib.import_module("no_such_bindings")
        assert list(tmp_path.iterdir()) == []


def marks_of_agents() -> list[int]:
    """Those of 200 agents, made one after the other."""
    process = UcxProcess()
    process._loaded = True  # UCX's log is another matter
    marks = []
    for _ in range(200):
        with process.prepared(UcxSettings()) as mark:
            marks.append(mark)
    return marks


def test_no_later_agent_has_the_mark_of_the_first_one_which_lends() -> None:
    marks = marks_of_agents()
    assert marks[0] not in marks[1:]
    assert min(marks) >= 20
    assert len(set(marks)) == 60


@pytest.mark.parametrize("usual_s", [45, 7200])
def test_no_agent_has_the_mark_of_other_connections(monkeypatch: pytest.MonkeyPatch, usual_s: int) -> None:
    with socket.socket() as plain:
        assert plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == default_keepalive_s()
    monkeypatch.setattr(kv_transfer.nixl.agent, "default_keepalive_s", lambda: usual_s)
    marks = marks_of_agents()
    assert not {KEEPALIVE_IDLE_S, usual_s} & set(marks)
    assert len(set(marks)) == 60


def test_a_shutdown_leaves_the_lending_agent_to_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease is left, but a peer's read may be."""
    closed: list[str] = []
    close = NixlAgent.close

    def note(agent: NixlAgent) -> None:
        closed.append(agent.name)
        close(agent)

    monkeypatch.setattr(NixlAgent, "close", note)
    connector = NixlConnector(wake=lambda: None, digest=False)
    connector.register_kv_cache(torch.zeros((4, *LAYOUT.page_shape)), LAYOUT, FINGERPRINT)
    connector.shutdown()
    assert [name.partition("-")[0] for name in closed] == ["reads"]


_ENDING_PROCESS = """
import gc, nixl._bindings as bindings, torch
from kv_transfer.nixl.connector import NixlConnector
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT

class Watched(bindings.nixlAgent):
    def __init__(self, name, config):
        super().__init__(name, config)
        self.name = name

    def __del__(self, write=__import__("os").write):
        write(1, self.name.partition("-")[0].encode() + b" is destroyed;")

bindings.nixlAgent = Watched
connector = NixlConnector(wake=lambda: None, digest=False)
connector.register_kv_cache(torch.zeros((4, *LAYOUT.page_shape)), LAYOUT, FINGERPRINT)
connector.self_test()
connector.shutdown()
del connector
gc.collect()
raise SystemExit(0)
"""


def test_the_lending_agent_outlives_its_connector_and_the_interpreter() -> None:
    """vLLM's workers drop the connector after its shutdown, and end as any Python process does."""
    ended = subprocess.run([sys.executable, "-c", _ENDING_PROCESS], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "reads is destroyed;"), ended.stderr


def test_the_memory_that_peers_read_outlives_the_connector() -> None:
    """The lending agent's thread goes on reading it for them."""
    connector = NixlConnector(wake=lambda: None, digest=False)
    connector.register_kv_cache(torch.zeros((4, *LAYOUT.page_shape)), LAYOUT, FINGERPRINT)
    connector.shutdown()
    lent: list[weakref.ref[Any]] = [weakref.ref(connector._memory), weakref.ref(connector._tags._tags)]
    del connector
    gc.collect()
    assert all(each() is not None for each in lent)


class HeldThreads(IOThreads):
    """Keeps its jobs, as threads do that are blocked."""

    def __init__(self) -> None:
        super().__init__(0, "held")
        self.held: list[Job] = []

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        self.held.append(job)


def test_a_look_into_the_log_of_ucx_that_blocks_keeps_one_thread(tmp_path: Path) -> None:
    ensure_secret(tmp_path / "secret")
    now = 0.0
    connector = ScriptedNixlConnector(4, lambda: now, str(tmp_path / "secret"))
    threads = connector._threads = HeldThreads()
    for _ in range(3):
        connector.poll()
        now += 1.0
    assert len(threads.held) == 1
    threads.held.pop()()
    connector.poll()
    assert len(threads.held) == 1, "it looks again once that has ended"
    connector.shutdown()


def test_a_log_of_ucx_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    log = UcxLog(shows_warnings=False)
    log.unlink()
    readable, log._descriptor = log._descriptor, os.open(tmp_path, os.O_RDONLY)
    log.read()
    for descriptor in (readable, log._descriptor):
        os.close(descriptor)


def test_warnings_of_ucx_are_passed_on_while_agents_live(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ensure_secret(tmp_path / "secret")
    log, now = UcxLog(shows_warnings=False), 0.0
    monkeypatch.setattr(ucx, "log", log)
    connector = ScriptedNixlConnector(4, lambda: now, str(tmp_path / "secret"))
    connector.poll()
    Path(log._path).write_text("[1.2] [host:3:4] ib.c:5    UCX  ERROR the port is down\n")
    connector.poll()
    assert not caplog.messages, "it looks once a second"
    now = 1.0
    connector.poll()
    assert caplog.messages == ["UCX: the port is down"]
    connector.shutdown()
    log.unlink()


@pytest.mark.parametrize("host", ["prefill..svc", f"{'x' * 64}.svc"])
def test_what_no_name_may_be_has_no_device(host: str) -> None:
    assert net_device_of(host) == "all"
