"""Two vLLM engines, of which one hands over to the other; the object plays both instance servers and the router."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.config import EngineConfig, KVConnectorConfig
from engine.core.async_engine import AsyncEngine, RequestStream
from engine.core.messages import (
    EngineRequest,
    HoldKV,
    LeaseCommand,
    LoadedEvent,
    RemoteKV,
    ReservedEvent,
    Seed,
    TokensEvent,
    TransferEvent,
)
from engine.sampling.params import SamplingParams
from instance.settings import CONNECTORS
from kv_transfer.secret import ensure_secret
from kv_transfer.transfer.connector import progress_of
from tests.waiting import until

BLOCK_SIZE = 32
_NOTHING_OF = ("num_running", "num_waiting", "num_loading", "num_transfers", "held_blocks", "quarantined_blocks")
_ids = iter(range(10**6))


def with_connector(config: EngineConfig, name: str, folder: Path, **options: Any) -> EngineConfig:
    """Prompts take several steps. On a busy machine a page may take long."""
    assert (config.block_size, config.max_num_batched_tokens) == (BLOCK_SIZE, 64)
    ensure_secret(folder / "secret")
    if name == "shared_storage":
        options["path"] = str(folder / "store")
    options = {"kv_secret_file": str(folder / "secret"), "load_timeout_s": 60.0, **options}
    return msgspec.structs.replace(config, kv_connector=KVConnectorConfig(class_path=CONNECTORS[name], options=options))


def request(prompt: list[int], emitted: list[int] | None = None, **fields: Any) -> EngineRequest:
    params = {"max_tokens": 24, "ignore_eos": True, **fields.pop("params", {})}
    return EngineRequest(
        request_id=f"r{next(_ids)}",
        prompt_token_ids=prompt,
        output_token_ids=emitted or [],
        params=SamplingParams(**params),
        eos_token_ids=(2,),
        **{"seed": 77, **fields},
    )


def prompt_of(num_tokens: int) -> list[int]:
    """Another one at each call, so that no block of it is cached."""
    draw = random.Random(next(_ids))
    return [draw.randrange(3, 2000) for _ in range(num_tokens)]


@dataclass
class Answer:
    """One request's way through both engines."""

    reserved: ReservedEvent | None = None
    loaded: LoadedEvent | None = None
    events: list[TokensEvent] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        assert self.events[-1].error is None, self.events[-1]
        return [token_id for event in self.events for token_id in event.token_ids]


class EnginePair:
    def __init__(self, prefill: AsyncEngine, decode: AsyncEngine) -> None:
        self.prefill, self.decode = prefill, decode
        self.before_loading: Callable[[], Awaitable[None]] | None = None
        """Called once, when all KV of a transfer is ready and before the reader is notified."""
        self._ready: set[str] = set()
        self._transfers: dict[str, asyncio.Queue[TransferEvent]] = {}
        prefill.on_transfer_event = self._route

    async def __aenter__(self) -> Self:
        await until(lambda: bool(self.prefill.load.kv_totals and self.decode.load.kv_totals), 60)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(self.prefill.shutdown(), self.decode.shutdown())

    async def plain(self, asked: EngineRequest) -> list[TokensEvent]:
        """The answer without a hand-over, and without the prefix cache."""
        salted = msgspec.structs.replace(asked, request_id=f"{asked.request_id}-plain", cache_salt="plain")
        return [event async for event in self.prefill.add_request(salted) if isinstance(event, TokensEvent)]

    async def assert_nothing_is_left(self) -> None:
        """Soon: reports of aborted requests come one after the other."""

        def left(engine: AsyncEngine) -> dict[str, int]:
            load = engine.load
            amounts = {name: getattr(load, name) for name in _NOTHING_OF}
            amounts["blocks in use"] = engine.info.num_blocks - load.free_blocks
            return {name: amount for name, amount in amounts.items() if amount}

        for engine in (self.prefill, self.decode):
            try:
                await until(lambda engine=engine: not left(engine), 60)  # type: ignore[misc]
            except TimeoutError:
                raise AssertionError(f"left: {left(engine)}") from None

    def _route(self, event: TransferEvent) -> None:
        if event.num_ready_blocks:
            self._ready.add(event.transfer_id)
        if event.transfer_id in self._transfers:
            self._transfers[event.transfer_id].put_nowait(event)

    async def answer(self, request: EngineRequest, *, abort_prefill_with: list[int] | None = None) -> Answer:
        """Hand one request over: reserve, prefill, load, seed, decode. `abort_prefill_with`: abort the prefill once a
        block is ready, and continue after this seed."""
        transfer_id, answer = request.request_id, Answer()
        self._transfers[transfer_id] = asyncio.Queue()
        remote = RemoteKV(transfer_id=transfer_id, reservation_s=60.0)
        decoding = self.decode.add_request(msgspec.structs.replace(request, remote_kv=remote))
        async with contextlib.AsyncExitStack() as ends:
            ends.callback(self._transfers.pop, transfer_id)
            ends.callback(self.prefill.send, LeaseCommand(transfer_id, "release"))
            ends.push_async_callback(decoding.aclose)
            reserved = await anext(decoding)
            assert isinstance(reserved, ReservedEvent), reserved
            answer.reserved = reserved
            reading = asyncio.create_task(self._read(transfer_id))
            ends.callback(reading.cancel)
            hold = HoldKV(transfer_id=transfer_id, lease_s=60.0)
            prefilling = self.prefill.add_request(msgspec.structs.replace(request, hold_kv=hold))
            ends.push_async_callback(prefilling.aclose)
            seed = abort_prefill_with or await self._prefill(prefilling, answer)
            if abort_prefill_with is not None:
                await until(lambda: transfer_id in self._ready, 60)
                await prefilling.aclose()
            if seed:
                self.decode.send(Seed(request.request_id, seed))
                await self._decode(decoding, answer)
        return answer

    async def _prefill(self, stream: RequestStream, answer: Answer) -> list[int]:
        """Returns the seed; nothing if the request has ended."""
        async for event in stream:
            assert isinstance(event, TokensEvent)
            answer.events.append(event)
        return answer.token_ids if answer.events[-1].finish_reason == "hand_over" else []

    async def _decode(self, stream: RequestStream, answer: Answer) -> None:
        async for event in stream:
            if isinstance(event, TokensEvent):
                answer.events.append(event)
            elif isinstance(event, LoadedEvent):
                answer.loaded = event
                self.prefill.send(LeaseCommand(stream.request_id, "release"))

    async def _read(self, transfer_id: str) -> None:
        """The attach stream."""
        self.prefill.send(LeaseCommand(transfer_id, "attach", 60.0))
        held_back: list[TransferEvent] = []
        while True:
            event = await self._transfers[transfer_id].get()
            if self.before_loading is not None:
                held_back.append(event)
                if event.num_tokens is None:
                    continue
                before_loading, self.before_loading = self.before_loading, None
                await before_loading()
            for one in held_back or [event]:
                self.decode.send(progress_of(one, transfer_id))
            held_back = []

    def totals(self) -> dict[str, Any]:
        """Counters that show what moved and what was computed."""
        [saved], [loaded] = self.prefill.load.kv_totals, self.decode.load.kv_totals
        return {
            "saved": saved.saved.num_blocks + saved.num_shared_blocks,
            "loaded": loaded.loaded.num_blocks,
            "external": self.decode.load.num_external_tokens,
            "recomputed": self.decode.load.num_recomputed_blocks,
            "prefilled": self.decode.load.num_prefilled_tokens,
        }
