"""The half of the connector in vLLM's scheduler: which requests move KV, and in which blocks.

    hold_kv    waiting ─▶ computed, step by step: Progress ─▶ ended: Finished ─▶ (the worker half) ─▶ blocks freed
                              └─preempted─▶ no longer handed over
    remote_kv  waiting ─blocks allocated: Reservation─▶ loading ─▶ (the worker half: KV and seed) ─▶ a plain prompt
                  └─all KV cached here: Reservation without blocks ─▶ (the worker half: seed) ─▶ a plain prompt

A request with remote_kv comes with one token too many, a placeholder for the seed: the token that the prefill instance
samples. vLLM waits for the KV of all tokens before it, and computes the seed itself once it is in its place.

Decides only; it runs in vLLM's scheduler, which an exception would end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.core.messages import FinishReason
from vllm_engine.kv_messages import Finished, KVSeeds, KVStep, NewTransfer, Progress, Reservation
from vllm_engine.requests import SampledRequest, hands_over, read_sampled_request


@dataclass(slots=True)
class _Moving:
    """A request whose KV moves. `request` is vLLM's."""

    request: Any
    sampled: SampledRequest
    num_tokens: int
    """Tokens whose KV moves."""
    is_known: bool = False
    """The worker half knows it."""
    has_blocks: bool = False
    """KV is being loaded into its blocks."""
    num_progressed: int = 0
    has_ended: bool = False
    """There is nothing left to do but to compute it."""

    @property
    def is_load(self) -> bool:
        return self.sampled.request.remote_kv is not None

    @property
    def token_ids(self) -> list[int]:
        tokens: list[int] = self.request.prompt_token_ids[: self.num_tokens]
        return tokens


class SchedulerHalf:
    """Belongs to vLLM's scheduler. Request ids are vLLM's."""

    def __init__(self, *, block_size: int, num_blocks: int, max_model_len: int, max_held_fraction: float) -> None:
        self._block_size = block_size
        self._max_held_blocks = max_held_fraction * num_blocks
        self._max_model_len = max_model_len
        self._moving: dict[str, _Moving] = {}
        self._num_held: dict[str, int] = {}
        """Blocks of requests that have ended, until the worker half needs them no more."""
        self._step = KVStep()

    def add(self, request: Any) -> None:
        """A new request."""
        sampled = read_sampled_request(request.sampling_params)
        if sampled is None:
            return
        if sampled.request.hold_kv is not None:
            self._moving[request.request_id] = _Moving(request, sampled, request.num_prompt_tokens)
        elif sampled.request.remote_kv is not None:
            self._moving[request.request_id] = _Moving(request, sampled, request.num_prompt_tokens - 1)

    def num_external_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens to load past those that are cached here. None: the request must wait."""
        moving = self._moving.get(request.request_id)
        if moving is None or moving.has_ended:
            return 0
        if not moving.is_load:
            return 0 if self._may_hold(moving.num_tokens) else None
        if num_computed_tokens < moving.num_tokens and not moving.is_known:
            return moving.num_tokens - num_computed_tokens
        if not moving.is_known:
            self._reserve(moving, [], moving.num_tokens)
        return None  # only the seed is missing

    def blocks_allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        moving = self._moving.get(request.request_id)
        if moving is not None and moving.is_load and not moving.is_known and num_external_tokens:
            num_blocks = -(-moving.num_tokens // self._block_size)
            self._reserve(moving, block_ids[:num_blocks], moving.num_tokens - num_external_tokens)

    def take_step(self, output: Any) -> KVStep:
        """What the worker half has to know of the step that was just scheduled."""
        for request_id in output.preempted_req_ids or ():
            moving = self._moving.get(request_id)
            if moving is not None and not moving.is_load and moving.is_known and not moving.has_ended:
                moving.has_ended = True
                self._step.preempted.append(request_id)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            moving = self._moving.get(request_id)
            if moving is not None and not moving.is_load and not moving.has_ended:
                self._progress(moving, moving.request.num_computed_tokens + num_tokens, output)
        self._step.is_empty = not output.total_num_scheduled_tokens
        step, self._step = self._step, KVStep()
        return step

    def take_results(self, seeds: KVSeeds | None, sent_ids: set[str], received_ids: set[str]) -> None:
        """The worker half's answer to a step, before vLLM uses it."""
        for request_id, token_id in (seeds.token_ids if seeds is not None else {}).items():
            moving = self._moving.get(request_id)
            if moving is not None:
                _place_seed(moving.request, token_id)
                moving.has_ended = True
        for request_id in sent_ids | received_ids:
            self._num_held.pop(request_id, None)

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """The request has ended. True: its blocks stay until the worker half names it as sent or received."""
        moving = self._moving.pop(request.request_id, None)
        if moving is None or moving.has_ended or (moving.is_load and not moving.is_known):
            return False
        keeps_blocks = moving.is_known and (not moving.is_load or moving.has_blocks)
        self._introduce(moving)  # the reader of a hand-over that never began gets the reason
        reason = self._reason(moving)
        self._step.finished.append(Finished(request.request_id, block_ids, reason, keeps_blocks))
        if keeps_blocks and not moving.is_load:
            self._num_held[request.request_id] = len(block_ids)
        return keeps_blocks

    # Inside

    def _may_hold(self, num_tokens: int) -> bool:
        """Transfers hold at most a fraction of the blocks, so that running requests are not starved."""
        num_held = sum(self._num_held.values())
        return not num_held or num_held + -(-num_tokens // self._block_size) <= self._max_held_blocks

    def _introduce(self, moving: _Moving) -> None:
        if not moving.is_known:
            moving.is_known = True
            self._step.new.append(NewTransfer(moving.request.request_id, moving.sampled, moving.token_ids))

    def _reserve(self, moving: _Moving, block_ids: list[int], num_local_tokens: int) -> None:
        self._introduce(moving)
        moving.has_blocks = bool(block_ids)
        self._step.reserved.append(Reservation(moving.request.request_id, block_ids, num_local_tokens))

    def _progress(self, moving: _Moving, num_computed_tokens: int, output: Any) -> None:
        num_tokens = min(num_computed_tokens, moving.num_tokens)
        if num_tokens < moving.num_tokens and num_tokens // self._block_size == moving.num_progressed:
            return
        moving.num_progressed = num_tokens // self._block_size
        [block_ids] = output.kv_connector_block_state.get_block_ids(moving.request.request_id)
        self._introduce(moving)
        self._step.progressed.append(Progress(moving.request.request_id, block_ids, num_tokens))

    def _reason(self, moving: _Moving) -> FinishReason:
        request = moving.request
        reason = str(request.get_finished_reason())
        if reason == "length" and hands_over(moving.sampled, request.num_tokens, self._max_model_len):
            return "hand_over"
        return "stop" if reason == "stop" else "length" if reason == "length" else "abort"


def _place_seed(request: Any, token_id: int) -> None:
    """Replace the placeholder in vLLM's request, and in the hash of its last block if that is full."""
    request.prompt_token_ids[-1] = token_id
    request._all_token_ids[-1] = token_id
    del request.block_hashes[-1:]
    request.update_block_hashes()
