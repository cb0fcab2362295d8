"""A scripted core: a CoreLink of `AsyncEngine`, so that the server under test is the real one.

It keeps every command in order and emits the events that the test gives it. It computes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from engine.core.async_engine import AsyncEngine
from engine.core.messages import AddRequest, Command, CoreMessage, EngineInfo, EngineLoad, EngineRequest, Event, Outputs
from engine.identity import ModelIdentity

_Kind = TypeVar("_Kind", bound=Command)
INFO = EngineInfo(
    model_identity=ModelIdentity(
        block_size=4,
        dtype="float32",
        layout_version=1,
        layout_digest="a1",
        weights_digest="b2",
        config_digest="c3",
        tokenizer_digest="d4",
        fingerprint="e5",
    ),
    vocab_size=480,
    max_model_len=256,
    num_blocks=64,
    bytes_per_block=1024,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_connector="scripted",
    attention_backend="none",
    pid=1,
)


class ScriptedCore:
    """A CoreLink. `on_command` may answer each command at once."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.on_command: Callable[[Command], None] | None = None
        self._messages: asyncio.Queue[CoreMessage] = asyncio.Queue()
        self._arrived = asyncio.Event()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.load = EngineLoad(free_blocks=64)
        self.closed = self.killed = False

    def engine(self) -> AsyncEngine:
        return AsyncEngine(self, INFO)

    # What the test says

    def emit(self, *events: Event, **load: Any) -> None:
        """One batch of events, with the load as it was but for `load`."""
        self.load = EngineLoad(**{name: getattr(self.load, name) for name in EngineLoad.__struct_fields__} | load)
        self._messages.put_nowait(Outputs(list(events), self.load, num_added=len(self.of(AddRequest))))

    def die(self, reason: str = "killed by the test") -> None:
        if not self._dead.done():
            self._dead.set_result(reason)

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """The commands of one kind that have come."""
        return [command for command in self.commands if isinstance(command, kind)]

    async def wait_for(self, kind: type[_Kind], count: int = 1) -> _Kind:
        """The `count`-th command of a kind, when it has come."""
        async with asyncio.timeout(20):  # a guard against a hang, no promise
            while len(self.of(kind)) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.of(kind)[count - 1]

    async def request(self, count: int = 1) -> EngineRequest:
        """The `count`-th request."""
        command = await self.wait_for(AddRequest, count)
        assert isinstance(command, AddRequest)
        return command.request

    # CoreLink

    def send(self, command: Command) -> None:
        self.commands.append(command)
        self._arrived.set()
        if self.on_command is not None:
            self.on_command(command)

    async def receive(self) -> CoreMessage:
        return await self._messages.get()

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._dead)

    def kill(self) -> None:
        self.killed = True
        self.die("killed")

    async def close(self) -> None:
        self.closed = True
        self.die("closed")
