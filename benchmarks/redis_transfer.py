"""How fast pages go to Redis and come back, next to one raw connection that reads the same values.

    python -m benchmarks.redis_transfer [--page-bytes 1835008] [--pages 64] [--threads 2] [--lives 4] [--rounds 3]

Starts a Redis of its own on loopback. Each round measures, one after another: save and load through the store, with
digests and without; then the raw connection (GET and recv_into a ready buffer, in lock step: with a plain socket, with
a socket buffered as ours are, and with the next GET sent ahead). What is compared was measured in the same round. A
connection's speed depends on what the kernel's congestion control has made of its beginnings (BBR: up to a factor of
two, for its whole life), so connections are made anew a few times; medians over all rounds are printed. Load and save
run as in an instance: on I/O threads, header and digest made and verified, from and into one KV memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from kv_transfer.io_threads import IOThreads
from kv_transfer.page import EPOCH_BYTES, HEADER_BYTES, PageSpec, check_header, check_payload, seal
from kv_transfer.redis_connector import RedisOptions, make_store
from kv_transfer.redis_dial import set_receive_buffer
from kv_transfer.redis_store import RedisStore
from kv_transfer.redis_wire import encode
from kv_transfer.store import PageKey
from tests.kv_transfer.redis_server import RedisServer, redis_server

_KEY = bytes(range(32))
RAW = (("raw", 1, False), ("raw with our buffer", 1, True), ("raw, 2 ahead", 2, False))
"""Name, GETs in flight, and whether the socket has the receive buffer that the store's sockets have."""


@dataclass(frozen=True, slots=True)
class Memory:
    """KV memory of one instance, and what its pages are called."""

    kv: memoryview
    page_bytes: int
    specs: list[PageSpec]

    @classmethod
    def of(cls, num_pages: int, page_bytes: int) -> Memory:
        """Random pages."""
        kv = memoryview(bytearray(os.urandom(page_bytes) * num_pages))
        for index in range(num_pages):
            kv[index * page_bytes] = index % 256
        return cls(kv, page_bytes, [_spec(index, page_bytes) for index in range(num_pages)])

    def page(self, index: int) -> memoryview:
        return self.kv[index * self.page_bytes : (index + 1) * self.page_bytes]


@click.command(help=__doc__)
@click.option("--page-bytes", default=1_835_008, show_default=True, help="16 tokens of a 0.6B Qwen3 in bfloat16.")
@click.option("--pages", "num_pages", default=64, show_default=True, help="Pages moved in each measurement.")
@click.option("--threads", "num_threads", default=2, show_default=True, help="I/O threads, as num_io_threads.")
@click.option("--connections", "num_connections", default=1, show_default=True, help="As num_connections.")
@click.option("--lives", default=4, show_default=True, help="Sets of connections, one after another.")
@click.option("--rounds", default=3, show_default=True, help="Measurements of each, after one to warm up.")
def main(page_bytes: int, num_pages: int, num_threads: int, num_connections: int, lives: int, rounds: int) -> None:
    memory = Memory.of(num_pages, page_bytes)
    target = Memory(memoryview(bytearray(len(memory.kv))), page_bytes, memory.specs)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:
        options = RedisOptions(
            url=server.url, digest=False, num_io_threads=num_threads, num_connections=num_connections
        )
        for _ in range(lives):
            for number, measured in enumerate(life(server, options, memory, target, rounds + 1)):
                if number:  # the first one warms up
                    for name, speed in measured.items():
                        figures.setdefault(name, []).append(speed)
    show(figures)


