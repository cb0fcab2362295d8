"""The wire's side of a fake instance: the four services, as grpcio wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

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
from serving.errors import NotFound, Overloaded, ServiceError, Unavailable, status_text, trailers

if TYPE_CHECKING:
    from tests.fakes.instance import FakeInstance

_NOTHING = decode_pb2.DecodeRequest()


class Servicer(
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
        self._instance.num_watches += 1
        self._instance.max_interval_s = request.max_interval_s
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
            instance.record("call", wanted.request_id, detail=context.invocation_metadata())
            await self._refuse_if_told(context)
            assert request.HasField("hand_over"), "an instance rejects it"
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
                break
            await asyncio.sleep(instance.behaviour.linger_s)
            done = True
        except Unavailable as error:
            await self._abort(context, error)
        finally:
            instance.num_open_calls -= 1
            instance.record("prefill ended" if done else "prefill cancelled", wanted.request_id)

    # DecodeService

    # For the stubs an answer of several messages is a generator; grpc takes a coroutine function that writes, too.
    async def StreamTokens(self, request: decode_pb2.StreamTokensRequest, context: Any) -> None:  # type: ignore[override]
        instance = self._instance
        await instance.not_frozen()
        if not instance.behaviour.streams_tokens:
            instance.record("asked for a token stream")
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

        async def write(message: decode_pb2.StreamTokensResponse) -> None:
            await instance.not_frozen()
            if message.responses:
                instance.record("batch", detail=len(message.responses))
            await context.write(message)

        stream = asyncio.ensure_future(instance.token_streams.serve_stream(request.stream_id, write))
        instance.open_streams.add(stream)
        try:
            await asyncio.wait({stream})
        finally:
            instance.open_streams.discard(stream)
            stream.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "a fault that the test asked for")

    async def Decode(self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any) -> None:  # type: ignore[override]
        start = (await anext(request_iterator, _NOTHING)).start
        try:
            async with (
                self._instance.token_streams.response_writer(start, context.write) as answer,
                aclosing(self._responses(start, request_iterator, context)) as responses,
            ):
                async for response in responses:
                    await answer(response)
        except (Overloaded, Unavailable) as error:
            await self._abort(context, error)

    async def _responses(
        self, start: decode_pb2.DecodeStart, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        instance = self._instance
        wanted = start.request
        instance.num_open_calls += 1
        done = False
        try:
            instance.record("decode", wanted.request_id, start.transfer.transfer_id, start)
            instance.record("call", wanted.request_id, detail=context.invocation_metadata())
            await self._refuse_if_told(context)
            emitted = list(wanted.emitted_token_ids)
            has_transfer = start.HasField("transfer")
            await asyncio.sleep(instance.behaviour.reserve_s if has_transfer else instance.behaviour.prefill_s)
            async with instance.slot(0.0 if has_transfer else wanted.begin_s):
                if has_transfer:
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
                    reason = instance.behaviour.recomputes.format(start.transfer.transfer_id)
                    num_recomputed = int(not loaded or bool(reason))
                    yield decode_pb2.DecodeResponse(
                        loaded=decode_pb2.DecodeLoaded(num_recomputed_blocks=num_recomputed, reason=reason)
                    )
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
        loaded = asyncio.Event()

        async def said() -> AsyncIterator[kv_transfer_pb2.AttachRequest]:
            yield kv_transfer_pb2.AttachRequest(open=opening)
            await loaded.wait()
            yield kv_transfer_pb2.AttachRequest(release=kv_transfer_pb2.AttachRelease(loaded=True))

        async with grpc.aio.insecure_channel(source.address) as channel:
            try:
                async for answer in kv_transfer_pb2_grpc.KvTransferServiceStub(channel).Attach(said()):
                    if answer.WhichOneof("event") == "complete":
                        await asyncio.sleep(self._instance.behaviour.load_s)
                        loaded.set()
            except grpc.aio.AioRpcError:
                return loaded.is_set()
        return loaded.is_set()

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
