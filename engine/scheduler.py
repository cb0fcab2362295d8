"""Which request computes how many tokens in the next step.

    add ─▶ waiting ──room──▶ running ──stop──▶ finished ──no I/O left──▶ freed
             ▲  │              │
             │  └─remote KV─▶ loading ──KV (and seed) there, or not to be had──▶ running
             ├───preempted◀────┘ (no room; computes again from what the prefix cache still has)
             └───preempted◀── loading, where the connector keeps blocks that a given-up read may still write to

`schedule()` decides and returns a value, the model runner executes it, `update_from_output()` applies the result.
Every step closes the gap between a request's computed and known tokens, within one token budget; there is no prefill
or decode phase.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from engine.block_pool import KVBlock
from engine.config import EngineConfig
from engine.kv_cache_manager import KVCacheManager
from engine.kv_connector import KVConnector, KVLoadResult
from engine.messages import ErrorKind, Event, FinishReason, LoadedEvent, ReservedEvent, TokensEvent
from engine.request import Request, RequestStatus
from engine.scheduler_output import Sampled, ScheduledRequest, SchedulerCounters, SchedulerOutput, owes_prompt_logprobs
from engine.stop import check_token_stop


@dataclass(slots=True)
class Scheduler:
    """Owns the requests and, through the KV cache manager, the blocks. Used in the step loop alone."""

    config: EngineConfig
    kv: KVCacheManager
    connector: KVConnector
    max_model_len: int
    requests: dict[str, Request] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    loading: dict[str, Request] = field(default_factory=dict)
    held: dict[str, list[KVBlock]] = field(default_factory=dict)
    """Blocks of finished requests, and of given-up loads, that the connector still needs."""
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    _events: list[Event] = field(default_factory=list)

    # Commands

    def add_request(self, request: Request, now: float) -> None:
        """Queue a request. One that can never fit ends at once with an error."""
        needed = self.kv.num_blocks_for(request.num_initial_tokens + 1)
        self.requests[request.request_id] = request
        if request.spec.remote_kv is not None:
            request.deadline = now + request.spec.remote_kv.reservation_s
        if needed > self.kv.num_blocks:
            problem = f"the prompt needs {needed} KV blocks, this instance has {self.kv.num_blocks} in all"
            self._fail(request, problem, "too_large")
        else:
            insort(self.waiting, request, key=lambda other: other.order)

    def abort(self, request_id: str) -> None:
        """End a request without an event. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    def seed(self, request_id: str, token_ids: list[int]) -> None:
        """Output that a loading request continues after. The first seed counts; unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is None or request.seeded or request.spec.remote_kv is None:
            return
        request.seeded = True
        request.token_ids.extend(token_ids)
        self._start_if_ready(request)

    def load_finished(self, result: KVLoadResult) -> None:
        """A loading request's KV is as complete as it will be; what is missing is computed here."""
        request = self.loading.get(result.request_id)
        if request is None or request.loaded:
            return
        request.loaded = True
        request.num_computed_tokens = result.num_verified_tokens
        request.num_external_tokens = result.num_external_tokens
        self.counters.num_external_tokens += result.num_external_tokens
        self.counters.num_recomputed_blocks += result.num_recomputed_blocks
        self.kv.publish(request)
        if result.retained_id is not None:
            self._retain(request, result.retained_id)
        if request.spec.remote_kv is not None:
            request.num_recomputed_tokens = request.num_initial_tokens - result.num_verified_tokens
            self._events.append(
                LoadedEvent(request.request_id, result.num_external_tokens, result.num_recomputed_blocks, result.reason)
            )
        self._start_if_ready(request)

    def free_held(self, request_id: str) -> None:
        """The connector no longer needs the blocks of this finished request."""
        self.kv.pool.release(self.held.pop(request_id, []))

    def expire(self, now: float) -> None:
        """Give up requests that have waited too long for room, KV or seed."""
        for request in [*self.loading.values(), *self.waiting]:
            if request.deadline is not None and now >= request.deadline:
                missing = "room" if request.status is RequestStatus.WAITING else "KV" if request.seeded else "the seed"
                kind: ErrorKind = "no_room" if missing == "room" else "timeout"
                self._fail(request, f"no {missing} within the reservation time", kind)

    # The step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: running requests first, then waiting ones, first come, first served."""
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted = False
        for request in list(self.running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                preempted = True
                continue
            num_tokens = min(request.num_uncomputed_tokens, budget)
            if not self._make_room(request, request.num_computed_tokens + num_tokens):
                preempted = True
                continue
            scheduled.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
            budget -= num_tokens
        scheduled = [share for share in scheduled if share.request.status is RequestStatus.RUNNING]
        if not preempted:
            self._admit(budget, scheduled)
        return SchedulerOutput(scheduled)

    def update_from_output(self, output: SchedulerOutput, sampled: Sampled) -> None:
        """Apply a step's result: progress, new tokens, ends. `sampled` has a token for each share that samples, unless
        its logits were not finite."""
        self.counters.step_computed(output.num_tokens)
        for share in output.scheduled:
            request = share.request
            request.num_computed_tokens += share.num_tokens
            is_decode = share.start >= request.num_initial_tokens
            self.counters.num_prefilled_tokens += 0 if is_decode else share.num_tokens
            self.kv.publish(request)
            self._offer(request)
            if share.samples:
                self._append_token(request, sampled)

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    # Sizes, for the load report

    @property
    def num_held_blocks(self) -> int:
        """Distinct blocks that finished requests still hold."""
        return len({block.block_id for blocks in self.held.values() for block in blocks})

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting requests have yet to compute, prefix hits not deducted."""
        return sum(request.num_uncomputed_tokens for request in self.waiting)

    # Inside

    def _admit(self, budget: int, scheduled: list[ScheduledRequest]) -> None:
        while self.waiting and len(self.running) + len(self.loading) < self.config.max_num_seqs:
            request = self.waiting[0]
            if budget == 0 and not request.awaits_kv and not self._num_external_tokens(request, 0):
                return
            if not self._allocate_first(request, budget):
                return
            self.waiting.pop(0)
            num_external = self._num_external_tokens(request, request.num_computed_tokens)
            if request.awaits_kv or num_external:
                self._load(request, num_external)
                continue
            self._run(request)
            num_tokens = min(request.num_uncomputed_tokens, budget)
            if num_tokens:
                scheduled.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
                budget -= num_tokens

    def _num_external_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """What the connector is to be asked for, past the first tokens."""
        if request.loaded or owes_prompt_logprobs(request):
            return 0
        return self.connector.get_num_new_matched_tokens(request, num_computed_tokens)

    def _allocate_first(self, request: Request, budget: int) -> bool:
        """Give a waiting request its first blocks, prefix hits included. False: no room, nothing done."""
        max_hit = request.num_initial_tokens if request.awaits_kv else request.num_tokens - 1
        prefix = self.kv.find_prefix(request, 0 if owes_prompt_logprobs(request) else max_hit)
        num_hit = len(prefix) * self.kv.block_size
        if request.moves_kv or self._num_external_tokens(request, num_hit):
            num_tokens = request.num_initial_tokens
        else:
            num_tokens = min(num_hit + budget, request.num_tokens)
        if request.spec.hold_kv is not None and not self._may_hold(num_tokens):
            return False
        if not self.kv.allocate(request, num_tokens, prefix):
            return False
        request.num_computed_tokens = num_hit
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_hit
        return True

    def _may_hold(self, num_tokens: int) -> bool:
        """Transfers hold at most a share of the blocks, so that those who read them are waited for and not starved."""
        held = self.num_held_blocks
        return (
            held == 0 or held + self.kv.num_blocks_for(num_tokens) <= self.config.max_held_fraction * self.kv.num_blocks
        )

    def _load(self, request: Request, num_external: int) -> None:
        """Let the connector fill the request's blocks past its prefix hits."""
        request.status = RequestStatus.LOADING
        self.loading[request.request_id] = request
        num_local_blocks = request.num_computed_tokens // self.kv.block_size
        if request.spec.remote_kv is not None:
            self._events.append(ReservedEvent(request.request_id, request.num_cached_tokens, num_local_blocks))
        if num_external > 0:
            block_ids = self.kv.block_ids(request.request_id)
            self.connector.update_state_after_alloc(request, block_ids, num_local_blocks)
        else:
            self.load_finished(KVLoadResult(request.request_id, request.num_cached_tokens, 0, 0))

    def _start_if_ready(self, request: Request) -> None:
        is_seeded = request.seeded or request.spec.remote_kv is None
        if not (is_seeded and request.loaded) or request.status is not RequestStatus.LOADING:
            return
        del self.loading[request.request_id]
        request.deadline = None
        if self.kv.has_table(request.request_id):
            self._run(request)
        else:
            request.status = RequestStatus.PREEMPTED
            insort(self.waiting, request, key=lambda other: other.order)

    def _run(self, request: Request) -> None:
        request.runs()
        self.running.append(request)
        if request.num_computed_tokens:
            self._offer(request)

    def _offer(self, request: Request) -> None:
        """Tell the connector how far KV that it is to hand over has come."""
        if request.spec.hold_kv is not None:
            block_ids = self.kv.block_ids(request.request_id)
            self.connector.request_progressed(request, block_ids, request.num_computed_tokens)

    def _retain(self, request: Request, retained_id: str) -> None:
        """Leave a loading request's blocks past the verified ones to the connector. It begins again once it has its
        seed, with what the prefix cache has."""
        num_verified_blocks = request.num_computed_tokens // self.kv.block_size
        blocks = self.kv.close_table(request.request_id)
        self.kv.pool.release(blocks[:num_verified_blocks])
        self.held[retained_id] = blocks[num_verified_blocks:]
        request.num_computed_tokens = 0

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of a running request, at the cost of those that come after it. False: it was
        preempted itself, or has to wait for I/O to free blocks."""
        while not self.kv.allocate(request, num_tokens):
            victims = [other for other in self.running if not other.moves_kv]
            if not victims:
                return False
            victim = max(victims, key=lambda other: other.order)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.counters.num_preemptions += 1
        self.running.remove(request)
        self.kv.pool.release(self.kv.close_table(request.request_id))
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        insort(self.waiting, request, key=lambda other: other.order)

    def _append_token(self, request: Request, sampled: Sampled) -> None:
        token_id = sampled.token_ids.get(request.request_id)
        if token_id is None:
            if request.request_id in sampled.nothing_allowed:
                self._fail(request, "its wishes for single tokens leave none that can be drawn", "nothing_allowed")
            else:
                self._fail(request, "the model's output is not finite: no token can be drawn")
            return
        request.token_ids.append(token_id)
        self.counters.num_generated_tokens += 1
        reason, stop_token_id = check_token_stop(
            token_id,
            request.num_output_tokens,
            request.spec.params,
            eos_token_ids=request.spec.eos_token_ids,
            num_tokens=request.num_tokens,
            max_model_len=self.max_model_len,
        )
        if reason is None and request.spec.hold_kv is not None:
            reason = "hand_over"
        self._events.append(sampled.event(request, finish_reason=reason, stop_token_id=stop_token_id))
        if reason is not None:
            self._finish(request, reason)

    def _fail(self, request: Request, error: str, kind: ErrorKind | None = None) -> None:
        self._events.append(TokensEvent(request.request_id, [], finish_reason="error", error=error, error_kind=kind))
        self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.LOADING:
            del self.loading[request.request_id]
        elif request in self.waiting:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        block_ids = self.kv.block_ids(request.request_id)
        blocks = self.kv.close_table(request.request_id)
        if self.connector.request_finished(request, block_ids):
            self.held[request.request_id] = blocks
        else:
            self.kv.pool.release(blocks)
