"""The half of the connector in vLLM's worker: holds Tandem's connector, beside the KV memory, and steps it.

    NewTransfer ─▶ Reservation ─▶ loads … ─▶ KVLoadResult ─┬─ with the seed ─▶ received: vLLM computes on
                                                           └─ given up ─▶ the host submits the request anew
    NewTransfer ─▶ Progress … ─▶ saves … ─▶ Finished ─▶ no I/O and no lease left ─▶ sent: vLLM frees the blocks

Tandem's connector is here as a whole, so that one process decides on leases and pages and carries I/O out.
vLLM's main thread calls it before and after the model computes; a thread of its own steps it meanwhile, passes on what
the host sends, and reports. An error in that thread ends the worker, and with it the instance.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine import failpoints
from engine.core.messages import Event, KVProgress, LeaseCommand, LoadedEvent, ReservedEvent, Seed
from engine.core.process import Mailbox
from engine.errors import EngineError
from engine.kv_connector import KVConnector, KVConnectorOutput, KVLoadResult, make_connector, self_test
from engine.machine import set_up_process
from engine.scheduling.request import Request
from vllm_engine.kv_messages import (
    Finished,
    HostCommand,
    Interrupt,
    KVLoad,
    KVReport,
    KVSetup,
    KVStep,
    NewTransfer,
    Progress,
    Reservation,
)

if TYPE_CHECKING:
    import torch

_IDLE_WAIT_S = 0.05
"""A step that computes nothing waits this long for something to happen: vLLM repeats it without a pause, and on
a CPU each takes time from models that compute."""
_SHORT_WAIT_S = 0.005
_INTERRUPTED_S = 0.05
"""So long after an Interrupt such steps are short: EngineCore may get the host's message only after the next one."""
_TICK_S = 0.25


@dataclass(slots=True, eq=False)
class _Transfer:
    """One request that moves KV, until vLLM needs nothing more of it."""

    request: Request
    """Its id is vLLM's."""
    name: str
    """The id that host and peers know."""
    block_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    result: KVLoadResult | None = None
    num_users: int = 0
    """How many of the connector's operations still use its blocks; meaningful once it has finished."""
    finished: Finished | None = None

    @property
    def is_load(self) -> bool:
        return self.request.spec.remote_kv is not None


