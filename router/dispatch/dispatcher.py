"""A request's path through the two pools. `Dispatcher._attempt` is the list of docs/request_path.md, in its order.

generate ─▶ one flow per choice ─▶ attempts, until one finishes ─▶ pick, reserve, prefill, seed, decode

The other choices start at the first choice's first token, so that they find its prompt in the prefix caches. Whether
a failed attempt is followed by another is decided in `_after_failure`, by the rules in router/resilience.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from engine.config import GRAMMAR_S
from protos.tandem.v1 import common_pb2, decode_pb2, prefill_pb2
from router.admission.slots import Slot, TooLate
from router.dispatch.instance_call import DecodeCall, InstanceCall, PrefillCall, TransferReleases
from router.dispatch.trace import AttemptTrace, ChoiceTrace, RequestTrace
from router.picking.affinity import Affinity, RequestAffinity
from router.picking.placement import AimSource, Plan
from router.picking.plan import NoPlan, has_place, make_plan
from router.picking.scorers import Aims
from router.picking.settings import DisaggregationSettings
from router.pools.instance import UpstreamInstance
from router.pools.instance_info import InstanceInfo, InstanceView
from router.pools.pool import Pools
from router.request.choice_state import Choice, set_objectives
from router.request.validation import ModelLimits
from router.resilience.retry import AttemptHistory, CallFailed, FailoverSettings, give_up, no_instance
from router.resilience.safeguards import Guard, Safeguards
from serving.errors import DeadlineExceeded, ServiceError
from serving.logging import Repeats

_log = logging.getLogger(__name__)
_repeats = Repeats()
_PLAN_INTERVAL_S = 0.25
Emit = Callable[[common_pb2.TokenChunk], Awaitable[None]]
"""Writes a chunk to the client: returns when it is on its way."""
CallT = TypeVar("CallT", bound=InstanceCall)


@dataclass(frozen=True, slots=True)
class _Flow:
    """One choice on its way through its attempts."""

    choice: Choice
    history: AttemptHistory
    trace: ChoiceTrace
    guard: Guard
    affinity: RequestAffinity
    emit: Emit
    slot: Slot

    @property
    def has_begun(self) -> bool:
        """The client has a token of the request, from this router or another."""
        return self.trace.request.has_first_token or self.choice.request.has_begun

    @property
    def waited_s(self) -> float:
        """Since the request came."""
        return time.monotonic() - self.trace.request.received_s


async def run_together(*running: Coroutine[Any, Any, None]) -> None:
    """One that fails cancels the others; raises its error, a ServiceError before any other."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in running:
                group.create_task(one)
    except BaseExceptionGroup as failed:
        errors = failed.exceptions
        raise next((error for error in errors if isinstance(error, ServiceError)), errors[0]) from failed


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Runs validated requests on the pools. One per router, on one event loop."""

    pools: Pools
    safeguards: Safeguards
    affinity: Affinity
    releases: TransferReleases
    disaggregation: DisaggregationSettings
    failover: FailoverSettings
    retry_after_s: float  # the hint to clients when no instance is available
    aims: AimSource
    rng: random.Random = field(default_factory=random.Random)

    def model_limits(self, known: Sequence[InstanceInfo] = ()) -> ModelLimits | None:
        """What a valid request may ask for; None while no decode instance is known. `known`: as `ModelLimits.of`."""
        prefill = self.pools.prefill_infos() if self.disaggregation.mode == "always" else ()
        return ModelLimits.of(self.pools.decode_infos(), prefill, known, self.pools.lora_adapters())

    async def generate(self, choices: list[Choice], trace: RequestTrace, emit: Emit, slot: Slot) -> None:
        """Runs every choice of one request to its end, while it holds `slot`. Raises ServiceError if one cannot be
        served."""
        self.safeguards.check(choices[0].request)
        affinity = RequestAffinity(self.affinity, choices[0].request)
        flows = [self._flow(choice, trace, affinity, emit, slot) for choice in choices if not choice.finished]
        first, *others = flows
        if not others:
            await self._run_attempts(first)
            return
        has_begun = asyncio.Event()

        async def emit_first(chunk: common_pb2.TokenChunk) -> None:
            has_begun.set()
            await emit(chunk)

        async def run_after_first(flow: _Flow) -> None:
            await has_begun.wait()
            flow.choice.follow(first.choice)
            await self._run_attempts(flow)

        await run_together(self._run_attempts(replace(first, emit=emit_first)), *map(run_after_first, others))

    def _flow(self, choice: Choice, trace: RequestTrace, affinity: RequestAffinity, emit: Emit, slot: Slot) -> _Flow:
        guard = Guard(self.safeguards, choice)
        return _Flow(choice, AttemptHistory(), trace.choice(choice.index, guard), guard, affinity, emit, slot)

    async def _run_attempts(self, flow: _Flow) -> None:
        """Attempts until one finishes the choice; between two the client sees a pause, never a gap or a repeat."""
        with flow.guard, flow.trace:
            while True:
                try:
                    await self._attempt(flow)
                    return
                except CallFailed as failure:
                    await self._after_failure(flow, failure)
                if not flow.slot.is_held:
                    await self._wait_slot(flow)

    async def _after_failure(self, flow: _Flow, failure: CallFailed) -> None:
        """Returns when another attempt may follow; raises the error for the client if none may."""
        choice, history = flow.choice, flow.history
        flow.trace.failed(failure)
        history.record(failure, progressed=bool(choice.emitted_in_attempt))
        if failure.kind == "moved":  # the instance drains, or another tenant has the slot, which is no failure
            _log.info("choice %d goes on elsewhere: %s", choice.index, failure)
            return
        _log.warning("attempt %d of choice %d failed: %s", choice.stream_epoch, choice.index, failure)
        error = await flow.guard.rejection(failure) or self._too_late(flow, failure)
        error = error or give_up(failure, history, self.failover, self.retry_after_s, has_begun=flow.has_begun)
        if error is None and not await flow.guard.wait_permit(has_begun=flow.has_begun):
            error = no_instance(history, self.retry_after_s, "too many requests are being tried again")
        if error is not None:
            raise error from failure
        flow.trace.tried_again(has_begun=choice.num_emitted > 0)

    def _too_late(self, flow: _Flow, failure: CallFailed) -> TooLate | None:
        """The error where `failure` is that an instance has not begun the prompt in time: no other would have."""
        if failure.kind != "refused" or flow.has_begun or not self.aims.is_overdue(flow.waited_s):
            return None
        return TooLate("no instance has begun the prompt in time", self.retry_after_s)

    async def _wait_slot(self, flow: _Flow) -> None:
        """Returns when the request has a slot again. Raises DeadlineExceeded."""
        flow.trace.paused()
        try:
            async with asyncio.timeout(flow.choice.request.remaining_s):
                await flow.slot.wait_held()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline has passed") from None
        flow.trace.continued()

    async def _attempt(self, flow: _Flow) -> None:
        """One attempt at one choice, from picking on. Raises CallFailed; what was emitted until then stays emitted."""
        choice = flow.choice
        # 2. Pick a decode instance, and a prefill instance if the request is to be split.
        plan = await self._plan(flow)
        aims = self._aims(flow, is_first=choice.stream_epoch == 0)
        request = choice.begin_attempt(aims.objectives, plan.step_stretch)
        decode_at, prefill_at = plan.decode, plan.prefill
        choice.at(decode_at, prefill_at)
        attempt = self._attempt_trace(flow, plan)
        flow.affinity.record_placement(decode_at, prefill_at)
        if prefill_at is None:
            await self._alone(flow, plan, request, attempt)
            return
        # 3. The decode instance reserves blocks or refuses before anything is computed.
        hand_over = prefill_pb2.HandOver(transfer_id=secrets.token_hex(16), lease_s=self.disaggregation.lease_s)
        decode_call = self._call(DecodeCall, flow, decode_at, attempt)
        prefill_call = self._call(PrefillCall, flow, prefill_at, attempt, plan.work.num_to_prefill)
        decode_call.partner = prefill_call
        async with decode_call as decode, prefill_call as prefill:
            decode.start(request, self._transfer(prefill_at, hand_over.transfer_id))
            await decode.reserved(self.disaggregation.reserve_timeout_s, self._longest_reservation_s(flow))
            try:
                # 4. The prefill instance computes the prompt; its first token goes to the client at once.
                await flow.guard.wait_probation(prefill_at.key)
                self._restate_objectives(flow, request)
                prefill.start(request, hand_over)
                attempt.computing("prefill")
                while not (choice.handed_over or choice.finished):
                    chunk = await prefill.next_tokens()
                    attempt.token()
                    await flow.emit(chunk)
                if choice.finished:
                    return
                # 5, 6. The instances hand the KV over; the seed is what decode cannot know.
                await flow.guard.wait_probation(decode_at.key)
                decode.seed(choice.emitted_in_attempt)
                attempt.computing("decode")
                prefill.complete()
                flow.affinity.record_cached(prefill_at)
                # 7. The decode instance streams the rest.
                await self._decode_rest(flow, decode_at, decode, attempt)
            except BaseException:
                # Decode may never have learned of it.
                self.releases.send(prefill.instance.channel, hand_over.transfer_id)
                raise

    async def _alone(self, flow: _Flow, plan: Plan, request: common_pb2.InstanceRequest, attempt: AttemptTrace) -> None:
        """One instance serves the request, in `auto` maybe a prefill instance: steps 3 to 6 vanish."""
        view = plan.decode
        async with self._call(DecodeCall, flow, view, attempt, plan.work.num_to_prefill) as call:
            await flow.guard.wait_probation(view.key)
            self._restate_objectives(flow, request)
            call.start(request)
            attempt.computing(call.role)
            await self._decode_rest(flow, view, call, attempt)

    async def _decode_rest(
        self, flow: _Flow, instance: InstanceView, decode: DecodeCall, attempt: AttemptTrace
    ) -> None:
        started = False
        while not flow.choice.finished:
            chunk = await decode.next_tokens()
            if not started:
                started = True
                flow.affinity.record_cached(instance)
            attempt.token()
            await flow.emit(chunk)
        flow.affinity.record_cached(instance, flow.choice.token_ids)

    async def _plan(self, flow: _Flow) -> Plan:
        """Where to run, maybe after a wait for an instance."""
        since_s = time.monotonic()
        while True:
            plan = self._plan_now(flow)
            if isinstance(plan, Plan):
                return plan
            remaining_s = since_s + self._wait_s(flow) - time.monotonic()
            if remaining_s <= 0:
                if not _repeats.is_repeat(plan.why):
                    _log.warning("%s: %s", plan.message, plan.why)
                flow.trace.request.not_picked(plan)
                raise no_instance(flow.history, self.retry_after_s, plan.message)
            await self.pools.wait_for_change(min(remaining_s, _PLAN_INTERVAL_S))
            flow.history.forgive()

    def _wait_s(self, flow: _Flow) -> float:
        """How long a request waits for an instance: one whose client has read tokens, of this router or another. A new
        one only where an instance or its engine core is silent, as on a busy machine, and may go on."""
        needed = [self.pools.decode, *([self.pools.prefill] if self.disaggregation.mode == "always" else [])]
        wait_s, vanished = self.failover.resume_wait_s, flow.history.vanished
        may_come = flow.has_begun or any(
            one.may_go_on(wait_s) or (one.state == "ready" and one.key in vanished)
            for pool in needed
            for one in pool.instances
        )
        return wait_s if may_come else 0.0

    def _restate_objectives(self, flow: _Flow, request: common_pb2.InstanceRequest) -> None:
        """What is left of them after a wait since the attempt began."""
        set_objectives(request, self._aims(flow, is_first=request.stream_epoch == 1).objectives)

    def _aims(self, flow: _Flow, *, is_first: bool) -> Aims:
        """Of an attempt, which may be the first one: once the client has a token, the pace alone."""
        aims = self.aims.of(flow.choice.request, flow.waited_s, is_first=is_first)
        if not flow.has_begun:
            return aims
        return aims._replace(objectives=aims.objectives._replace(ttft_s=None, begin_s=None))

    def _plan_now(self, flow: _Flow, *, keeps_place: bool = False) -> Plan | NoPlan:
        """Where it could run now."""
        criteria = flow.affinity.criteria(flow.choice.num_tokens)
        aims = self._aims(flow, is_first=flow.choice.stream_epoch == 0)
        criteria = replace(criteria, aims=aims, keeps_place=keeps_place)
        excluded = flow.history.excluded
        for views in self.safeguards.views_to_try():
            plan = make_plan(*views, flow.choice, excluded, self.disaggregation, self.rng, criteria)
            if not isinstance(plan, NoPlan):
                break
        return plan

    def _move_target(self, flow: _Flow) -> UpstreamInstance | None:
        """Where a stream may go whose instance is about to end. Nothing is broken yet: a stream that stays runs on
        until the grace period is over. So it moves only to an instance that has a place for it now."""
        plan = self._plan_now(flow, keeps_place=True)  # a split request whose prefill instance is about to end has it
        if isinstance(plan, NoPlan):
            return None
        # What was sent there since its report counts, and with it the moves of this moment.
        num_tokens = plan.decode.num_unreported_tokens + flow.choice.num_tokens
        if plan.decode.key != flow.choice.decode_key and not has_place(plan.decode, num_tokens):
            return None
        return self._instance(plan.decode)

    def _attempt_trace(self, flow: _Flow, plan: Plan) -> AttemptTrace:
        prefilling, loading = self._instance(plan.decode).throughput, None
        if plan.prefill is not None:
            prefilling, loading = self._instance(plan.prefill).throughput, prefilling
            loading.hand_over_assigned(time.monotonic())
        prefilling.prefill_assigned(time.monotonic(), plan.work.num_to_prefill)
        return flow.trace.picked(plan, prefilling, loading)

    def _call(
        self, kind: type[CallT], flow: _Flow, view: InstanceView, attempt: AttemptTrace, num_to_prefill: int = 0
    ) -> CallT:
        target = partial(self._move_target, flow)
        return kind(self._instance(view), view.key, flow.choice, attempt, target, flow.slot, num_to_prefill)

    def _instance(self, view: InstanceView) -> UpstreamInstance:
        instance = self.pools.instance(view.key)
        assert instance is not None, "a view is used in the same turn of the event loop in which it was taken"
        return instance

    def _longest_reservation_s(self, flow: _Flow) -> float:
        """Until a decode instance has reserved. It compiles a constraint first, and then counts the wait for room."""
        grammar_s = GRAMMAR_S if flow.choice.request.params.is_constrained else 0.0
        return grammar_s + self.disaggregation.reservation_s

    def _transfer(self, prefill: InstanceView, transfer_id: str) -> decode_pb2.TransferSource:
        return decode_pb2.TransferSource(
            transfer_id=transfer_id,
            address=prefill.info.address or prefill.key.address,
            instance_epoch=prefill.info.epoch,
            reservation_s=self.disaggregation.reservation_s,
        )
