"""Two vLLM engines, of which one hands over to the other; the object plays both instance servers and the router."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

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
from kv_transfer.transfer.connector import progress_of


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
        self._transfers: dict[str, asyncio.Queue[TransferEvent]] = {}
        prefill.on_transfer_event = self._route

    def _route(self, event: TransferEvent) -> None:
        if event.transfer_id in self._transfers:
            self._transfers[event.transfer_id].put_nowait(event)

    async def answer(self, request: EngineRequest, *, reservation_s: float = 60.0, lease_s: float = 60.0) -> Answer:
        """Hand one request over: reserve, prefill, load, seed, decode."""
        transfer_id, answer = request.request_id, Answer()
        self._transfers[transfer_id] = asyncio.Queue()
        remote = RemoteKV(transfer_id=transfer_id, reservation_s=reservation_s)
        decoding = self.decode.add_request(msgspec.structs.replace(request, remote_kv=remote))
        reserved = await anext(decoding)
        if isinstance(reserved, TokensEvent):
            answer.events.append(reserved)
            return answer
        assert isinstance(reserved, ReservedEvent)
        answer.reserved = reserved
        reading = asyncio.create_task(self._read(transfer_id))
        try:
            hold = HoldKV(transfer_id=transfer_id, lease_s=lease_s)
            await self._prefill(msgspec.structs.replace(request, hold_kv=hold), answer)
            if answer.events[-1].finish_reason == "hand_over":
                self.decode.send(Seed(request.request_id, answer.token_ids))
                await self._decode(decoding, answer)
        finally:
            await decoding.aclose()
            reading.cancel()
            self.prefill.send(LeaseCommand(transfer_id, "release"))
            del self._transfers[transfer_id]
        return answer

    async def _prefill(self, request: EngineRequest, answer: Answer) -> None:
        stream = self.prefill.add_request(request)
        async for event in stream:
            assert isinstance(event, TokensEvent)
            answer.events.append(event)

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
        while True:
            event = await self._transfers[transfer_id].get()
            self.decode.send(progress_of(event, transfer_id))

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
