"""A request's path through the two pools. `Generator._attempt` is the list of docs/request_path.md, in its order.

generate ─▶ one flow per choice ─▶ attempts, until one finishes ─▶ pick, reserve, prefill, seed, decode

The first choice's first token opens the gate for the others, so that they find its prompt in the prefix caches.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from protos.tandem.v1 import common_pb2, decode_pb2
from router.choice import Choice
from router.config import RouterSettings
from router.failover.history import History, give_up, no_instance
from router.failover.safeguards import Guard, Safeguards
from router.journey import Journey
from router.legs import DecodeLeg, LegFailed, PrefillLeg
from router.picking.affinity import Affinity, RequestAffinity
from router.picking.plan import NoPlan, Plan, make_plan
from router.picking.speeds import AttemptClock
from router.pools.instances import InstanceView
from router.pools.member import Member
from router.pools.moving import can_move
from router.pools.pool import Pool, Pools
from router.relay import Emit
from router.releases import Releases
from router.stages import ChoiceStages
from serving.errors import ServiceError
from serving.events import RequestEvent

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class _Flow:
    """One choice, what became of its attempts, and where its tokens go."""

    choice: Choice
    history: History
    journey: Journey
    affinity: RequestAffinity
    guard: Guard
    stages: ChoiceStages
    emit: Emit

    async def forward(self, chunk: common_pb2.TokenChunk) -> None:
        self.guard.token()
        if chunk.token_index == 0 and self.journey.timeline.at(RequestEvent.FIRST_TOKEN) is None:
            self.journey.first_token()
        self.stages.token()
        await self.emit(chunk)


class Generator:
    """Runs validated requests on the pools. One per router, on one event loop."""

    def __init__(
        self, pools: Pools, releases: Releases, settings: RouterSettings, rng: random.Random | None = None
    ) -> None:
        self._pools = pools
        self._releases = releases
        self._settings = settings
        self._rng = rng or random.Random()
        self.safeguards = Safeguards(pools, settings)
        self.affinity = Affinity(settings.picking, decides_by_prefix=settings.disaggregation.mode == "auto")

    async def generate(self, choices: list[Choice], journey: Journey, emit: Emit) -> None:
        """Runs every choice of one request to its end. Raises ServiceError when one cannot be served."""
        affinity = self.affinity.of(choices[0].request)
        self.safeguards.check(choices[0].request)
        first, *others = [
            _Flow(
                choice,
                History(),
                journey,
                affinity,
                self.safeguards.guard(choice),
                journey.stages_of(choice.index),
                emit,
            )
            for choice in choices
        ]
        if not others:
            await self._run(first)
            return
        gate = asyncio.Event()

        async def opening(chunk: common_pb2.TokenChunk) -> None:
            gate.set()
            await emit(chunk)

        async def gated(flow: _Flow) -> None:
            await gate.wait()
            flow.choice.follow(first.choice)
            await self._run(flow)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._run(replace(first, emit=opening)))
                for flow in others:
                    group.create_task(gated(flow))
        except BaseExceptionGroup as group_of_errors:
            # One choice that fails ends the request; the others were cancelled.
            errors = group_of_errors.exceptions
            raise next((error for error in errors if isinstance(error, ServiceError)), errors[0]) from group_of_errors

    async def _run(self, flow: _Flow) -> None:
        with self.safeguards.budget.active(), flow.guard, flow.stages:
            await self._run_attempts(flow)

    async def _run_attempts(self, flow: _Flow) -> None:
        """Attempts until one finishes the choice; the client sees a pause between two, never a gap or a repeat."""
        choice, history = flow.choice, flow.history
        while True:
            try:
                await self._attempt(flow)
                return
            except LegFailed as failure:
                flow.stages.failed(failure.detail)
                if failure.kind == "moved":  # a drain is nobody's fault and counts for nothing
                    await flow.guard.failed(failure)
                    _log.info("choice %d goes on elsewhere: %s", choice.index, failure)
                    if choice.num_emitted:
                        flow.journey.timeline.mark(RequestEvent.RESUMED)
                    continue
                progressed = bool(choice.emitted_in_attempt)
                history.record(failure, progressed=progressed)
                _log.warning("attempt %d of choice %d failed: %s", choice.stream_epoch, choice.index, failure)
                error = await flow.guard.failed(failure)
                error = error or give_up(
                    failure, history, self._settings.failover, self._settings.admission.retry_after_s
                )
                if error is None and not await flow.guard.wait_turn():
                    why = "too many requests are being tried again"
                    error = no_instance(history, self._settings.admission.retry_after_s, why)
                if error is not None:
                    raise error from failure
                if choice.num_emitted:
                    flow.journey.timeline.mark(RequestEvent.RESUMED)

    async def _attempt(self, flow: _Flow) -> None:
        """One attempt at one choice, from picking on. Raises LegFailed; what was emitted until then stays emitted."""
        choice = flow.choice
        # 2. Pick a decode instance, and a prefill instance if the request is to be split.
        plan = await self._plan(flow)
        request = choice.begin_attempt()
        choice.at(plan.decode.instance, plan.prefill.instance if plan.prefill else None)
        flow.journey.picked(plan)
        flow.stages.picked(plan)
        clock = self._clock(flow, plan)
        flow.affinity.placed(plan.decode.instance, plan.prefill.instance if plan.prefill else None)
        if plan.prefill is None:
            await self._decode_alone(flow, plan, request, clock)
            return
        # 3. The decode instance reserves blocks or refuses before anything is computed.
        transfer_id = secrets.token_hex(16)
        prefill_leg = self._prefill_leg(flow, plan.prefill.instance, clock)
        async with self._decode_leg(flow, plan, clock) as decode, prefill_leg as prefill:
            decode.start(request, self._transfer(plan.prefill.instance, transfer_id))
            await decode.reserved(self._settings.disaggregation.reserve_timeout_s)
            try:
                # 4. The prefill instance computes the prompt; its first token goes to the client at once.
                await flow.guard.wait_trial(plan.prefill.instance.key)
                prefill.start(request, transfer_id, self._settings.disaggregation.lease_s)
                flow.guard.begins(plan.prefill.instance.key, "prefill")
                while not (choice.handed_over or choice.finished):
                    await flow.forward(await prefill.next_tokens())
                clock.first_token()
                if choice.finished:
                    return
                # 5, 6. The two hand the KV over between them; the seed is what decode cannot know.
                await flow.guard.wait_trial(plan.decode.instance.key)
                decode.seed(choice.emitted_in_attempt)
                flow.guard.begins(plan.decode.instance.key, "decode")
                prefill.handed_over()
                flow.affinity.cached(plan.prefill.instance)
                # 7. The decode instance streams the rest.
                await self._decode_rest(flow, plan.decode.instance, decode, clock)
            except BaseException:
                self._releases.send(prefill.channel, transfer_id)  # decode may never have heard of it
                raise

    async def _decode_alone(
        self, flow: _Flow, plan: Plan, request: common_pb2.InstanceRequest, clock: AttemptClock
    ) -> None:
        """The decode instance prefills too: steps 3 to 6 vanish."""
        async with self._decode_leg(flow, plan, clock) as decode:
            await flow.guard.wait_trial(plan.decode.instance.key)
            decode.start(request)
            clock.started()
            flow.guard.begins(plan.decode.instance.key, "decode")
            await self._decode_rest(flow, plan.decode.instance, decode, clock)

    async def _decode_rest(self, flow: _Flow, instance: InstanceView, decode: DecodeLeg, clock: AttemptClock) -> None:
        started = False
        while not flow.choice.finished:
            chunk = await decode.next_tokens()
            if not started:
                started = True
                clock.mark(RequestEvent.DECODE_STARTED)
                flow.affinity.cached(instance)
            await flow.forward(chunk)
        flow.affinity.cached(instance, flow.choice.token_ids)

    async def _plan(self, flow: _Flow) -> Plan:
        """Where to run. A stream that has begun waits a while for somebody to go on with it; a new request does not."""
        has_begun = flow.journey.timeline.at(RequestEvent.FIRST_TOKEN) is not None  # by any of the request's choices
        wait_s = self._settings.failover.resume_wait_s if has_begun else 0.0
        until_s = time.monotonic() + wait_s
        while True:
            plan = self._look(flow)
            if isinstance(plan, Plan):
                return plan
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                raise self._nobody(flow, plan)
            await self._pools.wait_for_news(min(remaining_s, _LOOK_AGAIN_S))
            flow.history.forgive()

    def _look(self, flow: _Flow) -> Plan | NoPlan:
        """Where it could run now. Instances that are ejected come last: any is better than none."""
        decode, prefill = self._pools.decode.views(), self._pools.prefill.views()
        safe_decode, safe_prefill = self.safeguards.decode.marked(decode), self.safeguards.prefill.marked(prefill)
        plan = self._plan_among(flow, safe_decode, safe_prefill)
        if isinstance(plan, NoPlan) and (safe_decode, safe_prefill) != (decode, prefill):
            plan = self._plan_among(flow, decode, prefill)
        return plan

    def _plan_among(
        self, flow: _Flow, decode: Sequence[InstanceView], prefill: Sequence[InstanceView]
    ) -> Plan | NoPlan:
        return make_plan(
            decode,
            prefill,
            flow.choice,
            flow.history.excluded,
            self._settings.disaggregation,
            self._rng,
            flow.affinity.criteria(flow.choice.num_tokens),
        )

    def _can_move(self, flow: _Flow) -> bool:
        return can_move(self._look(flow), flow.choice.num_tokens)

    def _nobody(self, flow: _Flow, plan: NoPlan) -> ServiceError:
        _log.warning("%s: %s", plan.message, plan.why)
        flow.journey.refused(plan)
        return no_instance(flow.history, self._settings.admission.retry_after_s, plan.message)

    def _clock(self, flow: _Flow, plan: Plan) -> AttemptClock:
        """Times the attempt for the speeds of its instances."""
        decode = self._member(self._pools.decode, plan.decode.instance).speeds
        if plan.prefill is None:
            return AttemptClock(plan.work, decode, None, flow.stages.mark)
        prefill = self._member(self._pools.prefill, plan.prefill.instance).speeds
        prefill.tried(time.monotonic())
        return AttemptClock(plan.work, prefill, decode, flow.stages.mark)

    def _decode_leg(self, flow: _Flow, plan: Plan, clock: AttemptClock) -> DecodeLeg:
        instance = plan.decode.instance
        member = self._member(self._pools.decode, instance)
        return DecodeLeg(member, instance.key, flow.choice, clock.mark, partial(self._can_move, flow))

    def _prefill_leg(self, flow: _Flow, instance: InstanceView, clock: AttemptClock) -> PrefillLeg:
        member = self._member(self._pools.prefill, instance)
        return PrefillLeg(member, instance.key, flow.choice, clock.mark, partial(self._can_move, flow))

    def _member(self, pool: Pool, view: InstanceView) -> Member:
        member = pool.member(view.key)
        assert member is not None, "a view is used in the same turn of the loop in which it was taken"
        return member

    def _transfer(self, prefill: InstanceView, transfer_id: str) -> decode_pb2.TransferSource:
        return decode_pb2.TransferSource(
            transfer_id=transfer_id,
            address=prefill.info.address or prefill.key.address,
            instance_epoch=prefill.info.epoch,
            reservation_s=self._settings.disaggregation.reservation_s,
        )
