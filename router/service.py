"""The public servicer: thin. Validates, admits, relays, and tells the end."""

from __future__ import annotations

import asyncio

from protos.tandem.v1 import generation_pb2
from router.admission.door import Admission
from router.choice import Choice
from router.generate import Generator
from router.journey import Journey
from router.metrics import RouterMetrics
from router.model import ModelLimits, ServedModel
from router.pools.pool import Pools
from router.relay import Relay
from router.request import GenerationRequest
from router.running import Running
from router.sampling import from_wire, to_wire
from router.validation import validated
from serving.calls import Context, remaining_s
from serving.errors import ServiceError, Unavailable, invalid_argument
from serving.events import RequestEvent
from serving.logging import set_request_id
from serving.writer import Writer

_MAX_ABORTS = 1024


class GenerationService:
    """tandem.v1.GenerationService. Holds no state of its own."""

    def __init__(self, model: ServedModel, pools: Pools, admission: Admission, generator: Generator) -> None:
        self._model = model
        self._pools = pools
        self._admission = admission
        self._generator = generator
        self.running = Running()
        self.metrics = RouterMetrics()

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: Context,
        writer: Writer[generation_pb2.GenerateResponse],
    ) -> None:
        journey = Journey(self.metrics)
        choices: list[Choice] = []
        outcome, problem = RequestEvent.ABORTED, ""  # unless it is said otherwise below, the client has gone
        wanted: GenerationRequest | None = None
        try:
            tenant = self._admission.tenant_of(context.invocation_metadata())
            wanted = await validated(request, self._model, self._limits(), remaining_s=remaining_s(), tenant=tenant)
            set_request_id(wanted.label)
            choices = [Choice(wanted, index) for index in range(wanted.params.n)]
            await self._answer(wanted, choices, journey, writer)
            aborted = any(choice.aborted for choice in choices)
            outcome = RequestEvent.ABORTED if aborted else RequestEvent.FINISHED
        except ServiceError as error:
            outcome, problem = RequestEvent.FAILED, f"{error.code.name}: {error.message}"
            raise
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            outcome, problem = RequestEvent.FAILED, type(error).__name__
            raise
        finally:
            context.set_trailing_metadata(journey.trailers())
            journey.ended(outcome, wanted, sum(choice.num_emitted for choice in choices), problem)

    async def _answer(
        self,
        wanted: GenerationRequest,
        choices: list[Choice],
        journey: Journey,
        writer: Writer[generation_pb2.GenerateResponse],
    ) -> None:
        """Writes the whole answer; an abort ends it with one last message per choice."""
        relay = Relay(wanted, writer)
        async with relay.until_aborted():
            with self.running.entered(wanted.label, relay.abort):
                await self._admitted(wanted, choices, journey, relay)
        if relay.aborted:
            await relay.catch_up()
            for choice in choices:
                if not choice.finished:
                    await relay.emit(choice.abort())

    async def _admitted(self, wanted: GenerationRequest, choices: list[Choice], journey: Journey, relay: Relay) -> None:
        """The request's work, once there is room for it. What waits for room can be aborted like what runs."""
        async with self._admission.admit(wanted) as place:
            journey.timeline.mark(RequestEvent.ADMITTED)
            relay.on_begin(lambda: self._admission.prefilled(place))
            try:
                await self._generator.generate(choices, journey, relay.emit)
            finally:
                place.num_output_tokens = sum(choice.num_emitted for choice in choices)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        if len(request.request_ids) > _MAX_ABORTS:
            raise invalid_argument("request_ids", f"{len(request.request_ids)} labels", f"at most {_MAX_ABORTS}")
        return generation_pb2.AbortResponse(num_aborted=self.running.abort(request.request_ids))

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        limits = self._limits()
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

    def _limits(self) -> ModelLimits:
        limits = ModelLimits.of(self._pools.decode_infos())
        if limits is None:
            raise Unavailable("no decode instance is available")
        return limits
