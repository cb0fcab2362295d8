"""The scheduler: which requests compute how many tokens in the next step.

    add ─▶ waiting for grammar ──compiled──┐
     └─▶ waiting ◀────────────────────────┘
             │ ──blocks──▶ running ──stop──▶ finished ──no I/O left──▶ freed
             ▲  │                │
             │  └─remote KV─▶ loading ──KV (and seed) loaded or unavailable──▶ running
             ├───preempted◀──────┘ (no blocks; resumes from what the prefix cache still has)
             └───preempted◀── loading, where the connector keeps blocks that an abandoned read may still write to

`schedule()` decides and returns a value, the model runner executes it, `update_from_output()` applies the result.
Every step reduces the difference between a request's computed and known tokens, within one token budget; there is no
prefill or decode phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, islice

from engine.config import EngineConfig
from engine.core.messages import ErrorKind, Event, FinishReason, LoadedEvent, ReservedEvent, StepCost, TokensEvent
from engine.kv_connector import KVConnector, KVLoadResult
from engine.scheduling import step_budget
from engine.scheduling.drafts import Drafter
from engine.scheduling.kv_cache_manager import HeldBlocks, KVCacheManager
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler_output import QueueLoad, Sampled, ScheduledRequest, SchedulerCounters, SchedulerOutput
from engine.scheduling.step_cost import RecentRate
from engine.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Scheduler:
    """Owns the requests and, through the KV cache manager, the blocks. Called from the step loop alone."""

    config: EngineConfig
    kv: KVCacheManager
    connector: KVConnector
    max_model_len: int
    requests: dict[str, Request] = field(default_factory=dict)
    compiling: dict[str, Request] = field(default_factory=dict)
    """Requests that wait for their grammar."""
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[Request] = field(default_factory=list)
    loading: dict[str, Request] = field(default_factory=dict)
    held: HeldBlocks = field(init=False)
    """Blocks of finished requests, and of abandoned loads, that the connector still needs."""
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    drafter: Drafter = field(default_factory=Drafter)
    step_cost: StepCost | None = None
    prefill_rate: RecentRate = field(default_factory=RecentRate)
    """Both are measured by the owner."""
    _events: list[Event] = field(default_factory=list)
    _now: float = 0.0
    _is_step_open: bool = False
    """The result of the last step is not applied yet."""

    def __post_init__(self) -> None:
        self.held = HeldBlocks(self.kv)

    # Commands

    def add_request(self, request: Request, now: float) -> None:
        """Queue a request, or wait for its grammar; one that can never fit ends at once with an error."""
        needed = self.kv.num_blocks_for(request.num_initial_tokens + 1)
        self.requests[request.request_id] = request
        if needed > self.kv.num_blocks:
            problem = f"the prompt needs {needed} KV blocks, this instance has {self.kv.num_blocks} in all"
            self._fail(request, problem, "too_large")
        elif request.is_compiled:
            self._queue(request, now)
        else:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            request.deadline = now + self.config.grammar_s
            self.compiling[request.request_id] = request

    def take_compiled(self, now: float) -> None:
        """Queue the requests whose grammar has been compiled, at a pace that running streams bear; end those whose
        constraint has none. Called before each step."""
        for request in list(self.compiling.values()):
            if (failure := request.constraint_failure()) is not None:
                self._fail(request, *failure)
        compiled = [request for request in self.compiling.values() if request.is_compiled]
        prompts = (0 if request.awaits_kv else request.num_uncomputed_tokens for request in compiled)
        num_streams = sum(not request.is_prompt for request in self.running)
        for request in compiled[: step_budget.num_entering(self.step_cost, num_streams, prompts)]:
            del self.compiling[request.request_id]
            request.is_entering = True
            self._queue(request, now)

    def abort(self, request_id: str) -> None:
        """End a request without an event. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    def seed(self, request_id: str, token_ids: list[int]) -> None:
        """Set the output after which a loading request continues. Later seeds and unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is None or request.seeded or request.spec.remote_kv is None:
            return
        request.seeded = True
        request.token_ids.extend(token_ids)
        self._start_if_ready(request)

    def load_finished(self, result: KVLoadResult) -> None:
        """The load of a request has ended; missing KV is computed here."""
        request = self.loading.get(result.request_id)
        if request is None or request.loaded:
            return
        request.loaded = True
        request.num_computed_tokens = result.num_verified_tokens
        self.kv.publish(request)
        if result.retained_id is not None:
            result = self._retain(request, result, result.retained_id)
        if request.spec.remote_kv is not None or request.queue_s is None:  # else its prompt has been counted
            request.num_external_tokens = result.num_external_tokens
        self.counters.num_external_tokens += result.num_external_tokens
        self.counters.num_recomputed_blocks += result.num_recomputed_blocks
        if request.spec.remote_kv is not None:
            request.num_recomputed_tokens = request.num_initial_tokens - result.num_verified_tokens
            self._events.append(
                LoadedEvent(request.request_id, result.num_external_tokens, result.num_recomputed_blocks, result.reason)
            )
        self._start_if_ready(request)

    def expire(self, now: float) -> None:
        """End requests that have waited too long for a grammar, blocks, KV, seed or a step."""
        self._now = now
        compiling = (one for one in self.compiling.values() if not (one.is_compiled or one.awaits_replay))
        for request in [*self.loading.values(), *self.waiting.expiring, *self.running, *compiling]:
            if (error := request.expired(now)) is not None:
                self._fail(request, *error)

    # The step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: streams, each with its one token, then, within the prompts' budget, running prompts
        and waiting requests, each first come, first served, and those that are late."""
        self._undo_interrupted_step()
        self._is_step_open = True
        streams = [request for request in self.running if not request.is_prompt]
        budget = self._prompt_budget(streams, self._running_prompts())
        prompts = self._running_prompts()  # those that were found late may wait now
        self.kv.begin_step()
        scheduled: list[ScheduledRequest] = []
        num_tokens = max(self.config.max_num_batched_tokens, len(self.running))  # with fewer some would stand still
        num_left, streams_lack_room = self._schedule_running(streams, num_tokens, scheduled)
        on_time = [request for request in prompts if not request.is_late]
        num_left, prompts_lack_room = self._schedule_running(on_time, min(num_left, budget), scheduled)
        late = [request for request in prompts if request.is_late and request.status is RequestStatus.RUNNING]
        if self.waiting and not (streams_lack_room or prompts_lack_room):
            num_left = self._admit(num_left, scheduled, may_be_late=not late)
        self._schedule_running(late, num_left, scheduled, may_preempt=not scheduled)
        self.drafter.add(scheduled, self.step_cost, num_tokens, self.kv)
        self._is_step_open = bool(scheduled)
        return SchedulerOutput(scheduled)

    def update_from_output(self, output: SchedulerOutput, sampled: Sampled) -> None:
        """Apply a step's result: progress, new tokens, finished requests. `sampled` has tokens for each share that
        samples, unless its logits were not finite; a prompt whose KV is not finite ends."""
        self.counters.step_computed(output.num_tokens, sum(len(share.draft) for share in output.scheduled))
        for share in output.scheduled:
            request = share.request
            request.num_computed_tokens += share.num_tokens
            num_prompt_tokens = min(request.num_computed_tokens, request.num_initial_tokens) - share.start
            self.counters.num_prefilled_tokens += max(0, num_prompt_tokens)
            if (problem := sampled.problem(share)) is not None:
                self._fail(request, problem)  # others do not find its KV of this step, which would make them fail too
                continue
            self.kv.publish(request)
            self._offer(request, request.num_computed_tokens)
            if not request.is_handed_over:  # its reader needs them all
                self.kv.drop_unseen(request)
            if share.samples:
                self._append_tokens(request, sampled)
        self._is_step_open = False

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def queue_load(self) -> QueueLoad:
        return QueueLoad.of(self.waiting, self.running, self.loading.values(), self.compiling.values())

    # Internals

    def _undo_interrupted_step(self) -> None:
        """If the last step was not applied (Ctrl-C), what it should have computed is not there: the running requests,
        which may share such blocks, begin again from what the prefix cache has."""
        if not self._is_step_open:
            return
        for request in list(self.running):
            if request.moves_kv:
                self._fail(request, "its step was interrupted")
            else:
                self._preempt(request)

    def _running_prompts(self) -> list[Request]:
        """Prompts that have begun, as they were admitted; then those that only have blocks, after a look-up in a store,
        in the order of service. The last of them need not be the one that is preempted first."""
        prompts = [request for request in self.running if request.is_prompt]
        return sorted(prompts, key=lambda request: (request.is_untouched, request.is_untouched and request.order))

    def _prompt_budget(self, streams: list[Request], prompts: list[Request]) -> int:
        """Prompt tokens of the next step, so that requests with objectives meet them, and those that have waited for a
        grammar do not stop the streams (step_budget.py)."""
        cost, max_tokens, now = self.step_cost, self.config.max_num_batched_tokens, self._now
        bounds = (self._num_entering_tokens(streams, prompts), self._num_stretched_tokens(streams, prompts))
        num_calm = min((bound for bound in bounds if bound is not None), default=None)
        paced = [request.paced(now) for request in streams if request.spec.itl_s is not None]
        candidates = [*(request for request in prompts if not request.is_late), *self.waiting.first_on_time()]
        if cost is None or not (paced or any(request.has_ttft for request in candidates)):
            return min(max_tokens, num_calm or max_tokens)
        planned = [request.planned(now) for request in candidates]
        late = set(step_budget.late(cost, len(streams), planned, max_tokens))
        self._put_last([candidates[index] for index in late])
        left = [prompt for index, prompt in enumerate(planned) if index not in late]
        are_late = bool(paced) and any(request.is_late for request in chain(prompts, self.waiting.with_ttft))
        rate = self.prefill_rate.per_s(now)
        return step_budget.prompt_budget(
            cost, paced, len(streams), left, max_tokens, num_calm, are_late=are_late, prefill_per_s=rate
        )

    def _put_last(self, late: list[Request]) -> None:
        """These prompts are late. Those running but untouched wait again, unless the connector knows their blocks."""
        for request in late:
            request.is_late = True
            if request.status is RequestStatus.RUNNING and request.is_untouched and not request.is_offered:
                self._preempt(request)
        if late:
            self.waiting.sort()

    def _num_stretched_tokens(self, streams: list[Request], prompts: list[Request]) -> int | None:
        """None: no bound."""
        stretches = [request.spec.step_stretch for request in streams if request.spec.step_stretch is not None]
        if not stretches:
            return None
        num_prompts = len(prompts) + self._num_able_to_begin()
        return step_budget.stretched_tokens(self.step_cost, len(streams), num_prompts, min(stretches))

    def _num_able_to_begin(self) -> int:
        """Waiting prompts that lack neither a place in the batch nor blocks, prefix hits aside."""
        num_places = self.config.max_num_seqs - len(self.running) - len(self.loading)
        first = islice(self.waiting, max(num_places, 0))
        able = [request for request in first if not request.awaits_kv and self._can_fit(request)]
        moved = next((request for request in able if request.is_handed_over), None)
        if moved is not None and not self._may_hold(moved):
            able = [request for request in able if not request.is_handed_over]
        most = self.config.max_num_batched_tokens
        needed = [one.num_initial_tokens if one.moves_kv else min(one.num_tokens, most) for one in able[:1]]
        return len(able) if needed and self.kv.num_blocks_for(needed[0]) <= self.kv.pool.num_available else 0

    def _num_entering_tokens(self, streams: list[Request], prompts: list[Request]) -> int | None:
        """None: no bound."""
        others = chain(prompts, self.waiting if streams else ())
        left = ((one.num_uncomputed_tokens, one.is_entering) for one in others if not one.awaits_kv)
        return step_budget.entering_bound(self.step_cost, len(streams), left, self.config.max_num_batched_tokens)

    def _schedule_running(
        self, requests: list[Request], budget: int, scheduled: list[ScheduledRequest], *, may_preempt: bool = True
    ) -> tuple[int, bool]:
        """Add the shares of running requests, and drop those of requests that are preempted for them. Returns what is
        left of the budget, and whether blocks were lacking for one."""
        lacks_room = False
        for request in requests:
            if budget == 0:
                break
            self._adopt(request)
            num_tokens = min(request.num_uncomputed_tokens, budget)
            make_room = self._make_room if may_preempt else self.kv.allocate
            is_running = request.status is RequestStatus.RUNNING
            if not (is_running and make_room(request, request.num_computed_tokens + num_tokens)):
                lacks_room = True
                continue
            request.begin()
            scheduled.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
            if request.is_prompt and request.moves_kv:  # it is not preempted, so that others can rely on it
                self.kv.expect(request, request.num_computed_tokens + num_tokens)
            budget -= num_tokens
        scheduled[:] = [share for share in scheduled if share.request.status is RequestStatus.RUNNING]
        return budget, lacks_room

    def _adopt(self, request: Request) -> None:
        """Skip what others have computed since this prompt was admitted, as when prompts with the same beginning have
        looked for it in a store at the same time."""
        if not request.is_prompt or request.status is not RequestStatus.RUNNING or request.needs_prompt_logprobs:
            return
        if request.is_offered or request.spec.remote_kv is not None:
            return
        request.skip(self.kv.adopt(request, request.num_tokens - 1))

    def _queue(self, request: Request, now: float) -> None:
        request.status = RequestStatus.WAITING
        request.deadline = now + remote_kv.reservation_s if (remote_kv := request.spec.remote_kv) else None
        self.waiting.add(request)

    def _admit(self, budget: int, scheduled: list[ScheduledRequest], *, may_be_late: bool) -> int:
        """Begin waiting requests. Their prefix may be what this step computes for others: none of these is preempted
        from here on. Returns what is left of the budget, of which reservations and look-ups take nothing."""
        for share in scheduled:
            self.kv.expect(share.request, share.start + share.num_tokens)
        num_streams = sum(not request.is_handed_over for request in (*self.loading.values(), *self.running))
        num_held_back, is_spent, may_hand_over = 0, False, True
        while len(self.waiting) > num_held_back and len(self.running) + len(self.loading) < self.config.max_num_seqs:
            request = self.waiting[num_held_back]
            if not self._can_fit(request):
                num_held_back += 1
                continue
            is_moved, is_local = request.is_handed_over, not request.awaits_kv
            may_hand_over = may_hand_over and self._may_hold(request)
            is_spent = is_spent or (budget == 0 and is_local and not self._num_external_tokens(request, 0))
            if is_spent and not self.waiting.num_awaiting_kv:
                break
            is_held_back = (is_moved and not may_hand_over) or (is_spent and is_local)
            if is_held_back or not self._may_begin(request, num_streams) or (request.is_late and not may_be_late):
                num_held_back += 1
                continue
            if not self._allocate_first(request, budget):
                break
            self.waiting.pop(num_held_back)
            num_streams += not request.is_handed_over
            num_external = self._num_external_tokens(request, request.num_computed_tokens)
            if request.awaits_kv or num_external:
                self._load(request, num_external)
                continue
            self._run(request, self.kv.num_published_tokens(request))
            num_tokens = min(request.num_uncomputed_tokens, budget)
            if num_tokens:
                request.begin()
                scheduled.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
                self.kv.expect(request, request.num_computed_tokens + num_tokens)
                budget -= num_tokens
        return budget

    def _may_begin(self, request: Request, num_streams: int) -> bool:
        """False: one more stream would leave too little of a step to prompts. What a client has begun to read, and what
        is handed over in either direction, is never held back."""
        itl_s, is_new = request.spec.itl_s, request.status is RequestStatus.WAITING and not request.num_output_tokens
        if itl_s is None or request.spec.ttft_s is None or request.moves_kv or not is_new:
            return True
        return step_budget.may_begin(self.step_cost, itl_s, num_streams, is_late=request.is_late)

    def _num_external_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens to load through the connector, past the first `num_computed_tokens`."""
        if request.loaded or request.needs_prompt_logprobs:
            return 0
        return self.connector.get_num_new_matched_tokens(request, num_computed_tokens)

    def _allocate_first(self, request: Request, budget: int) -> bool:
        """Allocate a waiting request's first blocks, prefix hits included. False, without effect: too few blocks."""
        max_hit = request.num_initial_tokens if request.awaits_kv else request.num_tokens - 1
        max_hit = 0 if request.needs_prompt_logprobs else max_hit
        is_whole, is_filled = request.is_handed_over, request.awaits_kv
        prefix = self.kv.find_prefix(request, max_hit, is_whole=is_whole, is_filled=is_filled)
        if not is_filled and self._num_external_tokens(request, len(prefix) * self.kv.block_size):
            # A load begins behind blocks that are filled already, not at the end of this step.
            prefix = self.kv.find_prefix(request, max_hit, is_whole=is_whole, is_filled=True)
        num_hit = len(prefix) * self.kv.block_size
        if request.moves_kv or self._num_external_tokens(request, num_hit):
            num_tokens = request.num_initial_tokens
        else:
            num_tokens = min(num_hit + budget, request.num_tokens)
        if not self.kv.allocate(request, num_tokens, prefix):
            return False
        request.num_computed_tokens = num_hit
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = max(num_hit - request.num_external_tokens, 0)
        return True

    def _can_fit(self, request: Request) -> bool:
        """False: abandoned I/O, which may hang for long, leaves too few blocks."""
        if not self.held.abandoned:
            return True
        is_whole = request.moves_kv or self._num_external_tokens(request, 0) > 0
        return self.held.leave_room(request.num_tokens, is_whole=is_whole)

    def _may_hold(self, request: Request) -> bool:
        others, most = (*self.running, *self.loading.values()), self.config.max_held_fraction
        return not request.is_handed_over or self.held.may_hold(request.num_initial_tokens, others, most)

    def _load(self, request: Request, num_external: int) -> None:
        """Start loading the request's blocks past its prefix hits."""
        request.status = RequestStatus.LOADING
        self.loading[request.request_id] = request
        num_local_blocks = request.num_computed_tokens // self.kv.block_size
        if request.spec.remote_kv is not None:
            self._events.append(ReservedEvent(request.request_id, request.num_cached_tokens, num_local_blocks))
            # The wait for room takes nothing from the time in which the prompt is computed elsewhere.
            request.deadline = max(request.deadline or 0.0, self._now + request.spec.remote_kv.reservation_s)
        if num_external > 0:
            self.connector.update_state_after_alloc(request, self.kv.block_ids(request.request_id), num_local_blocks)
        else:
            self.load_finished(KVLoadResult(request.request_id, request.num_cached_tokens, 0, 0))

    def _start_if_ready(self, request: Request) -> None:
        is_seeded = request.seeded or request.spec.remote_kv is None
        if not (is_seeded and request.loaded) or request.status is not RequestStatus.LOADING:
            return
        del self.loading[request.request_id]
        if request.request_id in self.kv.rows:
            self._run(request, request.num_computed_tokens)
        else:
            request.status = RequestStatus.PREEMPTED
            remote_kv = request.spec.remote_kv  # where its stream cannot go on, it goes on elsewhere
            request.deadline = None if remote_kv is None else self._now + remote_kv.reservation_s
            self.waiting.add(request)

    def _run(self, request: Request, num_ready_tokens: int) -> None:
        """`num_ready_tokens`: those whose KV is in the blocks already, not only at the end of this step."""
        request.status = RequestStatus.RUNNING
        request.deadline = None
        self.running.append(request)
        if num_ready_tokens:
            self._offer(request, num_ready_tokens)

    def _offer(self, request: Request, num_ready_tokens: int) -> None:
        """Report to the connector how much KV of a hand-over is computed."""
        if request.is_handed_over:
            request.is_offered = True
            request.update_block_hashes(self.kv.block_size)  # once, also without a prefix cache
            self.connector.request_progressed(request, self.kv.block_ids(request.request_id), num_ready_tokens)

    def _retain(self, request: Request, result: KVLoadResult, retained_id: str) -> KVLoadResult:
        """Leave a loading request's blocks past the verified ones to the connector. Once seeded, the request resumes
        from what the prefix cache has. Returns the result; without such a cache, one with no KV."""
        num_verified_blocks = request.num_computed_tokens // self.kv.block_size
        blocks = self.kv.close_table(request.request_id)
        self.kv.pool.release(blocks[:num_verified_blocks])
        self.held.abandon(retained_id, blocks[num_verified_blocks:])
        request.num_computed_tokens = 0
        if self.kv.enable_prefix_caching:
            return result
        num_needed = 0 if request.spec.remote_kv is None else self.kv.num_blocks_for(request.num_initial_tokens)
        return replace(result, num_verified_tokens=0, num_external_tokens=0, num_recomputed_blocks=num_needed)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens of a running request, preempting later ones. False: it was preempted
        itself, or must wait for I/O to free blocks."""
        while not self.kv.allocate(request, num_tokens):
            victim = max((one for one in self.running if not one.moves_kv), key=lambda one: one.order, default=None)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.counters.num_preemptions += not request.is_untouched
        self.running.remove(request)
        self.kv.pool.release(self.kv.close_table(request.request_id))
        request.status = RequestStatus.WAITING if request.is_untouched else RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.add(request)

    def _append_tokens(self, request: Request, sampled: Sampled) -> None:
        if (token_ids := sampled.token_ids.get(request.request_id)) is None:
            self._fail(request, *request.nothing_allowed())
            return
        self.drafter.observe(request, token_ids)
        reason, stop_token_id = request.append(token_ids, self.max_model_len)
        self.counters.tokens_generated(len(token_ids))
        self.kv.publish(request)  # what a draft has completed
        self._events.append(sampled.event(request, finish_reason=reason, stop_token_id=stop_token_id))
        if reason is not None:
            self._finish(request, reason)

    def _fail(self, request: Request, error: str, kind: ErrorKind | None = None) -> None:
        self._events.append(TokensEvent(request.request_id, [], finish_reason="error", error=error, error_kind=kind))
        self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """May be repeated after Ctrl-C; blocks that it caught between the request's table and the pool are lost."""
        if request.status is RequestStatus.RUNNING and request in self.running:
            self.running.remove(request)
        elif request.status is RequestStatus.LOADING:
            self.loading.pop(request.request_id, None)
        elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self.compiling.pop(request.request_id, None)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        blocks = self.kv.close_table(request.request_id)
        if self.connector.request_finished(request, [block.block_id for block in blocks]):
            self.held[request.request_id] = blocks
        else:
            self.kv.pool.release(blocks)
        del self.requests[request.request_id]
