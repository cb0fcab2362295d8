"""The masks that compiled constraints (grammar.py) put on the next tokens of requests.

    the output's ids ─▶ a matcher per request ─▶ a mask per row of logits ─▶ excluded tokens are -inf

The state of a matcher is a pure function of the request's output ids: a request that was preempted, handed over or
resumed elsewhere advances a new matcher over the ids emitted so far. The built-in engine does so before the request
enters, a part before each step (`GrammarMasks.replay`), vLLM's sampler in the first step that samples the request.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.constraints import has_xgrammar
from engine.sampling.grammar import CompiledGrammar
from engine.sampling.grammar_kernels import exclude_launcher
from engine.scheduling.request import Request

_BITS = 32
_TOKEN_S = 0.005
_FREE_S = 0.5
"""CPU time that a request's grammar may take in steps: for each sampled token, and beyond that until tokens that take
less have left as much. With an ambiguous grammar (`root ::= root root | "a"`) each token takes more than the one
before, and the streams of the batch wait for it."""
_STEP_S = 1.0
"""What all of them together may take in a step beyond `_TOKEN_S` for each: an engine that is silent for longer than
`core_silence_timeout_s` is unavailable."""
_REPLAYED_S = 0.0001
"""Time for each token that was emitted elsewhere, or whose client says so, that it leaves to no other."""
_KERNEL_VARIANTS = (1, 2, 16)
"""Numbers of rows, each of which has a kernel of its own: one, no multiple of 16, a multiple of 16."""


class _RequestGrammar:
    """One request's matcher: advanced over the output as far as it is known."""

    def __init__(self, request: Request, grammar: CompiledGrammar) -> None:
        from xgrammar import GrammarMatcher

        spec = request.spec
        stop_ids = spec.params.stop_token_ids
        self.ending_ids = (*spec.eos_token_ids, *stop_ids)
        """EOS and stop tokens without text end the grammar; others are text to it, and end the output anywhere."""
        compiled = grammar.result()
        ends = [*spec.eos_token_ids, *(token_id for token_id in stop_ids if token_id in compiled.textless_ids)]
        self._matcher = GrammarMatcher(compiled.compiled, override_stop_tokens=ends or list(stop_ids))
        self._num_accepted = 0
        self._is_possible = True
        """The grammar allows the output as far as it is accepted, and has taken no more time than it may."""
        self.left_s = _FREE_S
        """CPU time that it may take beyond `_TOKEN_S` for each token."""
        self.replayed_s = 0.0
        """CPU time that `replay` has taken."""
        self._whitespace = compiled.whitespace
        self._run = 0
        """White space at the end of the output, in characters."""

    def replay(self, request: Request, seconds: float) -> bool:
        """Accept the output that came with the request, for about so many seconds of CPU. True: no more is accepted."""
        begun_s = time.thread_time()
        is_done = self._accept(request.spec.output_token_ids[self._num_accepted :], seconds=seconds)
        self.replayed_s += time.thread_time() - begun_s
        return is_done

    def fill_mask(
        self, request: Request, masks: npt.NDArray[np.int32], row: int, step_left_s: float = _STEP_S
    ) -> float:
        """Set `masks[row]` to the tokens that may follow the output; to none if the grammar forbids the output, or took
        too much time, of its own or of `step_left_s`. Returns the CPU time that it took beyond that of its tokens."""
        before_s = self.left_s
        least_s = max(0.0, before_s - max(0.0, step_left_s))
        new_ids = request.token_ids[request.num_prompt_tokens + self._num_accepted :]
        self._accept(new_ids, least_s=least_s - _TOKEN_S)
        begun_s = time.thread_time()
        self._fill(request, masks, row)
        self.left_s = min(_FREE_S, self.left_s + _TOKEN_S - (time.thread_time() - begun_s))
        if self.left_s < least_s:
            masks[row] = 0
        return max(0.0, before_s - self.left_s)

    def _fill(self, request: Request, masks: npt.NDArray[np.int32], row: int) -> None:
        if not self._is_possible or self._matcher.is_terminated():  # by an output from elsewhere that has ended
            masks[row] = 0
            return
        self._matcher.fill_next_token_bitmask(masks, row)
        if self._whitespace is not None:
            self._whitespace.apply(masks[row], self._run, self._is_between_elements)
        if request.num_output_tokens < request.spec.params.min_tokens:
            _forbid(masks[row], self.ending_ids)

    def _accept(self, token_ids: Sequence[int], *, seconds: float = math.inf, least_s: float = 0.0) -> bool:
        """Advance over `token_ids` for about so many seconds of CPU, while it is possible and no less than `least_s` is
        left. False: the seconds are over."""
        begun_s = now_s = time.thread_time()
        for token_id in token_ids:
            if not self._is_possible:
                break
            if now_s - begun_s >= seconds:
                return False
            self._is_possible = self._accept_one(token_id)
            last_s, now_s = now_s, time.thread_time()
            self.left_s -= max(0.0, now_s - last_s - _REPLAYED_S)
            self._is_possible = self._is_possible and self.left_s >= least_s
        return True

    def _accept_one(self, token_id: int) -> bool:
        if not self._matcher.accept_token(token_id):
            return False
        self._num_accepted += 1
        if self._whitespace is not None:
            self._run = self._whitespace.run_after(self._run, token_id)
        return True

    def _is_between_elements(self) -> bool:
        """Of JSON: its white space may follow, which strings and literals do not admit, but no control character, which
        free text admits."""
        return self._accepts("\r\t") and not self._accepts("\x01")

    def _accepts(self, text: str) -> bool:
        accepted = self._matcher.accept_string(text)
        if accepted:
            self._matcher.rollback(1)
        return accepted


