"""The engine core: model, KV memory, scheduler and connector, stepped by whoever owns it.

One step: collect what I/O has ended, decide, start I/O, compute, apply. Single-threaded; every method is called from
one thread.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import torch

from engine import failpoints
from engine.config import EngineConfig
from engine.errors import CapacityError
from engine.identity import ModelIdentity, compute_identity
from engine.kv_cache_manager import KVCacheManager
from engine.kv_connector import KVLoadResult, make_connector, self_test
from engine.kv_layout import KVLayout
from engine.machine import available_bytes
from engine.messages import (
    AbortRequests,
    AddRequest,
    Command,
    EngineInfo,
    EngineLoad,
    Event,
    KVProgress,
    LeaseCommand,
    Seed,
    Shutdown,
)
from engine.model_runner import ModelRunner
from engine.models import load_model
from engine.models.config import ModelConfig
from engine.request import Request
from engine.scheduler import Scheduler
from engine.scheduler_output import Sampled, SchedulerOutput
from engine.step_pace import StepPace

_PROFILED_SHARE = 0.3
"""Of the memory that is free once the weights are loaded, when no KV size is given: several instances share a host."""


class EngineCore:
    """See the module. `wake` may be called from any thread and must make the owner call `step` soon."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        self.config = config
        model_config = ModelConfig.from_folder(Path(config.model))
        dtype = model_config.resolve_dtype(config.dtype)
        layout = model_config.kv_layout(dtype=dtype, block_size=config.block_size)
        identity = compute_identity(
            config.model, dtype=dtype, layout=layout, load_format=config.load_format, seed=config.seed
        )
        self._fingerprint = config.model_fingerprint or identity.fingerprint
        model = load_model(
            model_config,
            folder=Path(config.model),
            dtype=dtype,
            device=config.device,
            load_format=config.load_format,
            seed=config.seed,
            block_size=config.block_size,
            attention_backend=config.attention_backend,
        )
        num_blocks = _num_blocks(config, layout, model_config.max_model_len)
        max_model_len = _max_model_len(config, model_config.max_model_len, num_blocks)
        kv_cache = _zeroed_memory((num_blocks, *layout.page_shape), getattr(torch, dtype), config.device)
        kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._connector = make_connector(config.kv_connector, wake)
        self._connector.register_kv_cache(kv_cache, layout, bytes.fromhex(self._fingerprint))
        self_test(self._connector)
        connectors = getattr(self._connector, "connectors", [self._connector])  # a list counts each by itself
        self._counting = [connector for connector in connectors if hasattr(connector, "totals")]
        self.scheduler = Scheduler(config, kv, self._connector, max_model_len)
        self._runner = ModelRunner(config, model, kv_cache, kv)
        self._pace = StepPace(self._runner.warm_up())
        self._num_arrived = 0
        self._num_steps = 0
        self._num_expired_leases = 0
        self._idle = True
        self._started = 0.0
        self._output = SchedulerOutput([])
        self._sampled = Sampled()
        self._events: list[Event] = []
        self._loaded: list[KVLoadResult] = []
        self._freed_request_ids: list[str] = []
        self.info = self._make_info(identity, layout, model.attention_name, model_config.vocab_size)

    def handle(self, command: Command) -> None:
        """Apply one command, between steps. `Shutdown` is the owner's to act on."""
        self._idle = False
        match command:
            case AddRequest(spec):
                self._num_arrived += 1
                request = Request.from_spec(spec, arrival=self._num_arrived, fingerprint=self._fingerprint)
                self.scheduler.add_request(request, time.monotonic())
            case AbortRequests(request_ids):
                self._apply_io()  # what a given-up read may still write to must not be freed with its request
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

    def step(self) -> list[Event]:
        """Compute one step, if there is anything to compute, and return what has happened since the last one."""
        if self.begin_step():
            self.compute()
            self.finish_step()
        return self.take_events()

    def begin_step(self) -> bool:
        """Apply what I/O has ended, decide, start I/O. True: `compute`, then `finish_step` must follow."""
        self._started = time.monotonic()
        self.keep_kv_moving()
        self._apply_io()
        self.scheduler.expire(self._started)
        self._output = self.scheduler.schedule()
        self._start_io()
        self._idle = not self._output.scheduled
        self._pace.step_begins(self._output.num_tokens)
        return not self._idle

    def compute(self) -> None:
        """Run the model on what `begin_step` decided. May run in a thread of its own: meanwhile the owner calls
        nothing but `keep_kv_moving`, `take_events`, `load` and `handle` with words for the connector."""
        failpoints.hit("engine.step")
        self._sampled = self._runner.execute(self._output)

    def finish_step(self) -> None:
        """Apply what was computed."""
        self.scheduler.update_from_output(self._output, self._sampled)
        self._start_io()
        self._num_steps += 1
        self._pace.step_took(time.monotonic() - self._started, self._output.num_tokens)

    def keep_kv_moving(self) -> None:
        """Collect what I/O has ended and start what that allows. What concerns the scheduler waits for the next
        step."""
        output = self._connector.poll()
        self._loaded += output.loaded
        self._freed_request_ids += output.freed_request_ids
        self._events += output.events
        self._num_expired_leases += output.num_expired_leases
        self._start_io()

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = [*self._events, *self.scheduler.take_events()], []
        return events

    @property
    def idle(self) -> bool:
        """The last step found nothing to compute and no command has come since."""
        return self._idle

    def next_deadline_s(self) -> float | None:
        """Seconds until `step` must be called even if nothing happens; None: never."""
        return self._connector.next_deadline_s()

    @property
    def predicted_step_s(self) -> float:
        """How long the step that has begun will take, by what earlier ones took."""
        return self._pace.predicted_s

    @property
    def load(self) -> EngineLoad:
        """How busy the core is now."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        pool = scheduler.kv.pool
        # Each block in one class, by precedence: quarantined (all of them held), held, running, cached, free.
        held, quarantined = scheduler.num_held_blocks, self._connector.num_quarantined_blocks
        return EngineLoad(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_loading=len(scheduler.loading),
            num_waiting_tokens=scheduler.num_waiting_tokens,
            free_blocks=pool.num_available - pool.num_cached,
            cached_blocks=pool.num_cached,
            running_blocks=scheduler.kv.num_blocks - pool.num_available - held,
            held_blocks=held - quarantined,
            quarantined_blocks=quarantined,
            num_transfers=self._connector.num_transfers,
            num_steps=self._num_steps,
            steps_by_tokens=list(counters.steps_by_tokens),
            num_step_tokens=counters.num_step_tokens,
            step_s=self._pace.predicted_s,
            num_prefilled_tokens=counters.num_prefilled_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_external_tokens=counters.num_external_tokens,
            num_recomputed_blocks=counters.num_recomputed_blocks,
            num_expired_leases=self._num_expired_leases,
            num_preemptions=counters.num_preemptions,
            kv_totals=[connector.totals for connector in self._counting],
        )

    def shutdown(self) -> None:
        """End I/O. The core is not used afterwards."""
        self._connector.shutdown()

    def _apply_io(self) -> None:
        """Tell the scheduler what I/O has ended; between steps."""
        for result in self._loaded:
            self.scheduler.load_finished(result)
        for request_id in self._freed_request_ids:
            self.scheduler.free_held(request_id)
        self._loaded, self._freed_request_ids = [], []

    def _start_io(self) -> None:
        meta = self._connector.build_connector_meta()
        if meta.loads:
            self._connector.start_load_kv(meta)
        if meta.saves:
            self._connector.save_kv(meta)

    def _make_info(self, identity: ModelIdentity, layout: KVLayout, backend: str, vocab_size: int) -> EngineInfo:
        return EngineInfo(
            vocab_size=vocab_size,
            max_model_len=self.scheduler.max_model_len,
            block_size=layout.block_size,
            num_blocks=self.scheduler.kv.num_blocks,
            bytes_per_block=layout.bytes_per_block,
            dtype=layout.dtype,
            layout_version=identity.layout_version,
            layout_digest=identity.layout_digest,
            weights_digest=identity.weights_digest,
            config_digest=identity.config_digest,
            tokenizer_digest=identity.tokenizer_digest,
            fingerprint=self._fingerprint,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            kv_connector=self._connector.name,
            attention_backend=backend,
            pid=os.getpid(),
        )


def _zeroed_memory(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros. On the CPU they are the system's own, page by page at the first touch: writing 2 GiB takes seconds."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        free = available_bytes()
        raise CapacityError(
            f"KV memory of {num_bytes / 2**30:.1f} GiB is not to be had, {free / 2**30:.1f} GiB are free; ask for "
            "fewer KV bytes or blocks"
        ) from None
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _num_blocks(config: EngineConfig, layout: KVLayout, model_max_len: int) -> int:
    """KV blocks: as told, or as the memory that is left allows, at most what max_num_seqs requests of full length can
    use."""
    if config.num_blocks is not None:
        return config.num_blocks
    given = config.kv_cache_bytes
    if given is None:
        free = torch.cuda.mem_get_info()[0] if config.device == "cuda" else available_bytes()
        longest = min(config.max_model_len or model_max_len, model_max_len)
        useful = config.max_num_seqs * (-(-longest // layout.block_size) + 1) * layout.bytes_per_block
        given = min(int(free * _PROFILED_SHARE), useful)
    num_blocks = given // layout.bytes_per_block
    if num_blocks < 2:
        raise CapacityError(f"{given} bytes of KV memory hold no 2 blocks of {layout.bytes_per_block} bytes")
    return num_blocks


def _max_model_len(config: EngineConfig, model_max_len: int, num_blocks: int) -> int:
    """Longest request: what the model knows, what was asked for, what fits into the KV memory."""
    fits = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model_max_len, fits)
    if config.max_model_len > model_max_len:
        raise CapacityError(f"max_model_len {config.max_model_len} is over the model's own limit of {model_max_len}")
    if config.max_model_len > fits:
        raise CapacityError(f"max_model_len {config.max_model_len} does not fit: KV memory has {fits} tokens")
    return config.max_model_len
