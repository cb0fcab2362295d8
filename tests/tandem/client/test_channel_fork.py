"""A client belongs to the process that created it: a fork gets errors, and never waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tandem.client.test_channel import Router

ROOT = Path(__file__).parents[3]
_HEAD = """
import asyncio, faulthandler, gc, os, sys, threading
from tandem import AsyncClient, Client, TandemError

def fork(act):
    "Runs it in a child; returns what it printed."
    readable, writable = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.dup2(writable, 1)
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            act()
            gc.collect()
            print("ended")
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writable)
    with open(readable) as text:
        printed = text.read()
    os.waitpid(child, 0)
    return printed

def attempt(act):
    try:
        print(act())
    except TandemError as error:
        print(error)

ADDRESS = sys.argv[1]
"""


@pytest.fixture
def address() -> Iterator[str]:
    with Router("router").serving() as router:
        yield router.address


def run(script: str, address: str, **environment: str) -> list[str]:
    """What `script` prints in a process of its own, line by line; without gRPC's warnings."""
    command = [sys.executable, "-c", _HEAD + script, address]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=True
    )
    assert "Timeout" not in done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("prepared", ["0", "1"])
def test_a_parents_client_raises_in_a_fork_and_goes_on_in_the_parent(address: str, prepared: str) -> None:
    script = """
client = Client(ADDRESS)
begun = client.stream("go")
next(begun)

def act():
    global begun, client
    attempt(lambda: client.generate("go"))
    attempt(lambda: next(begun))
    client.close()
    del begun, client
    gc.collect()

locked, may_end = threading.Event(), threading.Event()

def hold():
    with client._channel._lock:
        locked.set()
        may_end.wait()

threading.Thread(target=hold, daemon=True).start()
locked.wait()
printed = fork(act)
may_end.set()
print(printed + next(begun).text + client.generate("go").text)
"""
    first, second, *rest = run(script, address, GRPC_ENABLE_FORK_SUPPORT=prepared)
    assert first.startswith("FAILED_PRECONDITION: the client belongs to process ")
    assert "create a client in it" in first
    assert (second, rest) == (first, ["ended", "bab"])


def test_an_async_client_raises_in_a_fork(address: str) -> None:
    script = """
async def ask():
    client = AsyncClient(ADDRESS)
    await client.generate("go")
    return client

loop = asyncio.new_event_loop()
client = loop.run_until_complete(ask())

def act():
    async def ask_again():
        try:
            await client.generate("go")
        except TandemError as error:
            print(error)
        await client.close()
    asyncio.run(ask_again())

print(fork(act))
"""
    error, *rest = run(script, address)
    assert error.startswith("FAILED_PRECONDITION: the client belongs to process ")
    assert rest[0] == "ended"


@pytest.mark.parametrize(("prepared", "expected"), [("0", "FAILED_PRECONDITION: a client was open when"), ("1", "ab")])
def test_a_fork_has_a_client_of_its_own_where_grpc_can(address: str, prepared: str, expected: str) -> None:
    script = """
client = Client(ADDRESS)
client.generate("go")
print(fork(lambda: attempt(lambda: Client(ADDRESS).generate("go").text)))
"""
    answer, ended, *_ = run(script, address, GRPC_ENABLE_FORK_SUPPORT=prepared)
    assert answer.startswith(expected)
    assert ended == "ended"
