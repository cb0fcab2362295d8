"""A fake instance: every service of a real one on a real socket, without an engine.

Its tokens are those of `tests.fakes.tokens`. What it does wrong is data (`Behaviour`, which a test may change while it
runs); what happened to it is a list of `Record`s in order. A decode instance really attaches to the prefill instance
that a request names, and a prefill instance really keeps its transfers until they are released.

    async with FakeInstance("prefill") as prefill, FakeInstance("decode") as decode: ...
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import grpc
import grpc.aio

from instance.decoding import TokenStreams
from protos.tandem.v1 import (
    common_pb2,
    decode_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    kv_transfer_pb2_grpc,
    prefill_pb2_grpc,
)
from serving.errors import Crashed, Overloaded, Unavailable
from tests.fakes.behaviour import Behaviour, Record
from tests.fakes.servicer import Servicer
from tests.fakes.tokens import VOCAB_SIZE, text_of, token_at

_TELLING_S = 0.5
_LAST_BATCH_S = 0.02
"""For routers to read what was written before a death."""
_WRITE_S = 5.0
"""Before a death, for what was emitted to be written, at the most: a router may not read."""
_ROLES = {"prefill": instance_pb2.ROLE_PREFILL, "decode": instance_pb2.ROLE_DECODE}


@dataclass
class _Transfer:
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    released: bool = False


class FakeInstance:
    """One instance of one role. An async context manager; `kill` and `restart` end and begin its process."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        name: str = "",
        *,
        behaviour: Behaviour | None = None,
        identity: dict[str, Any] | None = None,
        max_model_len: int = 4096,
        beat_s: float = 0.05,
    ) -> None:
        self.role = role
        self.name = name or role
        self.behaviour = behaviour or Behaviour()
        self.records: list[Record] = []
        self.address = ""
        self.epoch = ""
        self._identity = {"fingerprint": "f0", "block_size": 16, "dtype": "float32", **(identity or {})}
        self._max_model_len = max_model_len
        self._beat_s = beat_s
        self._num_starts = 0
        self._has_crashed = False
        self._server: grpc.aio.Server | None = None
        self._transfers: dict[str, _Transfer] = {}
        self.token_streams = TokenStreams()
        """The real ones: what an instance gathers for a router."""
        self.open_streams: set[asyncio.Future[None]] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._deaths: set[asyncio.Task[None]] = set()
        self.num_open_calls = 0
        """Prefill and Decode calls that run now."""
        self.num_watches = 0
        """Times that its load was asked for."""
        self.max_interval_s = 0.0
        """Of the last watch."""
        self._slots = asyncio.Semaphore(self.behaviour.slots) if self.behaviour.slots is not None else None
        self._num_generating = 0
        self._num_without_slot = 0

    # Life

    async def __aenter__(self) -> Self:
        # Bound to the port and not listening: no other process gets it while this one is dead.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._port.getsockname()[1]}"
        await self.restart()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thawed.set()
        await self.kill()
        await asyncio.gather(*self._deaths)
        self._port.close()

    async def restart(self) -> None:
        """A new process at the same address, with none of the old one's KV."""
        self._num_starts += 1
        self.epoch = f"{self.name}-epoch-{self._num_starts}"
        self._transfers.clear()
        self._has_crashed = False
        server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 250)]
        )
        servicer = Servicer(self)
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(servicer, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
        server.add_insecure_port(self.address)
        await server.start()
        self._server = server

    async def replace(self, **identity: Any) -> None:
        """Another process with these values in its identity takes its place at the same address."""
        await self.kill()
        self._identity.update(identity)
        await self.restart()

    async def kill(self) -> None:
        """What the network sees of a SIGKILL: every call broken, the port closed."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=None)
        self._transfers.clear()

    def die(self, after_s: float = 0.0) -> None:
        """`kill`, from inside a call."""

        dying = self._server

        async def kill() -> None:
            await self._wait_written()
            await asyncio.sleep(after_s)
            if self._server is dying:
                await self.kill()

        self._deaths.add(asyncio.create_task(kill()))

    async def _wait_written(self) -> None:
        """Returns when what was emitted on token streams is written."""
        writing = asyncio.gather(*(stream._wait_written() for stream in self.token_streams._open.values()))
        awaited: set[asyncio.Future[Any]] = {writing, *self.open_streams}  # one that has ended writes no more
        await asyncio.wait(awaited, timeout=_WRITE_S, return_when=asyncio.FIRST_COMPLETED)
        writing.cancel()

    def break_token_streams(self) -> None:
        """They end, and the calls on them, while the connections live."""
        for stream in self.open_streams:
            stream.cancel()

    def freeze(self) -> None:
        """What the network sees of a SIGSTOP, but for pings: nothing is answered, nothing ends."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def not_frozen(self) -> None:
        await self._thawed.wait()

    # Records

    def record(self, what: str, request_id: str = "", transfer_id: str = "", detail: Any = None) -> None:
        self.records.append(Record(what, time.monotonic(), request_id, transfer_id, detail))

    def recorded(self, what: str) -> list[Record]:
        """Everything of one kind that happened so far."""
        return [record for record in self.records if record.what == what]

    async def until(self, what: str, count: int = 1, timeout_s: float = 30.0) -> list[Record]:
        """Waits until something has happened `count` times."""
        async with asyncio.timeout(timeout_s):
            while len(self.recorded(what)) < count:
                await asyncio.sleep(0.005)
        return self.recorded(what)

    # What it says

    @property
    def identity(self) -> common_pb2.Identity:
        return common_pb2.Identity(**self._identity)

    def info(self) -> instance_pb2.GetInstanceInfoResponse:
        return instance_pb2.GetInstanceInfoResponse(
            instance_id=self.name,
            instance_epoch=self.epoch,
            role=_ROLES[self.role],
            address=self.address,
            identity=self.identity,
            model="fake",
            max_model_len=self._max_model_len,
            vocab_size=VOCAB_SIZE,
            block_size=16,
            kv_connector="fake",
            max_num_seqs=self.behaviour.slots or 0,
            num_blocks=self.behaviour.free_blocks,
            max_num_batched_tokens=self.behaviour.num_batched_tokens,
            supports_constraints=bool(self.behaviour.constraints),
            constraints=self.behaviour.constraints,
            lora_adapters=self.behaviour.lora_adapters,
        )

    async def beats(self) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        sequence = 0
        while True:
            await self.not_frozen()
            if self.behaviour.beats:
                sequence += 1
                yield instance_pb2.WatchLoadResponse(
                    instance_epoch=self.epoch,
                    sequence=sequence,
                    num_waiting=self.behaviour.num_waiting + self._num_without_slot,
                    num_running=self.behaviour.num_running + (self._num_generating if self._slots else 0),
                    num_waiting_tokens=self.behaviour.num_waiting_tokens,
                    num_without_room=self.behaviour.num_without_room + self._num_without_slot,
                    num_prefilled_tokens=self.behaviour.num_prefilled_tokens,
                    num_generated_tokens=self.behaviour.num_generated_tokens,
                    step_cost=self.behaviour.step_cost,
                    blocks=instance_pb2.BlockUsage(free=self.behaviour.free_blocks),
                    core_silence_s=self.behaviour.core_silence_s,
                    load_age_s=self.behaviour.load_age_s,
                    step_s=self.behaviour.step_s,
                    draining=self.behaviour.draining,
                    moving_out=self.behaviour.moving_out,
                )
            await asyncio.sleep(self._beat_s)

    def transfer(self, transfer_id: str) -> _Transfer:
        return self._transfers.setdefault(transfer_id, _Transfer())

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, or KV is held that is not released yet."""
        held = any(one.complete.is_set() and not one.released for one in self._transfers.values())
        return held or self.num_open_calls > 0

    # What it generates

    @asynccontextmanager
    async def slot(self, begin_s: float = 0.0) -> AsyncIterator[None]:
        """One of the places in its batch, if those are counted; waits for it in the order of arrival, at most
        `begin_s` if that is not 0."""
        if self._slots is None:
            yield
            return
        self._num_without_slot += 1
        try:
            async with asyncio.timeout(begin_s or None):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded("no step began the prompt", 1.0) from None
        finally:
            self._num_without_slot -= 1
        self._num_generating += 1
        try:
            yield
        finally:
            self._num_generating -= 1
            self._slots.release()

    async def tokens(
        self, request: common_pb2.InstanceRequest, emitted: list[int], *, hand_over: bool
    ) -> AsyncIterator[common_pb2.TokenChunk]:
        """Chunks of one token each, from the position after `emitted` on."""
        emitted = list(emitted)
        first = len(emitted)
        num_chars = sum(len(self._text_of(position, token_id)) for position, token_id in enumerate(emitted))
        behaviour, params, prompt = self.behaviour, request.sampling, tuple(request.prompt_token_ids)
        if self._has_crashed:
            raise Unavailable("the engine of this instance has ended")
        while True:
            position = len(emitted)
            await asyncio.sleep(behaviour.token_s)
            if behaviour.permits is not None:
                await behaviour.permits.acquire()
            await self._misbehave(request, position)
            if position == behaviour.stale_at:
                yield common_pb2.TokenChunk(stream_epoch=request.stream_epoch - 1, token_index=0, token_ids=[9])
            seed = params.seed + behaviour.weights
            token_id = token_at(prompt, seed, request.choice, position)
            chunk = common_pb2.TokenChunk(
                stream_epoch=request.stream_epoch,
                choice=request.choice,
                token_index=position + (position == behaviour.index_error_at),
                token_ids=[token_id],
                text_offset=num_chars,
                text=self._text_of(position, token_id),
            )
            num_chars += len(chunk.text)
            if params.HasField("logprobs") and position != behaviour.mute_logprobs_at:
                chunk.logprobs.add().candidates.add(token_id=token_id, logprob=-0.5 * position, rank=1)
            if params.HasField("prompt_logprobs") and position == request.choice == 0:
                chunk.prompt_logprobs.add()
                for prompt_id in request.prompt_token_ids[1:]:
                    chunk.prompt_logprobs.add().candidates.add(token_id=prompt_id, logprob=-1.0, rank=1)
            emitted.append(token_id)
            reason = self._reason(position, params.max_tokens, hand_over)
            if reason:
                chunk.finish.CopyFrom(self._finish(position, params, reason))
                chunk.finish.usage.completion_tokens = len(emitted)
                chunk.finish.usage.cached_tokens = 16 if hand_over else behaviour.cached_tokens
            elif position == first:
                chunk.usage.cached_tokens = behaviour.cached_tokens
            self.record("token", request.request_id, detail=position)
            yield chunk
            if reason:
                return

    def _text_of(self, position: int, token_id: int) -> str:
        written = self.behaviour.writes
        return written[3 * position : 3 * position + 3] if written else text_of([token_id])

    def _finish(
        self, position: int, params: common_pb2.SamplingParams, reason: common_pb2.FinishReason.ValueType
    ) -> common_pb2.Finish:
        finish = common_pb2.Finish(reason=reason)
        if position == self.behaviour.stop_at and params.stop:
            finish.stop_string = params.stop[0]
        elif position == self.behaviour.stop_at and params.stop_token_ids:
            finish.stop_token_id = params.stop_token_ids[0]
        return finish

    def _reason(self, position: int, max_tokens: int, hand_over: bool) -> common_pb2.FinishReason.ValueType | None:
        num_written = (len(self.behaviour.writes) + 2) // 3
        if position == self.behaviour.stop_at or position + 1 == num_written:
            return common_pb2.FINISH_REASON_STOP
        if position + 1 == max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_HAND_OVER if hand_over else None

    async def _misbehave(self, request: common_pb2.InstanceRequest, position: int) -> None:
        poisoned = request.prompt_token_ids[0] == self.behaviour.poison and position >= self.behaviour.poison_at
        if (position == self.behaviour.die_at or poisoned) and not self._has_crashed:
            self.record("died")
            self._has_crashed = self.behaviour.tells
            self.die(after_s=_TELLING_S if self.behaviour.tells else _LAST_BATCH_S)
            if not self.behaviour.tells:
                await asyncio.Event().wait()
        if self._has_crashed:
            raise Crashed("the engine of this instance has ended")
        if position == self.behaviour.freeze_at:
            self.record("froze")
            self.freeze()
        if position == self.behaviour.fail_at:
            raise RuntimeError("a fault that the test asked for")
        await self.not_frozen()
