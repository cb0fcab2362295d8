"""The engine core: model, KV memory, scheduler and connector. Its owner steps it, from one thread.

One step: apply finished I/O, decide, start I/O, compute, apply the result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import assert_never

from engine import failpoints
from engine.attention import page_order
from engine.config import EngineConfig
from engine.core.messages import (
    AbortRequests,
    AddRequest,
    Command,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    Event,
    KVProgress,
    LeaseCommand,
    Seed,
    Shutdown,
    TokensEvent,
)
from engine.errors import CapacityError, InvalidRequest
from engine.executor.executor import Executor, explained_out_of_memory
from engine.executor.multiprocess import make_executor
from engine.identity import CheckpointState, compute_identity
from engine.kv_connector import KVLoadResult, make_connector, self_test
from engine.kv_layout import KVLayout
from engine.machine import START_UP
from engine.model_runner import ModelRunner
from engine.models import read_config
from engine.models.config import DecoderConfig
from engine.sampling.grammar import CompiledGrammar, GrammarCompiler
from engine.scheduling.drafts import Drafter
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import Sampled, SchedulerOutput
from engine.scheduling.step_budget import replay_s
from engine.scheduling.step_cost import StepCostEstimator

logger = logging.getLogger(__name__)

_FLOAT16 = "linear layers of float16 are multiplied in float32 on CPU; --dtype bfloat16 is faster"
_SMOOTHING = 0.2
_MANY_TOKENS = 64
"""From here on a step measures the seconds per token; a smaller one, mostly of decodes, what any step takes."""


class StepTimeEstimator:
    """Predicts the time of a step from earlier ones, to distinguish a long step from a hung model.

    `token_s`, seconds per token, is measured at the start on a few tokens, which overestimates it.
    """

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._small_step_s = 0.0
        self.predicted_s = 0.0
        """Of the current step, or the last one."""

    def predict(self, num_tokens: int) -> None:
        """Predict the next step; without tokens the last prediction stays."""
        if num_tokens:
            self.predicted_s = max(self._small_step_s, num_tokens * self._token_s)

    def record(self, seconds: float, num_tokens: int) -> None:
        if num_tokens >= _MANY_TOKENS:
            self._token_s += _SMOOTHING * (seconds / num_tokens - self._token_s)
        else:
            self._small_step_s += _SMOOTHING * (seconds - self._small_step_s)


class EngineCore:
    """See the module. `wake` is called from any thread and must make the owner call `step` soon."""

    @explained_out_of_memory()
    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        self.config = config
        checkpoints = [*map(CheckpointState.of, (config.model, *config.lora_adapters.values()))]
        model_config = read_config(config.model, config.model_impl)
        if config.device == "cpu" and model_config.resolve_dtype(config.dtype) == "float16":
            logger.info("%s%s", START_UP, _FLOAT16)
        with contextlib.ExitStack() as started:  # what a start that fails has to end
            self._executor = make_executor(config, model_config, wake)
            started.callback(self._executor.shutdown)
            self._set_up(model_config, checkpoints, wake, started)
            started.pop_all()

    def _set_up(
        self,
        model_config: DecoderConfig,
        checkpoints: Sequence[CheckpointState],
        wake: Callable[[], None],
        started: contextlib.ExitStack,
    ) -> None:
        config, dtype = self.config, model_config.resolve_dtype(self.config.dtype)
        order = page_order(self._executor.attention_name)
        layout = model_config.kv_layout(dtype=dtype, block_size=config.block_size, order=order)
        identity = compute_identity(
            config.model,
            dtype=dtype,
            layout=layout,
            load_format=config.load_format,
            seed=config.seed,
            backend=model_config.backend,
            quantization=config.quantization,
        ).with_adapters(config.lora_adapters)
        for files in checkpoints:
            files.check()
        self._fingerprint = identity.fingerprint
        num_blocks = _num_blocks(config, layout, model_config.max_model_len, self._executor)
        max_model_len = _max_model_len(config, model_config.max_model_len, num_blocks)
        kv_cache = self._executor.allocate_kv(layout, num_blocks)
        kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
            window=_widest_window(model_config.sliding_windows),
        )
        self._connector = make_connector(config.kv_connector, wake)
        self._connector.register_kv_cache(kv_cache, layout, bytes.fromhex(self._fingerprint))
        self_test(self._connector)
        started.callback(self._connector.shutdown)
        self._runner = ModelRunner(self._executor, kv, kv_cache, config.lora_adapters)
        drafter = Drafter(
            config.num_speculative_tokens,
            max_num_rows=config.max_num_seqs,
            max_model_len=max_model_len,
            num_admitted=self._runner.grammars.num_admitted,
        )
        self.scheduler = Scheduler(config, kv, self._connector, max_model_len, drafter=drafter)
        self._grammars = GrammarCompiler(Path(config.model), model_config.vocab_size, wake)
        started.callback(self._grammars.shutdown)
        self.step_time = StepTimeEstimator(self._runner.warm_up())
        self._step_cost = StepCostEstimator()
        self._num_arrived = 0
        self._num_expired_leases = 0
        self.idle = True
        """The last step found nothing to compute or to replay, and no command has come since."""
        self._started = 0.0
        self._output = SchedulerOutput([])
        self._sampled = Sampled()
        self._events: list[Event] = []
        self._loaded: list[KVLoadResult] = []
        self._freed_request_ids: list[str] = []
        self._needed: dict[str, frozenset[int]] = {}
        self.info = EngineInfo(
            model_identity=identity,
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            bytes_per_block=layout.bytes_per_block,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kv_connector=self._connector.name,
            attention_backend=self._executor.attention_name,
            lora_adapters=sorted(config.lora_adapters),
            pid=os.getpid(),
        )

    def handle(self, command: Command) -> None:
        """Apply one command, between steps. `Shutdown` is left to the owner."""
        self.idle = False
        match command:
            case AddRequest(spec):
                self.add(spec)
            case AbortRequests(request_ids):
                self._apply_io()  # blocks that an abandoned read may still write to must not be freed with the request
                for request_id in request_ids:
                    self.scheduler.abort(request_id)
            case Seed(request_id, token_ids):
                self.scheduler.seed(request_id, token_ids)
            case KVProgress() | LeaseCommand():
                self._connector.handle(command)
            case Shutdown():
                pass
            case _:
                assert_never(command)

    def add(self, spec: EngineRequest, grammar: CompiledGrammar | None = None) -> CompiledGrammar | None:
        """Add a request, as the command does, and return its grammar. `grammar` is what was returned for a request with
        the same constraint: the compiler may have dropped it and would begin again."""
        self.idle = False
        self._apply_io()
        if spec.request_id in self.scheduler.held:
            error = f"request id {spec.request_id} is in use: KV of an earlier request with it is still transferred"
            event = TokensEvent(spec.request_id, [], finish_reason="error", error=error, error_kind="id_in_use")
            self._events.append(event)
            return None
        self._num_arrived += 1
        if grammar is None and spec.params.constraint is not None:
            grammar = self._grammars.compiled(spec.params.constraint)
        request = Request.from_spec(spec, arrival=self._num_arrived, fingerprint=self._fingerprint, grammar=grammar)
        self.scheduler.add_request(request, time.monotonic())
        return grammar

    def await_grammars(self) -> None:
        """Wait until the constraints of all requests are compiled, for each at most `grammar_s` from when those before
        it are. Raises InvalidRequest for one that cannot be; other failures, and a compilation that takes longer, are
        events of the next step."""
        waiting = self.scheduler.compiling.values()
        grammars = dict.fromkeys(request.grammar for request in waiting if request.grammar is not None)
        for grammar in grammars:  # in the order in which their compilations begin
            wait({grammar}, timeout=self.config.grammar_s)
            if not grammar.done() or grammar.exception() is not None:
                break
        for grammar in grammars:
            if grammar.done() and isinstance(error := grammar.exception(), InvalidRequest):
                raise error

    def step(self) -> list[Event]:
        """Compute one step, if there is work, and return the events since the last one."""
        if self.begin_step():
            self.compute()
            self.finish_step()
        return self.take_events()

    def begin_step(self) -> bool:
        """Apply finished I/O, decide, start I/O. True: `compute`, then `finish_step` must follow."""
        is_replaying = self._replay_outputs()
        self._started = time.monotonic()
        self._executor.check()
        self.poll_connector()
        self._apply_io()
        self.scheduler.take_compiled(self._started)
        self.scheduler.expire(self._started)
        self._grammars.keep({request.grammar for request in self.scheduler.compiling.values()})
        self._output = self.scheduler.schedule()
        self._connector.start_io()
        self.idle = not (self._output.scheduled or is_replaying)
        self.step_time.predict(self._output.num_tokens)
        return bool(self._output.scheduled)

    def compute(self) -> None:
        """Run the model on what `begin_step` decided. May run in another thread: meanwhile the owner calls only
        `poll_connector`, `take_events`, `load`, and `handle` with commands for the connector."""
        failpoints.hit("engine.step")
        self._sampled = self._runner.execute(self._output)

    def finish_step(self) -> None:
        """Apply the result of `compute`."""
        self.scheduler.update_from_output(self._output, self._sampled)
        self._connector.start_io()
        now, output = time.monotonic(), self._output
        seconds, num_prompt_tokens = now - self._started, output.num_tokens - output.num_streams
        self.step_time.record(seconds, output.num_tokens)
        self._step_cost.record(seconds, output.num_streams, num_prompt_tokens)
        self.scheduler.step_cost = self._step_cost.cost
        self.scheduler.prefill_rate.add(num_prompt_tokens, now)
        self.scheduler.drafter.record(output, seconds)

    def poll_connector(self) -> None:
        """Collect finished I/O and start what follows from it. The scheduler learns of it at the next step."""
        output = self._connector.poll()
        self._loaded += output.loaded
        self._freed_request_ids += output.freed_request_ids
        self._needed |= output.needed
        self._events += output.events
        self._num_expired_leases += output.num_expired_leases
        self._connector.start_io()

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = [*self._events, *self.scheduler.take_events()], []
        return events

    def next_deadline_s(self) -> float | None:
        """Seconds until `step` must be called even if nothing happens; None: never."""
        return self._connector.next_deadline_s()

    @property
    def load(self) -> EngineLoad:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        # Each block in one class, by precedence: quarantined (all of them held), held, running, cached, free.
        quarantined = self._connector.num_quarantined_blocks
        # The scheduler learns of a load that was given up only after the step.
        held = max(len(scheduler.held.ids), quarantined)
        return EngineLoad(
            step_cost=scheduler.step_cost,
            free_blocks=pool.num_available - pool.num_cached,
            cached_blocks=pool.num_cached,
            running_blocks=scheduler.kv.num_blocks - pool.num_available - held,
            held_blocks=held - quarantined,
            quarantined_blocks=quarantined,
            num_transfers=self._connector.num_transfers,
            step_s=self.step_time.predicted_s,
            num_expired_leases=self._num_expired_leases,
            kv_totals=self._connector.totals,
            **scheduler.queue_load._asdict(),
            **scheduler.counters.totals(),
        )

    def shutdown(self) -> None:
        """End I/O. The core cannot be used afterwards."""
        self._grammars.shutdown()
        self._connector.shutdown()
        self._executor.shutdown()

    def _replay_outputs(self) -> bool:
        """Let grammars follow the outputs that came with their requests, for a part of a step. True: some are left."""
        waiting = [request for request in self.scheduler.compiling.values() if request.awaits_replay]
        if not waiting:
            return False
        num_streams = sum(not request.is_prompt for request in self.scheduler.running)
        for request in self._runner.grammars.replay(waiting, replay_s(self.scheduler.step_cost, num_streams)):
            request.is_replayed = True
        return any(request.awaits_replay for request in waiting)

    def _apply_io(self) -> None:
        """Apply finished I/O to the scheduler; between steps."""
        for result in self._loaded:
            self.scheduler.load_finished(result)
        for held_id, block_ids in self._needed.items():
            self.scheduler.held.narrow(held_id, block_ids)
        for request_id in self._freed_request_ids:
            self.scheduler.held.free(request_id)
        self._loaded, self._freed_request_ids, self._needed = [], [], {}


def _widest_window(windows: Sequence[int | None]) -> int | None:
    """None where a layer has none: its blocks are needed to the end."""
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None


def _num_blocks(config: EngineConfig, layout: KVLayout, model_max_len: int, executor: Executor) -> int:
    """KV blocks: as configured, else as many as fit into part of the free memory and max_num_seqs requests can use."""
    if config.num_blocks is not None:
        return config.num_blocks
    given = config.kv_cache_bytes
    if given is None:
        longest = min(config.max_model_len or model_max_len, model_max_len)
        useful = config.max_num_seqs * (-(-longest // layout.block_size) + 1) * layout.bytes_per_block
        given = min(executor.free_for_kv(layout, longest), useful)
    num_blocks = given // layout.bytes_per_block
    if num_blocks < 2:
        raise CapacityError(f"{given} bytes of KV memory are too few for 2 blocks of {layout.bytes_per_block} bytes")
    return num_blocks


def _max_model_len(config: EngineConfig, model_max_len: int, num_blocks: int) -> int:
    """Longest request: the least of the model's limit, the configured one and the KV memory."""
    fits = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model_max_len, fits)
    if config.max_model_len > model_max_len:
        raise CapacityError(f"max_model_len {config.max_model_len} exceeds the model's limit of {model_max_len}")
    if config.max_model_len > fits:
        raise CapacityError(f"max_model_len {config.max_model_len} exceeds the KV memory of {fits} tokens")
    return config.max_model_len
