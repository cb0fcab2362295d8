"""A whole stack over a Redis that is killed, frozen, emptied, full or read-only under load: every request gets the
right answer, KV comes from Redis again soon after, and no log tells a byte of KV or a secret.

That the breaker opens within a second is seen here where Redis itself can tell: it counts the writes that it refuses.
For a killed and a frozen one tests/kv_transfer/test_redis_faults.py looks at the breaker.
"""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.page import HEADER_BYTES
from kv_transfer.redis_dial import PASSWORD_VARIABLE
from kv_transfer.secret import load_secret
from tests.e2e.redis_clients import Clients, told, windows
from tests.faults.checker import wait_idle
from tests.faults.reference import Answer, Reference
from tests.faults.rig import Rig
from tests.kv_transfer.redis_server import RedisServer, redis_server
from tests.kv_transfer.test_redis_faults import Fault, Frozen, Full, Killed, ReadOnly
from tests.lively import BLOCK_SIZE, random_prompt, rig_settings

SAMPLING = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
PASSWORD = "quite-a-pass-word-0815"
NUM_CLIENTS = 3
NUM_PROMPTS = 12
FELT_S, BACK_S, BREAKER_S = 10.0, 5.0, 1.0
RETRY_S = 2.0
"""The store is left alone for so long once the breaker is open."""
MAX_TRIES = 3 + 4
"""Writes until it opens: three in a row must fail, while others are under way on Redis's four threads."""
FREED_WITHIN_S = 4.0


class Emptied(Fault):
    """All keys go again and again, until a request has missed some."""

    def begin(self, server: RedisServer) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._flush, args=(server,))
        self._thread.start()

    def end(self, server: RedisServer) -> None:
        del server
        self._stop.set()
        self._thread.join()

    def _flush(self, server: RedisServer) -> None:
        with server.client() as client:
            while not self._stop.wait(0.002):
                client.flushall()


class MayNotWrite(Fault):
    """The account may do everything else."""

    def begin(self, server: RedisServer) -> None:
        server.run("ACL", "SETUSER", "default", "-set")

    def end(self, server: RedisServer) -> None:
        server.run("ACL", "SETUSER", "default", "+set")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), password=PASSWORD) as server:
        yield server


@pytest.fixture(scope="module")
def redis_rig(checkpoint: Path, server: RedisServer) -> Iterator[Rig]:
    """Its logs tell as much as they can."""
    settings = rig_settings(checkpoint)
    settings = rig_settings(
        checkpoint,
        connector="redis",
        kv_url=server.url,
        router_args=("--log-level", "debug"),
        instance_args=(*settings.instance_args, "--log-level", "debug"),
    )
    rig = Rig(settings, env={name: {PASSWORD_VARIABLE: PASSWORD} for name in ("prefill-0", "decode-0")})
    rig.start()
    try:
        yield rig
    finally:
        rig.stop()


@pytest.fixture(scope="module")
def answers(reference: Reference) -> list[tuple[list[int], Answer]]:
    source = random.Random("redis")
    prompts = [random_prompt(source, source.randrange(8 * BLOCK_SIZE, 11 * BLOCK_SIZE)) for _ in range(NUM_PROMPTS)]
    return [(prompt, reference.answer(prompt, **SAMPLING)) for prompt in prompts]


def num_refused_writes(server: RedisServer) -> int:
    """Pages that Redis was asked to keep and did not."""
    with server.client() as client:
        counts = client.info("commandstats").get("cmdstat_set", {})
    return int(counts.get("rejected_calls", 0)) + int(counts.get("failed_calls", 0))


