"""The life of a request in the prefill role.

    Prefill ─▶ queued ─accepted▶ computing ─first token, HAND_OVER▶ held for its reader ─released | lease over▶ freed
                  │                  ├─ the token really ends the choice: STOP or LENGTH ─▶ freed
                  └──────────────────┴─ call cancelled, engine error ─▶ aborted, the lease given up ─▶ freed

The engine moves the request and holds its KV; the KV transfer service speaks with its reader. This role only opens the
request with `hold_kv`, passes its first token on, and gives the lease up on every path on which nobody will come for
it. A request without `hand_over` is answered whole, here: then this instance serves like an aggregated one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from engine import failpoints
from engine.messages import LeaseCommand
from instance.choices import Choices
from instance.convert import Choice
from prefill_service.metrics import Metrics
from protos.tandem.v1 import common_pb2, prefill_pb2
from serving import tracing


class PrefillRole:
    """Runs requests up to their first token. Belongs to the front's event loop."""

    def __init__(self, choices: Choices, metrics: Metrics, instance_epoch: str) -> None:
        self._choices = choices
        self._metrics = metrics
        self._instance_epoch = instance_epoch

    async def run(self, choice: Choice) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Everything that happens to one prefill, in order. Closed before its hand-over, it gives the KV up; after it,
        the lease alone decides, however late the call's end is seen."""
        opened = handed_over = False
        span = self._begin_span(choice)
        try:
            with self._metrics.observed(choice.engine_request) as observation:
                async with self._choices.open(choice) as running:
                    opened = True
                    accepted = prefill_pb2.PrefillAccepted(instance_epoch=self._instance_epoch)
                    yield prefill_pb2.PrefillResponse(accepted=accepted)
                    await failpoints.hit_async("prefill.accepted")
                    async for chunk in running:
                        assert isinstance(chunk, common_pb2.TokenChunk), "reserved or loaded without remote_kv"
                        if observation.saw(chunk, running.first):
                            queue_ms = running.first.queue_s * 1e3 if running.first is not None else 0.0
                            num_cached_tokens = chunk.finish.usage.cached_tokens
                            tracing.end(
                                span, {"tandem.num_cached_tokens": num_cached_tokens, "tandem.queue_ms": queue_ms}
                            )
                            await failpoints.hit_async("prefill.first_token")
                        handed_over = chunk.finish.reason == common_pb2.FINISH_REASON_HAND_OVER
                        yield prefill_pb2.PrefillResponse(tokens=chunk)
        finally:
            tracing.end(span, failure="ended before its first token")
            if opened and not handed_over:  # after the abort, which comes with leaving `open`
                self._give_up_lease(choice)

    def _begin_span(self, choice: Choice) -> tracing.Span:
        """From the call to the first token; the parent of what becomes of the KV."""
        request = choice.engine_request
        attributes: tracing.Attributes = {
            "gen_ai.request.id": request.request_id,
            "tandem.num_prompt_tokens": len(request.prompt_token_ids),
            "tandem.transfer_id": request.hold_kv.transfer_id if request.hold_kv is not None else "",
        }
        span = tracing.begin("prefill.compute", attributes=attributes)
        if request.hold_kv is not None:
            tracing.keep(request.hold_kv.transfer_id, span)
        return span

    def _give_up_lease(self, choice: Choice) -> None:
        hold_kv = choice.engine_request.hold_kv
        if hold_kv is not None:
            self._metrics.num_leases_given_up += 1
            self._choices.send(LeaseCommand(transfer_id=hold_kv.transfer_id, action="release"))
