"""The public servicer: thin. What a call does is in call.py."""

from __future__ import annotations

from protos.tandem.v1 import generation_pb2
from router.admission.door import Admission
from router.call import GenerateCall
from router.callers import Callers
from router.generate import Generator
from router.metrics import RouterMetrics
from router.model import ModelLimits, ServedModel
from router.pools.pool import Pools
from router.running import Running
from router.sampling import from_wire, to_wire
from serving.calls import Context, remaining_s
from serving.errors import Unavailable, invalid_argument
from serving.writer import Writer

_MAX_ABORTS = 1024


class GenerationService:
    """tandem.v1.GenerationService. Holds no state of its own."""

    def __init__(
        self, model: ServedModel, pools: Pools, admission: Admission, generator: Generator, callers: Callers
    ) -> None:
        self._model = model
        self._pools = pools
        self._admission = admission
        self._generator = generator
        self._callers = callers
        self.running = Running()
        self.metrics = RouterMetrics()

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: Context,
        writer: Writer[generation_pb2.GenerateResponse],
    ) -> None:
        call = self.call()
        try:
            await call.run(request, writer, metadata=context.invocation_metadata(), remaining_s=remaining_s())
        finally:
            context.set_trailing_metadata(call.journey.trailers())

    def call(self) -> GenerateCall:
        """A new call, received now, whatever protocol brought it."""
        return GenerateCall(
            self._model, self.limits, self._admission, self._generator, self.running, self.metrics, self._callers
        )

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        if len(request.request_ids) > _MAX_ABORTS:
            raise invalid_argument("request_ids", f"{len(request.request_ids)} labels", f"at most {_MAX_ABORTS}")
        caller = self._callers.of(context.invocation_metadata())
        num_aborted = self.running.abort(map(caller.label, request.request_ids))
        return generation_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        limits = self.limits()
        defaults = from_wire(generation_pb2.GenerateRequest().sampling, self._model.defaults.sampling_fields())
        return generation_pb2.GetModelInfoResponse(
            model=self._model.name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=self._model.defaults.eos_token_ids,
            supports_chat=self._model.tokenizer is not None and self._model.tokenizer.has_chat_template,
            identity=self._pools.decode_infos()[0].identity.to_wire(),
            sampling_defaults=to_wire(defaults, None),
        )

    @property
    def fingerprint(self) -> str | None:
        """What identifies weights, tokenizer and KV layout of the instances; None while none is known."""
        infos = self._pools.decode_infos()
        return infos[0].identity.fingerprint if infos else None

    def limits(self) -> ModelLimits:
        """What a valid request may ask for; raises Unavailable while no decode instance is known."""
        limits = ModelLimits.of(self._pools.decode_infos())
        if limits is None:
            raise Unavailable("no decode instance is available")
        return limits