def check_breaker_opens(server: RedisServer, clients: Clients, num_before: int) -> None:
    """From a second after the first refusal on hardly anything is written, though requests go on. What still works (a
    page that is there already, a miss) closes the breaker each time that it lets one try, until the next refusals."""
    deadline_s = time.monotonic() + FELT_S
    while num_refused_writes(server) == num_before:
        assert time.monotonic() < deadline_s, "nothing was refused: it proves nothing"
        time.sleep(0.005)
    time.sleep(BREAKER_S)
    started_s, first = time.monotonic(), num_refused_writes(server)
    clients.wait_for_answers(4 * NUM_CLIENTS, 2 * FELT_S)
    num_tries, elapsed_s = num_refused_writes(server) - first, time.monotonic() - started_s
    assert num_tries <= MAX_TRIES * (1 + elapsed_s / RETRY_S), f"{num_tries} writes in {elapsed_s:.1f} s"
    print(f"{first - num_before} writes were refused in the first second, {num_tries} in the next {elapsed_s:.1f} s")


def known_secrets(server: RedisServer, rig: Rig) -> list[bytes]:
    """Pieces of pages that lie in Redis now, the key of the digests, the password."""
    source = random.Random("windows")
    with server.client() as client:
        values = [client.get(name) for name in sorted(client.keys("*"))[:8]]
    pages = [value[HEADER_BYTES:] for value in values if isinstance(value, bytes)]
    assert pages, "nothing lies in Redis"
    key = load_secret(str(rig.stack.folder / "kv_secret"))
    return [*(piece for page in pages for piece in windows(page, source)), key, PASSWORD.encode()]


def logs(rig: Rig) -> bytes:
    """Everything that the stack has written down."""
    files = [path for path in (rig.stack.folder / "logs").rglob("*") if path.is_file()]
    assert len(files) == len(rig.stack.members)
    return b"\n".join(path.read_bytes() for path in files)


@pytest.mark.parametrize(
    "kind", [Killed, Frozen, Emptied, Full, ReadOnly, pytest.param(MayNotWrite, marks=pytest.mark.slow)]
)
def test_no_request_fails_or_differs_whatever_happens_to_redis(
    redis_rig: Rig, server: RedisServer, answers: list[tuple[list[int], Answer]], kind: type[Fault]
) -> None:
    fault, num_refused = kind(), num_refused_writes(server)
    with Clients(redis_rig.address, answers, SAMPLING, NUM_CLIENTS) as clients:
        clients.wait_for_hit(FELT_S)
        secrets = known_secrets(server, redis_rig)
        # STEP it happens, is felt, and lasts
        fault.begin(server)
        try:
            felt_s = clients.wait_for_recompute(FELT_S)
            if kind in (Full, ReadOnly, MayNotWrite):
                check_breaker_opens(server, clients, num_refused)
            clients.wait_for_answers(3 * NUM_CLIENTS, 2 * FELT_S)
        finally:
            fault.end(server)
        # STEP it is over
        back_s = clients.wait_for_hit(BACK_S)
        clients.wait_for_answers(NUM_CLIENTS, 2 * FELT_S)
    wait_idle(redis_rig, FREED_WITHIN_S)
    longest_s = max(one.ended_s - one.started_s for one in clients.answered)
    print(
        f"{kind.__name__}: {len(clients.answered)} right answers, felt after {felt_s:.2f} s, hits back after "
        f"{back_s:.2f} s, the slowest took {longest_s:.2f} s"
    )
    # STEP the logs tell what was, and nothing else
    content = logs(redis_rig)
    assert b"redis at 127.0.0.1" in content
    assert not told(content, secrets), "a log tells KV bytes, the key or the password"


@pytest.mark.parametrize("writing", ["hex", "base64", "repr", "latin-1", "raw"])
def test_the_search_of_logs_finds_what_it_looks_for(writing: str) -> None:
    source = random.Random("page")
    page = source.randbytes(4096)
    written = {
        "hex": page.hex().encode(),
        "base64": base64.b64encode(b"." + page),
        "repr": repr(page).encode(),
        "latin-1": page.decode("latin-1").encode(),
        "raw": page,
    }
    pieces = list(windows(page, source))
    assert told(b"DEBUG a page: " + written[writing] + b"\n", pieces) == pieces
    assert not told(b"DEBUG a page: " + source.randbytes(4096).hex().encode(), pieces)
