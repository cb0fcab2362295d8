"""The public servicer: thin. Validates, admits, relays, and tells the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from protos.tandem.v1 import generation_pb2
from router.admission import Admission
from router.choice import Choice
from router.generate import Generator
from router.journey import Journey
from router.model import ModelLimits, ServedModel
from router.pools import Pools
from router.relay import relayed
from router.request import GenerationRequest
from router.running import Running
from router.sampling import from_wire, to_wire
from router.validation import validated
from serving.calls import Context, remaining_s
from serving.errors import ServiceError, Unavailable, invalid_argument
from serving.events import RequestEvent
from serving.logging import set_request_id

_MAX_ABORTS = 1024


class GenerationService:
    """tandem.v1.GenerationService. Holds no state of its own."""

    def __init__(self, model: ServedModel, pools: Pools, admission: Admission, generator: Generator) -> None:
        self._model = model
        self._pools = pools
        self._admission = admission
        self._generator = generator
        self.running = Running()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        journey = Journey()
        choices: list[Choice] = []
        outcome, problem = RequestEvent.ABORTED, ""  # unless it is said otherwise below, the client has gone
        wanted: GenerationRequest | None = None
        try:
            wanted = await validated(request, self._model, self._limits(), remaining_s=remaining_s())
            set_request_id(wanted.label)
            with self._admission.admit(wanted):
                journey.timeline.mark(RequestEvent.ADMITTED)
                choices = [Choice(wanted, index) for index in range(wanted.params.n)]
                async with aclosing(self._responses(wanted, choices, journey)) as responses:
                    async for response in responses:
                        yield response
            aborted = any(choice.aborted for choice in choices)
            outcome = RequestEvent.ABORTED if aborted else RequestEvent.FINISHED
        except ServiceError as error:
            outcome, problem = RequestEvent.FAILED, f"{error.code.name}: {error.message}"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            outcome, problem = RequestEvent.FAILED, type(error).__name__
            raise
        finally:
            context.set_trailing_metadata(journey.trailers())
            journey.ended(outcome, wanted, sum(choice.num_emitted for choice in choices), problem)

    async def _responses(
        self, wanted: GenerationRequest, choices: list[Choice], journey: Journey
    ) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        """Every message of the answer; an abort ends it with one last message per choice."""
        first = generation_pb2.GenerateResponse(
            seed=wanted.seed, prompt_tokens=wanted.num_prompt_tokens, model=wanted.model
        )
        async with relayed(lambda emit: self._generator.generate(choices, journey, emit)) as relay:
            with self.running.entered(wanted.label, relay.abort):
                async for chunk in relay.chunks():  # a queue: nothing to close
                    response, first = first, generation_pb2.GenerateResponse()
                    response.request_id = wanted.label
                    response.tokens.CopyFrom(chunk)
                    yield response
            if relay.aborted:
                for choice in choices:
                    if not choice.finished:
                        response, first = first, generation_pb2.GenerateResponse()
                        response.request_id = wanted.label
                        response.tokens.CopyFrom(choice.abort())
                        yield response

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