@dataclass(slots=True)
class StepResults:
    """What vLLM receives after a step. Ids are vLLM's."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    bad_block_ids: set[int] = field(default_factory=set)
    """Blocks of what was received that have to be computed."""
    seeds: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.seeds)


class WorkerHalf:
    """All but `_run` is called by vLLM's main thread."""

    def __init__(self, layers: Sequence[torch.Tensor], num_blocks: int, setup: KVSetup) -> None:
        """`layers`: vLLM's KV memory, `num_blocks` each. Raises EngineError where the connector cannot work with it."""
        pages = [whole_blocks(layer, num_blocks, setup.block_size) for layer in layers]
        set_up_process(setup.config)
        self._fingerprint = setup.fingerprint
        self._block_size = setup.block_size
        self._mailbox = Mailbox(setup.address, HostCommand, linger_ms=0)
        self._connector: KVConnector = make_connector(setup.config.kv_connector, self._mailbox.wake)
        self._connector.register_kv_cache(pages, setup, bytes.fromhex(setup.fingerprint))
        self_test(self._connector)
        self.name = self._connector.name
        self._is_on_device = layers[0].device.type != "cpu"
        self._changed = threading.Condition()
        """Guards everything below."""
        self._transfers: dict[str, _Transfer] = {}
        self._by_name: dict[str, _Transfer] = {}
        """Loads that the host may have a message for."""
        self._given_up: dict[str, _Transfer] = {}
        """By the name under which their blocks become free."""
        self._results = StepResults()
        self._events: list[Event] = []
        self._to_resubmit: list[str] = []
        self._counts = KVLoad()
        """The counters of the load."""
        self._reported = KVLoad()
        self._interrupted_until_s = 0.0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-transfers")
        self._thread.start()

    # Called for each step

    def begin_step(self, step: KVStep) -> None:
        """Before the model computes."""
        if not (step.new or step.reserved or step.finished):
            return
        with self._changed:
            for new in step.new:
                self._add(new)
            for reservation in step.reserved:
                self._reserve(reservation)
            for finished in step.finished:
                self._finish(finished)
            self._connector.start_io()
        self._mailbox.wake()

    def flush_preempted(self, step: KVStep) -> None:
        """Before the blocks of preempted requests are overwritten. A save that has begun may still read one: it is
        cancelled here, and is not stored if that was before its copy of the block was complete (PageIO). The lease tag
        that a peer checks after it has read blocks in memory (nixl) is cleared here as well."""
        if not step.preempted:
            return
        with self._changed:
            for request_id in step.preempted:
                if (transfer := self._transfers.get(request_id)) is not None:
                    self._finish(Finished(request_id, transfer.block_ids, "abort", keeps_blocks=False))
        self._mailbox.wake()

    def end_step(self, step: KVStep) -> None:
        """After the model has computed."""
        if not step.progressed:
            return
        if self._is_on_device:
            import torch

            torch.accelerator.synchronize()
        with self._changed:
            for progress in step.progressed:
                self._progress(progress)
            self._connector.start_io()
        self._mailbox.wake()

    def take_results(self, step: KVStep) -> StepResults:
        """What has ended since the last call. Waits a little where the step computes nothing."""
        with self._changed:
            if step.is_empty and self._transfers:
                self._wait_for_results()
            results, self._results = self._results, StepResults()
        return results

    def _wait_for_results(self) -> None:
        if self._is_interrupted:
            self._changed.wait_for(lambda: bool(self._results), _SHORT_WAIT_S)
        else:
            self._changed.wait_for(lambda: bool(self._results) or self._is_interrupted, _IDLE_WAIT_S)

    @property
    def _is_interrupted(self) -> bool:
        return time.monotonic() < self._interrupted_until_s

    def shutdown(self) -> None:
        """End I/O, and remove what is this process's own."""
        self._is_ending = True
        self._mailbox.wake()
        self._thread.join()
        self._connector.shutdown()

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_ending:
                commands = self._mailbox.receive(self._timeout_s())
                if (report := self._turn(commands)) is not None:
                    failpoints.hit("kv.report")
                    self._mailbox.send(report)
            self._mailbox.close()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _timeout_s(self) -> float:
        with self._changed:
            deadline_s = self._connector.next_deadline_s()
        return _TICK_S if deadline_s is None else min(_TICK_S, max(0.001, deadline_s))

    def _turn(self, commands: list[HostCommand]) -> KVReport | None:
        """Pass commands on, collect finished I/O, start what follows. Returns what is new to the host."""
        with self._changed:
            for command in commands:
                self._handle(command)
            self._apply(self._connector.poll())
            self._connector.start_io()
            self._changed.notify_all()
            load = self._current_load()
            if not (self._events or self._to_resubmit) and load == self._reported:
                return None
            report = KVReport(events=self._events, given_up=self._to_resubmit, load=load)
            self._reported, self._events, self._to_resubmit = load, [], []
            return report

    # Inside, with the lock

    def _add(self, new: NewTransfer) -> None:
        spec = new.sampled.with_tokens(new.token_ids)
        name, spec = spec.request_id, msgspec.structs.replace(spec, request_id=new.request_id)
        request = Request.from_spec(spec, arrival=0, fingerprint=self._fingerprint)
        request.update_block_hashes(self._block_size)  # once, not at each chunk
        transfer = self._transfers[new.request_id] = _Transfer(request, name)
        if transfer.is_load:
            self._by_name[name] = transfer

    def _reserve(self, reservation: Reservation) -> None:
        transfer = self._transfers[reservation.request_id]
        transfer.block_ids = reservation.block_ids
        if (remote_kv := transfer.request.spec.remote_kv) is not None:
            transfer.request.deadline = time.monotonic() + remote_kv.reservation_s
        num_local_blocks = reservation.num_local_tokens // self._block_size
        self._events.append(ReservedEvent(transfer.name, reservation.num_local_tokens, num_local_blocks))
        if reservation.block_ids:
            self._connector.update_state_after_alloc(transfer.request, reservation.block_ids, num_local_blocks)
        else:
            self._loaded(KVLoadResult(reservation.request_id, reservation.num_local_tokens, 0, 0))

    def _progress(self, progress: Progress) -> None:
        transfer = self._transfers.get(progress.request_id)
        if transfer is None or transfer.finished is not None:
            return
        transfer.block_ids = progress.block_ids
        num_pages = -(-transfer.request.num_initial_tokens // self._block_size)
        if len(progress.block_ids) >= num_pages or not self._connector.needs_all_blocks:
            self._connector.request_progressed(transfer.request, progress.block_ids, progress.num_computed_tokens)

    def _finish(self, finished: Finished) -> None:
        transfer = self._transfers.get(finished.request_id)
        if transfer is None:
            return  # its end was in the last results, which vLLM had not read
        transfer.finished = finished
        transfer.request.finish_reason = finished.reason
        self._forget_name(transfer)
        transfer.num_users += self._connector.request_finished(transfer.request, finished.block_ids)
        self._release_if_unused(transfer)

    def _handle(self, command: HostCommand) -> None:
        match command:
            case Seed(name, token_ids):
                if (transfer := self._by_name.get(name)) is not None:
                    [transfer.seed] = token_ids
                    self._resume_if_ready(transfer)
            case KVProgress(request_id=name):
                if (transfer := self._by_name.get(name)) is not None:
                    progress = msgspec.structs.replace(command, request_id=transfer.request.request_id)
                    self._connector.handle(progress)
            case LeaseCommand():
                self._connector.handle(command)
            case Interrupt():
                self._interrupted_until_s = time.monotonic() + _INTERRUPTED_S

    def _apply(self, output: KVConnectorOutput) -> None:
        self._events += output.events
        for result in output.loaded:
            self._loaded(result)
        for freed_id in output.freed_request_ids:
            transfer = self._given_up.pop(freed_id, None) or self._transfers.get(freed_id)
            if transfer is not None:
                transfer.num_users -= 1
                self._release_if_unused(transfer)
        self._count(num_expired_leases=output.num_expired_leases)

    def _loaded(self, result: KVLoadResult) -> None:
        transfer = self._transfers.get(result.request_id)
        if transfer is None:
            return
        num_external, num_recomputed = result.num_external_tokens, result.num_recomputed_blocks
        self._count(num_external_tokens=num_external, num_recomputed_blocks=num_recomputed)
        self._events.append(LoadedEvent(transfer.name, num_external, num_recomputed, result.reason))
        if result.retained_id is not None:
            self._given_up[result.retained_id] = transfer
            transfer.num_users += 1
            self._to_resubmit.append(transfer.name)
            self._forget_name(transfer)
        else:
            transfer.result = result
            self._resume_if_ready(transfer)

    def _resume_if_ready(self, transfer: _Transfer) -> None:
        """A load has its KV, as far as it will come, and its seed: vLLM may compute it."""
        result = transfer.result
        if result is None or transfer.seed is None or transfer.finished is not None:
            return
        request = transfer.request
        self._results.seeds[request.request_id] = transfer.seed
        if transfer.block_ids:
            self._results.received.add(request.request_id)
            if result.num_verified_tokens < request.num_initial_tokens:
                first_bad = result.num_verified_tokens // self._block_size
                self._results.bad_block_ids.update(transfer.block_ids[first_bad:])
            self._connector.request_finished(request, transfer.block_ids)  # SchedulerHalf.finished announces no more
        self._remove(transfer)

    def _release_if_unused(self, transfer: _Transfer) -> None:
        if transfer.finished is None or transfer.num_users:
            return
        if transfer.finished.keeps_blocks:
            ended = self._results.received if transfer.is_load else self._results.sent
            ended.add(transfer.request.request_id)
        self._remove(transfer)

    def _remove(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.request.request_id]
        self._forget_name(transfer)

    def _forget_name(self, transfer: _Transfer) -> None:
        if self._by_name.get(transfer.name) is transfer:
            del self._by_name[transfer.name]

    def _current_load(self) -> KVLoad:
        ended = [transfer for transfer in self._transfers.values() if transfer.finished is not None]
        held = {block_id for transfer in ended for block_id in transfer.block_ids}
        quarantined = self._connector.num_quarantined_blocks
        return msgspec.structs.replace(
            self._counts,
            held_blocks=max(0, len(held) - quarantined),
            quarantined_blocks=quarantined,
            num_transfers=self._connector.num_transfers,
            kv_totals=self._connector.totals,
        )

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self._counts, name) + number for name, number in more.items()}
        self._counts = msgspec.structs.replace(self._counts, **counted)


def distinct(layers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each memory once: layers may share one."""
    return list({layer.data_ptr(): layer for layer in layers}.values())


def whole_blocks(layer: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """[num_blocks, elements per block] over the same memory. Where the attention kernel takes only smaller blocks, vLLM
    gives a layer several of these for each of its own. Raises EngineError where a block is not one piece."""
    if not layer.is_contiguous() or len(layer) % num_blocks:
        raise EngineError(
            f"KV of vLLM's shape {list(layer.shape)}, {num_blocks} blocks of {block_size} tokens, cannot be handed "
            "over: set engine.block_size (--block-size) to the size that the attention kernel takes, or "
            "transfer.connector (--kv-connector) to null"
        )
    return layer.view(num_blocks, -1)
