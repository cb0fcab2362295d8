"""A whole stack over a Redis that is killed, frozen, emptied, full or read-only under load: every request gets the
right answer, KV comes from Redis again soon after, and no log contains a byte of KV or a secret.

That the breaker opens within a second is checked here where Redis itself counts the writes that it rejects. For a
killed and a frozen one tests/kv_transfer/stores/redis/test_faults.py checks the breaker.
"""

from __future__ import annotations

import base64
import random
import threading
import time

import pytest

from kv_transfer.page.format import HEADER_BYTES
from kv_transfer.secret import load_secret
from tests.engine_under_test import BLOCK_SIZE
from tests.kv_transfer.stores.redis.redis_server import RedisServer
from tests.kv_transfer.stores.redis.test_faults import Fault, Frozen, Full, Killed, ReadOnly
from tests.lively import random_prompt
from tests.system.checker import wait_idle
from tests.system.connectors import REDIS_PASSWORD
from tests.system.redis_clients import Clients, found_in, windows
from tests.system.reference import Answer, Reference
from tests.system.rig import Rig
from tests.system.stacks import Stack, on_stack

SAMPLING = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
NUM_CLIENTS = 3
NUM_PROMPTS = 12
FELT_S, BACK_S, BREAKER_S = 10.0, 5.0, 1.0
RETRY_S = 2.0
"""The breaker, once open, lets nothing through for so long."""
MAX_TRIES = 3 + 4
"""Writes until it opens: three in a row must fail, while others run on the connector's four threads."""


class Emptied(Fault):
    """All keys are removed again and again, until a request has missed some."""

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
def answers(reference: Reference) -> list[tuple[list[int], Answer]]:
    source = random.Random("redis")
    prompts = [random_prompt(source, source.randrange(8 * BLOCK_SIZE, 11 * BLOCK_SIZE)) for _ in range(NUM_PROMPTS)]
    return [(prompt, reference.answer(prompt, **SAMPLING)) for prompt in prompts]


def num_rejected_writes(server: RedisServer) -> int:
    """Writes that Redis has rejected."""
    with server.client() as client:
        counts = client.info("commandstats").get("cmdstat_set", {})
    return int(counts.get("rejected_calls", 0)) + int(counts.get("failed_calls", 0))


def check_breaker_opens(server: RedisServer, clients: Clients, num_before: int) -> None:
    """From a second after the first rejected write on hardly anything is written, while requests continue. Where a try
    finds its page there, three more writes are rejected."""
    deadline_s = time.monotonic() + FELT_S
    while num_rejected_writes(server) == num_before:
        assert time.monotonic() < deadline_s, "no write was rejected: this proves nothing"
        time.sleep(0.005)
    time.sleep(BREAKER_S)
    started_s, first = time.monotonic(), num_rejected_writes(server)
    clients.wait_for_answers(4 * NUM_CLIENTS, 2 * FELT_S)
    num_tries, elapsed_s = num_rejected_writes(server) - first, time.monotonic() - started_s
    assert num_tries <= MAX_TRIES * (1 + elapsed_s / RETRY_S), f"{num_tries} writes in {elapsed_s:.1f} s"
    print(f"{first - num_before} writes were rejected in the first second, {num_tries} in the next {elapsed_s:.1f} s")


def known_secrets(server: RedisServer, rig: Rig) -> list[bytes]:
    """Pieces of pages that are in Redis now, the key of the digests, the password."""
    source = random.Random("windows")
    with server.client() as client:
        values = [client.get(name) for name in sorted(client.keys("*"))[:8]]
    pages = [value[HEADER_BYTES:] for value in values if isinstance(value, bytes)]
    assert pages, "Redis is empty"
    key = load_secret(str(rig.stack.folder / "kv_secret"))
    return [*(piece for page in pages for piece in windows(page, source)), key, REDIS_PASSWORD.encode()]


def logs(rig: Rig) -> bytes:
    """The text of all logs of the stack."""
    files = [path for path in (rig.stack.folder / "logs").rglob("*") if path.is_file()]
    assert len(files) == len(rig.stack.processes)
    return b"\n".join(path.read_bytes() for path in files)


QUICK = (Killed, Emptied, Full)
"""One for each effect: no answer, no page, rejected writes. The others are slow tests."""
FAULTS = [
    pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
    for kind in (Killed, Frozen, Emptied, Full, ReadOnly, MayNotWrite)
]


@on_stack("pair redis")
@pytest.mark.parametrize("kind", FAULTS)
def test_no_request_fails_or_differs_whatever_happens_to_redis(
    shared_stack: Stack, answers: list[tuple[list[int], Answer]], kind: type[Fault]
) -> None:
    rig, server = shared_stack.rig, shared_stack.backing.redis
    assert server is not None
    fault, num_rejected = kind(), num_rejected_writes(server)
    with Clients(rig.address, answers, SAMPLING, NUM_CLIENTS) as clients:
        clients.wait_for_hit(FELT_S)
        secrets = known_secrets(server, rig)
        # STEP it happens, has an effect, and lasts
        fault.begin(server)
        try:
            felt_s = clients.wait_for_recompute(FELT_S)
            if kind in (Full, ReadOnly, MayNotWrite):
                check_breaker_opens(server, clients, num_rejected)
            clients.wait_for_answers(3 * NUM_CLIENTS, 2 * FELT_S)
        finally:
            fault.end(server)
        # STEP it is over
        back_s = clients.wait_for_hit(BACK_S)
        clients.wait_for_answers(NUM_CLIENTS, 2 * FELT_S)
    wait_idle(rig)
    longest_s = max(one.ended_s - one.started_s for one in clients.answered)
    print(
        f"{kind.__name__}: {len(clients.answered)} right answers, felt after {felt_s:.2f} s, hits back after "
        f"{back_s:.2f} s, the slowest took {longest_s:.2f} s"
    )
    # STEP the logs contain the reason, and no secret
    content = logs(rig)
    assert b"redis at 127.0.0.1" in content
    assert not found_in(content, secrets), "a log contains KV bytes, the key or the password"


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
    assert found_in(b"DEBUG a page: " + written[writing] + b"\n", pieces) == pieces
    assert not found_in(b"DEBUG a page: " + source.randbytes(4096).hex().encode(), pieces)