def life(
    server: RedisServer, options: RedisOptions, memory: Memory, target: Memory, rounds: int
) -> Iterator[dict[str, float]]:
    """Rounds on one set of connections, in GB/s."""
    store, num_bytes = make_store(options), len(memory.kv)

    def speed(work: Callable[[], None]) -> float:
        started_s = time.perf_counter()
        work()
        return num_bytes / (time.perf_counter() - started_s) / 1e9

    def each(job: Callable[[RedisStore, Memory, int, bytes | None], None], own: Memory, key: bytes | None) -> float:
        return speed(
            lambda: on_threads(options.num_io_threads, len(own.specs), lambda index: job(store, own, index, key))
        )

    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        store.connect()
        time.sleep(0.1)  # an instance connects when it starts, and pages come later
        sockets = {}
        for name, _, is_tuned in RAW:
            sock = sockets[name] = stack.enter_context(socket.socket())
            if is_tuned:
                set_receive_buffer(sock)
            sock.connect(("127.0.0.1", server.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(rounds):
            figures = {}
            for name, key in (("digest on", _KEY), ("digest off", None)):
                figures[f"save, {name}"] = each(save, memory, key)
                figures[f"load, {name}"] = each(load, target, key)
                assert target.kv == memory.kv, "what was loaded is not what was saved"
            for name, depth, _ in RAW:
                figures[name] = speed(lambda name=name, depth=depth: read_raw(sockets[name], target, depth))  # type: ignore[misc]
            yield figures


def save(store: RedisStore, memory: Memory, index: int, key: bytes | None) -> None:
    spec, page = memory.specs[index], memory.page(index)
    store.put(_page_key(spec), (seal(spec, page, key=key, writer_epoch=bytes(EPOCH_BYTES)), page))


def load(store: RedisStore, target: Memory, index: int, key: bytes | None) -> None:
    spec, page, header = target.specs[index], target.page(index), bytearray(HEADER_BYTES)
    assert store.get_into(_page_key(spec), (header, page), lambda: check_header(header, spec, digest=key is not None))
    check_payload(header, page, spec, key=key)


def read_raw(sock: socket.socket, target: Memory, depth: int) -> None:
    """The least that reading takes: GETs sent `depth` ahead, answers into buffers that are there."""
    line = memoryview(bytearray(len(b"$%d\r\n" % (HEADER_BYTES + target.page_bytes)) + HEADER_BYTES))
    end = memoryview(bytearray(2))
    num_sent = 0
    for index in range(len(target.specs)):
        while num_sent < min(len(target.specs), index + depth):
            name = "tandem:" + "/".join(_page_key(target.specs[num_sent]).parts)
            sock.sendall(encode("GET", name))
            num_sent += 1
        for view in (line, target.page(index), end):
            filled = 0
            while filled < len(view):
                filled += sock.recv_into(view[filled:])


def on_threads(num_threads: int, num_jobs: int, job: Callable[[int], None]) -> None:
    """Every job once, on I/O threads as a connector has them."""
    threads, failures, done = IOThreads(num_threads, "bench"), [], threading.Semaphore(0)

    def run(index: int) -> None:
        try:
            job(index)
        except Exception as error:
            failures.append(error)
        finally:
            done.release()

    for index in range(num_jobs):
        threads.submit(lambda index=index: run(index))  # type: ignore[misc]
    for _ in range(num_jobs):
        done.acquire()
    threads.shutdown(10.0)
    if failures:
        raise failures[0]


def show(figures: dict[str, list[float]]) -> None:
    for name, speeds in figures.items():
        line = f"{name:20} {statistics.median(speeds):5.2f} GB/s  ({min(speeds):.2f}-{max(speeds):.2f})"
        if name.startswith("load"):
            for raw, *_ in RAW:
                share = statistics.median(ours / bare for ours, bare in zip(speeds, figures[raw], strict=True))
                line += f"  {share:4.0%} of {raw}"
        click.echo(line)


def _spec(index: int, page_bytes: int) -> PageSpec:
    identity = index.to_bytes(32, "little")
    return PageSpec(b"benchmark".ljust(32, b"\0"), bytes(32), identity, bytes(32), 16, page_bytes)


def _page_key(spec: PageSpec) -> PageKey:
    return PageKey(spec.fingerprint, spec.block_hash)


if __name__ == "__main__":
    main()
