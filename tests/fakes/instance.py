"""A fake instance: every service of a real one on a real socket, without an engine.

Its tokens are those of `tests.fakes.tokens`. What it does wrong is data (`Behaviour`, which a test may change while it
runs); what happened to it is a list of `Record`s in order. A decode instance really attaches to the prefill instance
that it is told of, and a prefill instance really keeps its transfers until somebody releases them.

    async with FakeInstance("prefill") as prefill, FakeInstance("decode") as decode: ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import grpc
import grpc.aio

from protos.tandem.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from serving.errors import InvalidArgument, NotFound, Overloaded, ServiceError, status_text, trailers
from tests.fakes.tokens import VOCAB_SIZE, text_of, token_at

_NOTHING = decode_pb2.DecodeRequest()
_ROLES = {"prefill": instance_pb2.ROLE_PREFILL, "decode": instance_pb2.ROLE_DECODE}


@dataclass
class Behaviour:
    """How a fake instance deviates from a fast and healthy one. Everything may be changed while it runs."""

    prefill_s: float = 0.0
    """Before the first token of a prompt."""
    token_s: float = 0.0
    """Before every further token."""
    load_s: float = 0.0
    """Between the transfer's completion and Loaded."""
    reserve_s: float = 0.0
    linger_s: float = 0.0
    """Between the first token of a prefill and the end of its call; cancelled meanwhile, it gives the KV up."""
    refuse: ServiceError | None = None
    """Answer to every new request."""
    die_at: int | None = None
    """Dies (every call broken, the port closed) instead of emitting the token with this index."""
    freeze_at: int | None = None
    """Freezes (no answer, no beat, no end) instead of emitting the token with this index."""
    fail_at: int | None = None
    """Answers INTERNAL instead of emitting the token with this index."""
    index_error_at: int | None = None
    """Emits the token with this index under the next one's."""
    stale_at: int | None = None
    """Emits rubbish of the stream epoch before, just before the token with this index."""
    stop_at: int | None = None
    """Ends with STOP at the token with this index."""
    beats: bool = True
    draining: bool = False
    core_silence_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0


