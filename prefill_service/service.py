"""The prefill role: its settings, and the life of a request in it.

    Prefill ─▶ queued ─accepted▶ computing ─first token, HAND_OVER▶ held for its reader ─released | lease expired▶ freed
                  │                  ├─ the token ends the choice: STOP or LENGTH ─▶ freed
                  └──────────────────┴─ call cancelled, engine error ─▶ aborted, transfer released ─▶ freed

The engine moves the request and holds its KV; the KV transfer service serves its reader. The servicer opens the request
with `hold_kv`, forwards its first token, and releases the transfer on every path without a reader. What this instance
serves alone does not come here, but to the service that every instance has (instance/decoding.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine import failpoints
from engine.core.messages import LeaseCommand
from instance.convert import Choice, prefill_choice
from instance.server import InstanceServer, Role
from instance.settings import EngineSection, InstanceSettings
from protos.tandem.v1 import common_pb2, instance_pb2, prefill_pb2
from serving import tracing
from serving.interceptor import Context
from serving.logging import set_request_id
from serving.settings import setting

SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"]


class PrefillEngine(EngineSection):
    """How the engine core of a prefill instance computes: few requests, long chunks."""

    max_num_seqs: int = setting(16, "Maximum number of requests in one step.", flag="--max-num-seqs", ge=1)
    max_num_batched_tokens: int = setting(
        2048, "Token budget of one step: the chunk of chunked prefill.", flag="--max-num-batched-tokens", ge=1
    )


class PrefillSettings(InstanceSettings):
    engine: PrefillEngine = PrefillEngine()


class PrefillServicer:
    """Computes requests up to their first token. Belongs to the server's event loop."""

    def __init__(self, server: InstanceServer) -> None:
        self._choices = server.choices
        self._instance_epoch = server.instance_epoch
        self._metrics = server.metrics

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Closed before the hand-over, it releases the transfer; after it the lease alone decides, however late the
        call ends."""
        choice = prefill_choice(request, self._choices.limits)
        transfer_id = request.hand_over.transfer_id
        set_request_id(choice.request_id)
        opened = handed_over = False
        span = _start_span(choice, transfer_id)
        try:
            with self._metrics.observe_request(choice.engine_request) as observation:
                async with self._choices.open(choice) as stream:
                    opened = True
                    accepted = prefill_pb2.PrefillAccepted(instance_epoch=self._instance_epoch)
                    yield prefill_pb2.PrefillResponse(accepted=accepted)
                    await failpoints.hit_async("prefill.accepted")
                    async for chunk in stream:
                        assert isinstance(chunk, common_pb2.TokenChunk), "reserved or loaded without remote_kv"
                        if observation.observe_chunk(chunk, stream.first):
                            num_cached_tokens, queue_ms = chunk.finish.usage.cached_tokens, observation.queue_s * 1e3
                            attributes = {"tandem.num_cached_tokens": num_cached_tokens, "tandem.queue_ms": queue_ms}
                            tracing.end_span(span, attributes)
                            await failpoints.hit_async("prefill.first_token")
                        handed_over = chunk.finish.reason == common_pb2.FINISH_REASON_HAND_OVER
                        yield prefill_pb2.PrefillResponse(tokens=chunk)
        finally:
            tracing.end_span(span, failure="ended before its first token")
            if opened and not handed_over:  # after the abort, which leaving `open` sends
                self._metrics.num_leases_given_up += 1
                self._choices.send(LeaseCommand(transfer_id, "release"))


def _start_span(choice: Choice, transfer_id: str) -> tracing.Span:
    """From the call to the first token; the parent of the transfer's spans."""
    attributes: tracing.Attributes = {
        "gen_ai.request.id": choice.request_id,
        "tandem.num_prompt_tokens": len(choice.engine_request.prompt_token_ids),
        "tandem.transfer_id": transfer_id,
    }
    span = tracing.start_span("prefill.compute", attributes=attributes)
    tracing.remember_span(transfer_id, span)
    return span


ROLE = Role("prefill", instance_pb2.ROLE_PREFILL, SERVICE, PrefillServicer)
