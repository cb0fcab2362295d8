"""tandem.v1.GenerationService, thin: router/dispatch/handler.py handles the requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.tandem.v1 import generation_pb2
from router.admission.controller import AdmissionController
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.handler import AbortRegistry, RequestHandler, Siblings, Sink
from router.metrics import RouterMetrics
from router.request.caller import Callers
from router.request.generation_request import from_wire, to_wire
from router.request.validation import ModelLimits, ServedModel
from serving.errors import Unavailable, invalid_argument
from serving.interceptor import Context, StreamWriter, remaining_s

_MAX_ABORTS = 1024


async def answer_call(
    handler: RequestHandler, request: generation_pb2.GenerateRequest, sink: Sink, context: Context
) -> None:
    """Handles a call of gRPC, whose trailers say where it ran."""
    try:
        await handler.handle(request, sink, metadata=context.invocation_metadata(), remaining_s=remaining_s())
    finally:
        context.set_trailing_metadata(handler.trace.trailers())


@dataclass(eq=False)
class GenerationService:
    """Also makes the request handlers of the other protocols. Belongs to one event loop."""

    model: ServedModel
    admission: AdmissionController
    dispatcher: Dispatcher
    callers: Callers
    abort_registry: AbortRegistry = field(default_factory=AbortRegistry)
    metrics: RouterMetrics = field(default_factory=RouterMetrics)

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: Context,
        writer: StreamWriter[generation_pb2.GenerateResponse],
    ) -> None:
        await answer_call(self.handler(), request, writer.write, context)

    def handler(self, siblings: Siblings | None = None) -> RequestHandler:
        """For a request that has just been received, in any protocol; `siblings`: others of the same response."""
        parts = (self.admission, self.dispatcher, self.abort_registry, self.metrics, self.callers)
        return RequestHandler(self.model, self.limits, *parts, siblings or Siblings())

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        if len(request.request_ids) > _MAX_ABORTS:
            raise invalid_argument("request_ids", f"{len(request.request_ids)} labels", f"at most {_MAX_ABORTS}")
        caller = self.callers.of(context.invocation_metadata())
        num_aborted = self.abort_registry.abort(map(caller.label, request.request_ids))
        return generation_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        limits = self.limits()
        defaults = from_wire(generation_pb2.GenerateRequest().sampling, self.model.defaults.sampling_fields())
        return generation_pb2.GetModelInfoResponse(
            model=self.model.name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=self.model.defaults.eos_token_ids,
            supports_chat=self.model.tokenizer is not None and self.model.tokenizer.chat_template is not None,
            identity=self.dispatcher.pools.decode_infos()[0].identity.to_wire(),
            sampling_defaults=to_wire(defaults),
            lora_adapters=sorted(limits.lora_adapters),
        )

    @property
    def fingerprint(self) -> str | None:
        """Identifies weights, tokenizer and KV layout of the instances; None while none is known."""
        infos = self.dispatcher.pools.decode_infos()
        return infos[0].identity.fingerprint if infos else None

    def limits(self, request: generation_pb2.GenerateRequest | None = None) -> ModelLimits:
        """What a valid request, or this one, may ask for; raises Unavailable while no decode instance is known."""
        is_resumed = request is not None and bool(request.resume.choices)
        known = [view.info for view in self.dispatcher.pools.decode.views()] if is_resumed else []
        limits = self.dispatcher.model_limits(known)
        if limits is None:
            raise Unavailable("no decode instance is available")
        return limits