def _forbid(mask: npt.NDArray[np.int32], ending_ids: Iterable[int]) -> None:
    """Remove the tokens that would end the output before min_tokens, unless the grammar allows no others."""
    others = mask.copy()
    for token_id in ending_ids:
        others.view(np.uint32)[token_id // _BITS] &= ~np.uint32(1 << token_id % _BITS)
    if others.any():
        mask[:] = others


class GrammarMasks:
    """The matchers of all constrained requests. Owned by the model runner.

    That of a request is made for its replay or at its first sampled token, kept through preemptions, and dropped with
    it.
    """

    def __init__(self) -> None:
        self._by_request: WeakKeyDictionary[Request, _RequestGrammar] = WeakKeyDictionary()

    def apply(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Set the `logits` [len(requests), vocab] (float32) of tokens that a request's constraint excludes to -inf."""
        rows = [row for row, request in enumerate(requests) if request.grammar is not None]
        if not rows:
            return
        masks = np.zeros((len(requests), -(-logits.shape[1] // _BITS)), np.int32)
        grammars = sorted(((row, self._grammar_of(requests[row])) for row in rows), key=lambda one: -one[1].left_s)
        step_left_s = _STEP_S
        for row, grammar in grammars:
            if step_left_s > 0 or grammar.left_s == _FREE_S:  # the others have no mask: that ends them
                step_left_s -= grammar.fill_mask(requests[row], masks, row, step_left_s)
        if logits.device.type == "cpu":
            _exclude(logits, masks, rows)
        else:
            _exclude_on_gpu(logits, masks, rows)

    def replay(self, requests: Iterable[Request], seconds: float) -> list[Request]:
        """Advance the matchers of `requests` over the outputs that came with them, for about so many seconds of CPU;
        those that have taken the least first. Returns the ones with nothing left to do."""
        until_s = time.thread_time() + seconds
        done = []
        for request in sorted(requests, key=lambda one: self._grammar_of(one).replayed_s):
            left_s = until_s - time.thread_time()
            if left_s <= 0:
                break
            if self._grammar_of(request).replay(request, left_s):
                done.append(request)
        return done

    def _grammar_of(self, request: Request) -> _RequestGrammar:
        found = self._by_request.get(request)
        if found is None:
            assert request.grammar is not None
            found = self._by_request[request] = _RequestGrammar(request, request.grammar)
        return found


def warm_up_masks(logits: Tensor) -> None:
    """Compiles on a GPU what masks `logits` [any, vocab] of constrained requests, before the first of them comes."""
    if logits.device.type == "cpu" or not has_xgrammar():
        return
    for num_rows in _KERNEL_VARIANTS:
        all_allowed = np.full((num_rows, -(-logits.shape[1] // _BITS)), -1, np.int32)
        _exclude_on_gpu(logits.new_zeros((num_rows, logits.shape[1])), all_allowed, range(num_rows))


def _exclude_on_gpu(logits: Tensor, masks: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(masks).to(logits.device), indices=list(rows))


def _exclude(logits: Tensor, masks: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
    if logits.stride(1) != 1:
        contiguous = logits.contiguous()
        _exclude(contiguous, masks, rows)
        logits.copy_(contiguous)
        return
    row_bytes = logits.stride(0) * logits.element_size()
    addresses = np.array([(logits.data_ptr() + row * row_bytes, masks[row].ctypes.data) for row in rows], np.int64)
    arguments = (ctypes.c_int64 * 4)(0, len(rows), logits.shape[1], addresses.ctypes.data)
    exclude_launcher()(1, arguments)
