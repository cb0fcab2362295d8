"""Fake decode instances as a process of their own, so that what a test measures of the router is the router's.

    python -m tests.fakes.process --instances 4 --slots 8 --token-s 0.06

writes one line, `ready host:port,host:port,…`, and ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

import click

from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance


@click.command()
@click.option("--instances", default=1, help="How many.")
@click.option("--slots", default=8, help="Requests that each runs at one time.")
@click.option("--token-s", default=0.05, help="Seconds a token.")
def main(instances: int, slots: int, token_s: float) -> None:
    """Fake decode instances."""
    asyncio.run(serve(instances, slots, token_s))


async def serve(num_instances: int, slots: int, token_s: float) -> None:
    """Runs them until standard input ends."""
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(
                FakeInstance("decode", f"decode-{i}", behaviour=Behaviour(slots=slots, token_s=token_s), beat_s=0.2)
            )
            for i in range(num_instances)
        ]
        print("ready", ",".join(fake.address for fake in fakes), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    main()
