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
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.openmp import launcher
from engine.sampling.constraints import has_xgrammar
from engine.sampling.grammar import MASK_BITS, CompiledGrammar
from engine.sampling.sampler_kernels import exclude_address
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import LogitsRow

_TOKEN_S = 0.005
_FREE_S = 0.5
"""CPU time that a request's grammar may take in steps: for each sampled token, and beyond that until tokens that take
less have left as much. With an ambiguous grammar (`root ::= root root | "a"`) each token takes more than the one
before, and the streams of the batch wait for it."""
_STEP_S = 1.0
"""What all of them together may take in a step beyond `_TOKEN_S` for each: an engine that is silent for longer than
`core_silence_timeout_s` is unavailable."""
_SLOW_FOR = 64
"""Tokens for which a grammar does not look ahead after a token that took longer than `_TOKEN_S`; and steps for which
none does after one in which drafts lacked masks."""
_LOOKS_S = 0.02
"""CPU time in which all of them look ahead in a step, for tokens of drafts and for their masks each."""
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
        compiled = grammar.result()
        # Other stop tokens are text to the grammar, and end the output anywhere.
        ends = [*spec.eos_token_ids, *(token_id for token_id in stop_ids if token_id in compiled.textless_ids)]
        ends = ends or list(stop_ids)
        self._matcher = GrammarMatcher(compiled.compiled, override_stop_tokens=ends)
        self._never_ids = compiled.textless_ids.difference(ends)
        """The matcher admits none of them, and would write a line to stderr for each."""
        self._num_accepted = 0
        self._is_possible = True
        """The grammar allows the output as far as it is accepted, and has taken no more time than it may."""
        self.left_s = _FREE_S
        """CPU time that it may take beyond `_TOKEN_S` for each token."""
        self.replayed_s = 0.0
        """CPU time that `replay` has taken."""
        self._looks_from = 0
        """How many tokens have to be accepted before it looks ahead again."""
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
        self, row: LogitsRow, masks: npt.NDArray[np.int32], index: int, step_left_s: float = _STEP_S
    ) -> float:
        """Set `masks[index]` to the tokens that may follow the output; to none if the grammar forbids the output, or
        took too much time, of its own or of `step_left_s`. Returns the CPU time it took beyond that of its tokens."""
        before_s = self.left_s
        least_s = max(0.0, before_s - max(0.0, step_left_s))
        self._accept(self._new_ids(row.request), least_s=least_s - _TOKEN_S)
        begun_s = time.thread_time()
        self._fill(row, masks, index)
        self.left_s = min(_FREE_S, self.left_s + _TOKEN_S - (time.thread_time() - begun_s))
        if self.left_s < least_s:
            masks[index] = 0
        return max(0.0, before_s - self.left_s)

    def fill_draft(self, rows: Sequence[LogitsRow], masks: npt.NDArray[np.int32], first: int) -> int:
        """Set the masks from `first` on for `rows`, those behind each token of a draft, after `fill_mask`. Returns how
        many have theirs: those behind tokens that the grammar admits (`_ahead`)."""
        num_filled = 0
        for _ in self._ahead(rows[-1].drafted):
            self._fill(rows[num_filled], masks, first + num_filled)
            num_filled += 1
        return num_filled

    def num_admitted(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar admits behind the output (`_ahead`)."""
        new_ids = self._new_ids(request)
        return max(0, sum(1 for _ in self._ahead([*new_ids, *token_ids])) - len(new_ids))

    def _new_ids(self, request: Request) -> list[int]:
        return request.token_ids[request.num_prompt_tokens + self._num_accepted :]

    def _ahead(self, token_ids: Iterable[int]) -> Iterator[None]:
        """Advance over tokens that may come, one by one, in the time of one token, and then go back. What they take is
        not taken from the time of the request, so that drafts do not end it; one with a slow grammar has few."""
        num_accepted, run, begun_s = self._num_accepted, self._run, time.thread_time()
        is_able = self._is_possible and self.left_s == _FREE_S and num_accepted >= self._looks_from
        last_s = begun_s
        try:
            for token_id in token_ids if is_able else ():
                if last_s - begun_s > _TOKEN_S or self._matcher.is_terminated():
                    break
                if is_admitted := self._accept_one(token_id):
                    yield
                now_s = time.thread_time()
                if now_s - last_s > _TOKEN_S:
                    self._looks_from = num_accepted + _SLOW_FOR
                last_s = now_s
                if not is_admitted:
                    break
        finally:
            if self._num_accepted > num_accepted:
                self._matcher.rollback(self._num_accepted - num_accepted)
            self._num_accepted, self._run = num_accepted, run

    def _fill(self, row: LogitsRow, masks: npt.NDArray[np.int32], index: int) -> None:
        if not self._is_possible or self._matcher.is_terminated():  # by an output from elsewhere that has ended
            masks[index] = 0
            return
        self._matcher.fill_next_token_bitmask(masks, index)
        if self._whitespace is not None:
            self._whitespace.apply(masks[index], self._run, self._is_between_elements)
        if row.num_output_tokens < row.request.spec.params.min_tokens:
            _forbid(masks[index], row.request.spec.ending_token_ids)

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
        if token_id in self._never_ids or not self._matcher.accept_token(token_id):
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
        others.view(np.uint32)[token_id // MASK_BITS] &= ~np.uint32(1 << token_id % MASK_BITS)
    if others.any():
        mask[:] = others


class GrammarMasks:
    """The matchers of all constrained requests. Owned by the model runner.

    That of a request is made for its replay or at its first sampled token, kept through preemptions, and dropped with
    it.
    """

    def __init__(self) -> None:
        self._by_request: WeakKeyDictionary[Request, _RequestGrammar] = WeakKeyDictionary()
        self._tokens_s = self._masks_s = 0.0
        """CPU time of this step's looks ahead: for tokens of drafts, and for their masks."""
        self._num_paused = 0
        """Steps without looks ahead, from now on."""

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> set[int]:
        """Set the `logits` [len(rows), vocab] (float32) of tokens that a request's constraint excludes to -inf. Returns
        the indices of drafts' rows for which that is unknown, so that they must not be used."""
        constrained = [index for index, row in enumerate(rows) if row.request.grammar is not None]
        if not constrained:
            return set()
        masks = np.zeros((len(rows), -(-logits.shape[1] // MASK_BITS)), np.int32)
        heads = ((index, self._grammar_of(rows[index].request)) for index in constrained if not rows[index].drafted)
        unknown: set[int] = set()
        step_left_s = _STEP_S
        for index, grammar in sorted(heads, key=lambda one: -one[1].left_s):
            if step_left_s > 0 or grammar.left_s == _FREE_S:  # the others have no mask: that ends them
                step_left_s -= grammar.fill_mask(rows[index], masks, index, step_left_s)
            draft = list(takewhile(lambda row: row.drafted, islice(rows, index + 1, None)))
            num_filled = self._fill_draft(grammar, draft, masks, index + 1) if draft else 0
            unknown.update(range(index + 1 + num_filled, index + 1 + len(draft)))
        self._num_paused = _SLOW_FOR if self._masks_s >= _LOOKS_S else max(0, self._num_paused - 1)
        self._tokens_s = self._masks_s = 0.0
        masked = [index for index in constrained if index not in unknown]
        if logits.device.type == "cpu":
            _exclude(logits, masks, masked)
        else:
            _exclude_on_gpu(logits, masks, masked)
        return unknown

    def num_admitted(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many of these tokens the request's constraint, if it has one, admits behind its output; fewer where that
        takes long."""
        if request.grammar is None or not token_ids:
            return len(token_ids)
        if self._num_paused or self._tokens_s >= _LOOKS_S:
            return 0
        begun_s = time.thread_time()
        num_admitted = self._grammar_of(request).num_admitted(request, token_ids)
        self._tokens_s += time.thread_time() - begun_s
        return num_admitted

    def _fill_draft(
        self, grammar: _RequestGrammar, draft: Sequence[LogitsRow], masks: npt.NDArray[np.int32], first: int
    ) -> int:
        if self._masks_s >= _LOOKS_S:
            return 0
        begun_s = time.thread_time()
        num_filled = grammar.fill_draft(draft, masks, first)
        self._masks_s += time.thread_time() - begun_s
        return num_filled

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
        all_allowed = np.full((num_rows, -(-logits.shape[1] // MASK_BITS)), -1, np.int32)
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
    launcher(exclude_address())(1, arguments)
