"""The life of a request in the decode role.

    Decode(start) ─▶ waiting ─reserved▶ loading ─loaded and seeded▶ running ─tokens …▶ finished
                        │                  └─ what is missing, bad or late is computed here
                        ├─ without a transfer: prefilled here, running at once, no seed
                        └─ no room, no seed in time, cancelled, engine dead ─▶ aborted, transfer released ─▶ freed

The engine moves the request. This role reads the seed while it waits, lets a `Follower` follow the transfer at
the prefill instance from the reservation on, and gives the lease back once the KV is here, or will never be wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager

from decode_service.metrics import Metrics
from engine import failpoints
from engine.messages import LoadedEvent, ReservedEvent
from instance.choices import ChoiceEvent, Choices, RunningChoice
from instance.convert import Choice, TransferSource, seed_ids
from instance.followers import Follower, Followers
from instance.metrics import Observation
from protos.tandem.v1 import decode_pb2
from serving import tracing
from serving.errors import invalid_argument
from serving.events import RequestEvent

Requests = AsyncIterator[decode_pb2.DecodeRequest]

_MARKS = {ReservedEvent: RequestEvent.KV_RESERVED, LoadedEvent: RequestEvent.KV_LOADED}


class DecodeRole:
    """Generates, from KV that a prefill instance computed or from its own. Belongs to the front's event loop."""

    def __init__(self, choices: Choices, metrics: Metrics, instance_epoch: str, followers: Followers) -> None:
        self._choices = choices
        self._metrics = metrics
        self._instance_epoch = instance_epoch
        self._followers = followers

    async def run(
        self, choice: Choice, source: TransferSource | None, requests: Requests
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """Everything that happens to one decode, in order. Closing it early frees everything, at the holder as well."""
        observed = self._metrics.observed(choice.engine_request)
        with observed as observation, _stages(choice, source, observation) as stages:
            async with self._choices.open(choice) as running:
                events = _plain(running) if source is None else self._transferred(running, source, requests)
                async with aclosing(events):
                    async for event in events:
                        if isinstance(event, ReservedEvent | LoadedEvent):
                            observation.timeline.mark(_MARKS[type(event)])
                            yield self._progress(event)
                            continue
                        if observation.saw(event, running.first):
                            queue_ms = running.first.queue_s * 1e3 if running.first is not None else 0.0
                            stages.note({"tandem.queue_ms": queue_ms})
                            stages.next("decode.generate")
                        yield decode_pb2.DecodeResponse(tokens=event)
                        await failpoints.hit_async("decode.after_token")

    async def _transferred(
        self, running: RunningChoice, source: TransferSource, requests: Requests
    ) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of a choice whose KV comes from elsewhere; keeps its transfer and its seed moving."""
        with self._followers.following(source, running.choice.request_id) as follower:
            seeded = asyncio.create_task(self._read_seed(running, requests))
            try:
                while (event := await _next_unless_failed(running, seeded)) is not None:
                    await _tell(event, follower)
                    yield event
            finally:
                seeded.cancel()
                await asyncio.gather(seeded, return_exceptions=True)

    async def _read_seed(self, running: RunningChoice, requests: Requests) -> None:
        """The client's second message. It may come before the reservation; if it never does, the engine gives up."""
        message = await anext(requests, None)
        if message is None or message.WhichOneof("message") != "seed":
            raise invalid_argument("seed", "is missing", "start with a transfer, then seed, then the end of the stream")
        running.seed(seed_ids(message.seed, running.choice, self._choices.limits))
        self._metrics.num_seeded += 1

    def _progress(self, event: ReservedEvent | LoadedEvent) -> decode_pb2.DecodeResponse:
        """The message for what happened before the first token, counted."""
        if isinstance(event, ReservedEvent):
            reserved = decode_pb2.DecodeReserved(
                num_cached_tokens=event.num_cached_tokens, instance_epoch=self._instance_epoch
            )
            return decode_pb2.DecodeResponse(reserved=reserved)
        self._metrics.num_loaded += 1
        self._metrics.num_external_tokens += event.num_external_tokens
        self._metrics.num_recomputed_blocks += event.num_recomputed_blocks
        loaded = decode_pb2.DecodeLoaded(
            num_external_tokens=event.num_external_tokens,
            num_recomputed_blocks=event.num_recomputed_blocks,
            reason=event.reason or "",
        )
        return decode_pb2.DecodeResponse(loaded=loaded)


@contextmanager
def _stages(choice: Choice, source: TransferSource | None, observation: Observation) -> Iterator[tracing.Stages]:
    """Spans until the first token from here, and then until the last."""
    first = "decode.prefill" if source is None else "decode.wait"
    stages = tracing.Stages(first, attributes={"gen_ai.request.id": choice.request_id})
    try:
        yield stages
    finally:
        stages.end(failure="ended before its last token" if observation.finish_reason is None else None)


async def _plain(running: RunningChoice) -> AsyncGenerator[ChoiceEvent, None]:
    async for event in running:
        yield event


async def _tell(event: ChoiceEvent, follower: Follower) -> None:
    """Passes on to the follower what the engine said."""
    if isinstance(event, ReservedEvent):
        follower.follow(event.num_local_blocks)
        await failpoints.hit_async("decode.reserved")
    elif isinstance(event, LoadedEvent):
        follower.arrived(event)
        await failpoints.hit_async("decode.loaded")


async def _next_unless_failed(running: RunningChoice, task: asyncio.Task[None]) -> ChoiceEvent | None:
    """The next event, None after the last; raises what `task` raised as soon as it has."""
    if task.done():
        task.result()
        return await anext(running, None)
    upcoming = asyncio.ensure_future(anext(running, None))
    try:
        await asyncio.wait({upcoming, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return await upcoming
    finally:
        upcoming.cancel()