@dataclass(frozen=True)
class Record:
    """One thing that happened."""

    what: str
    at_s: float
    request_id: str = ""
    transfer_id: str = ""
    detail: Any = None


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
        self.address = "127.0.0.1:0"
        self.epoch = ""
        self._identity = {"fingerprint": "f0", "block_size": 16, "dtype": "float32", **(identity or {})}
        self._max_model_len = max_model_len
        self._beat_s = beat_s
        self._num_starts = 0
        self._server: grpc.aio.Server | None = None
        self._transfers: dict[str, _Transfer] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._deaths: set[asyncio.Task[None]] = set()
        self.num_open_calls = 0
        """Prefill and Decode calls that run now."""

    # Life

    async def __aenter__(self) -> Self:
        await self.restart()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thawed.set()
        await self.kill()
        await asyncio.gather(*self._deaths)

    async def restart(self) -> None:
        """A new process at the same address, with none of the old one's KV."""
        self._num_starts += 1
        self.epoch = f"{self.name}-epoch-{self._num_starts}"
        self._transfers.clear()
        server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 250)]
        )
        servicer = _Servicer(self)
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(servicer, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server

    async def kill(self) -> None:
        """What the network sees of a SIGKILL: every call broken, the port closed."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=None)
        self._transfers.clear()

    def die(self) -> None:
        """`kill`, from inside a call."""
        task = asyncio.create_task(self.kill())
        self._deaths.add(task)

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

    async def until(self, what: str, count: int = 1, timeout_s: float = 5.0) -> list[Record]:
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
                    num_waiting=self.behaviour.num_waiting,
                    num_running=self.behaviour.num_running,
                    core_silence_s=self.behaviour.core_silence_s,
                    draining=self.behaviour.draining,
                )
            await asyncio.sleep(self._beat_s)

    def transfer(self, transfer_id: str) -> _Transfer:
        return self._transfers.setdefault(transfer_id, _Transfer())

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, or KV is held that nobody has released."""
        held = any(one.complete.is_set() and not one.released for one in self._transfers.values())
        return held or self.num_open_calls > 0

    # What it generates

    async def tokens(
        self, request: common_pb2.InstanceRequest, emitted: list[int], *, hand_over: bool
    ) -> AsyncIterator[common_pb2.TokenChunk]:
        """Chunks of one token each, from the position after `emitted` on."""
        emitted = list(emitted)
        behaviour, params = self.behaviour, request.sampling
        while True:
            position = len(emitted)
            await asyncio.sleep(behaviour.token_s)
            await self._misbehave(position)
            if position == behaviour.stale_at:
                yield common_pb2.TokenChunk(stream_epoch=request.stream_epoch - 1, token_index=0, token_ids=[9])
            token_id = token_at(request.prompt_token_ids, params.seed, request.choice, position)
            chunk = common_pb2.TokenChunk(
                stream_epoch=request.stream_epoch,
                choice=request.choice,
                token_index=position + (position == behaviour.index_error_at),
                token_ids=[token_id],
                text_offset=len(text_of(emitted)),
                text=text_of([token_id]),
            )
            emitted.append(token_id)
            reason = self._reason(position, params.max_tokens, hand_over)
            if reason:
                chunk.finish.reason = reason
                chunk.finish.usage.completion_tokens = len(emitted)
                chunk.finish.usage.cached_tokens = 16 if hand_over else 0
            self.record("token", request.request_id, detail=position)
            yield chunk
            if reason:
                return

    def _reason(self, position: int, max_tokens: int, hand_over: bool) -> common_pb2.FinishReason.ValueType | None:
        if position == self.behaviour.stop_at:
            return common_pb2.FINISH_REASON_STOP
        if position + 1 == max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_HAND_OVER if hand_over else None

    async def _misbehave(self, position: int) -> None:
        if position == self.behaviour.die_at:
            self.record("died")
            self.die()
            await asyncio.Event().wait()
        if position == self.behaviour.freeze_at:
            self.record("froze")
            self.freeze()
        if position == self.behaviour.fail_at:
            raise RuntimeError("a fault that the test asked for")
        await self.not_frozen()


class _Servicer(
    instance_pb2_grpc.InstanceServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    kv_transfer_pb2_grpc.KvTransferServiceServicer,
):
    """The wire's side of one process of a fake instance."""

    def __init__(self, instance: FakeInstance) -> None:
        self._instance = instance

    # InstanceService

    async def GetInstanceInfo(self, request: Any, context: Any) -> instance_pb2.GetInstanceInfoResponse:
        await self._instance.not_frozen()
        return self._instance.info()

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        async for beat in self._instance.beats():
            yield beat

    async def Drain(self, request: Any, context: Any) -> instance_pb2.DrainResponse:
        self._instance.behaviour.draining = True
        return instance_pb2.DrainResponse(num_unfinished=self._instance.num_open_calls)

    # PrefillService

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        instance, wanted = self._instance, request.request
        instance.num_open_calls += 1
        done = False
        try:
            instance.record("prefill", wanted.request_id, request.hand_over.transfer_id, request)
            await self._refuse_if_told(context)
            accepted = prefill_pb2.PrefillAccepted(instance_epoch=instance.epoch)
            yield prefill_pb2.PrefillResponse(accepted=accepted)
            await asyncio.sleep(instance.behaviour.prefill_s)
            transfer = instance.transfer(request.hand_over.transfer_id)
            async for chunk in instance.tokens(wanted, list(wanted.emitted_token_ids), hand_over=True):
                if chunk.finish.reason == common_pb2.FINISH_REASON_HAND_OVER:
                    transfer.complete.set()
                else:
                    transfer.released = True  # nothing goes on elsewhere: nothing is held
                yield prefill_pb2.PrefillResponse(tokens=chunk)
                await asyncio.sleep(instance.behaviour.linger_s)
                done = True
                return
        finally:
            instance.num_open_calls -= 1
            instance.record("prefill ended" if done else "prefill cancelled", wanted.request_id)

    # DecodeService

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        instance = self._instance
        start = (await anext(request_iterator, _NOTHING)).start
        wanted = start.request
        instance.num_open_calls += 1
        done = False
        try:
            instance.record("decode", wanted.request_id, start.transfer.transfer_id, start)
            await self._refuse_if_told(context)
            emitted = list(wanted.emitted_token_ids)
            if start.HasField("transfer"):
                await asyncio.sleep(instance.behaviour.reserve_s)
                instance.record("reserved", wanted.request_id, start.transfer.transfer_id)
                yield decode_pb2.DecodeResponse(reserved=decode_pb2.DecodeReserved(instance_epoch=instance.epoch))
                loading = asyncio.create_task(self._load(start.transfer))
                try:
                    seed = [*(await anext(request_iterator, _NOTHING)).seed.token_ids]
                    instance.record("seed", wanted.request_id, detail=seed)
                    emitted += seed
                    loaded = await loading
                finally:
                    loading.cancel()
                instance.record("loaded" if loaded else "recomputed", wanted.request_id)
                yield decode_pb2.DecodeResponse(loaded=decode_pb2.DecodeLoaded(num_recomputed_blocks=int(not loaded)))
            else:
                await asyncio.sleep(instance.behaviour.prefill_s)
            async for chunk in instance.tokens(wanted, emitted, hand_over=False):
                done = chunk.HasField("finish")
                yield decode_pb2.DecodeResponse(tokens=chunk)
        finally:
            instance.num_open_calls -= 1
            instance.record("decode ended" if done else "decode cancelled", wanted.request_id)

    async def _load(self, source: decode_pb2.TransferSource) -> bool:
        """Follows the transfer at its holder; False when the KV cannot be had and is computed here."""
        opening = kv_transfer_pb2.AttachOpen(
            transfer_id=source.transfer_id, instance_epoch=source.instance_epoch, identity=self._instance.identity
        )
        async with grpc.aio.insecure_channel(source.address) as channel:
            try:
                call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).Attach()
                await call.write(kv_transfer_pb2.AttachRequest(open=opening))
                async for answer in call:
                    if answer.WhichOneof("event") == "complete":
                        break
                await asyncio.sleep(self._instance.behaviour.load_s)
                await call.write(kv_transfer_pb2.AttachRequest(release=kv_transfer_pb2.AttachRelease(loaded=True)))
                await call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return False
            return True

    # KvTransferService

    async def Attach(
        self, request_iterator: AsyncIterator[kv_transfer_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[kv_transfer_pb2.AttachResponse]:
        opening = (await anext(request_iterator, kv_transfer_pb2.AttachRequest())).open
        if opening.instance_epoch != self._instance.epoch:
            await self._abort(context, NotFound("no such epoch here"))
        transfer = self._instance.transfer(opening.transfer_id)
        yield kv_transfer_pb2.AttachResponse(attached=kv_transfer_pb2.Attached(protocol_version=1))
        await transfer.complete.wait()
        yield kv_transfer_pb2.AttachResponse(complete=kv_transfer_pb2.TransferComplete())
        async for message in request_iterator:
            if message.WhichOneof("message") == "release":
                transfer.released = True
                self._instance.record("released by decode", transfer_id=opening.transfer_id)

    async def Release(self, request: kv_transfer_pb2.ReleaseRequest, context: Any) -> kv_transfer_pb2.ReleaseResponse:
        await self._instance.not_frozen()
        transfer = self._instance.transfer(request.transfer_id)
        was_held, transfer.released = not transfer.released, True
        self._instance.record("released by router", transfer_id=request.transfer_id)
        return kv_transfer_pb2.ReleaseResponse(was_held=was_held)

    # Errors

    async def _refuse_if_told(self, context: Any) -> None:
        await self._instance.not_frozen()
        if self._instance.behaviour.refuse is not None:
            self._instance.record("refused")
            await self._abort(context, self._instance.behaviour.refuse)

    async def _abort(self, context: Any, error: ServiceError) -> None:
        text = status_text(error, None)
        await context.abort(error.code, text, trailing_metadata=trailers(error, text))


FULL = Overloaded("no free blocks", 0.5)
WRONG = InvalidArgument("a fault that the test asked for")
