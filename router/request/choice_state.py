"""The state of one choice: the tokens emitted to the client, of which the router is the sole authority.

begin_attempt ─▶ accept … ─▶ handed_over (prefill's part is done) ─▶ accept … ─▶ finished
      ▲────────────── the attempt failed: another one goes on after the emitted ids ──────┘
      └─ a client whose router died begins with the ids that it has

Every chunk must continue exactly where the last one ended, in ids and in characters. A chunk of an earlier stream epoch
is stale and dropped; anything else that does not fit is a violation, which fails the call that sent it and emits
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.tandem.v1 import common_pb2
from router.pools.instance_info import Identity, InstanceKey, InstanceView
from router.request.generation_request import NO_OBJECTIVES, GenerationRequest, Objectives, to_wire
from router.request.request_log import NO_GAPS, TokenGaps

_PLACE = ("stream_epoch", "choice", "token_index", "text_offset")
"""The fields that say where a chunk continues."""
_REASON_NAMES = {number: name for name, number in common_pb2.FinishReason.items()}
_CLIENTS_REASONS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


def finish_reason(finish: common_pb2.Finish) -> str:
    """As OpenAI and vLLM write it: stop, length or abort."""
    return common_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def set_objectives(request: common_pb2.InstanceRequest, objectives: Objectives) -> None:
    """The times that count from the moment in which `request` is sent, and the pace."""
    request.ttft_s = objectives.ttft_s or 0.0
    request.begin_s = objectives.begin_s or 0.0
    request.itl_s = objectives.itl_s or 0.0


class StreamViolation(Exception):
    """A chunk that does not continue the stream; the text says which field and both values."""


@dataclass(slots=True, eq=False)
class Choice:
    """The one mutable record of a choice. Owned by its flow in router/dispatch/dispatcher.py."""

    request: GenerationRequest
    index: int
    stream_epoch: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    finished: bool = False
    aborted: bool = False
    handed_over: bool = False  # the prefill instance has done its part of this attempt
    _is_first_chunk: bool = False  # the next one is the first of its instance, which has the counts
    decode_key: InstanceKey | None = None
    prefill_key: InstanceKey | None = None
    identity: Identity | None = None  # of what computes it, here or at the router before; None: it has not begun
    preferred_identity: Identity | None = None
    """Of a choice without a token: what computes another one of its answer, so that no answer is of two models."""
    _num_before_attempt: int = 0
    num_cached_tokens: int | None = None  # of the prompt, where it was prefilled first; None: not known yet
    _num_stored_tokens: int = 0  # of these, those from a store
    now: Callable[[], float] = time.monotonic
    _first_token_s: float | None = None  # when this router accepted the first of its tokens
    _last_token_s: float = 0.0

    def __post_init__(self) -> None:
        resumed = self.request.resumed.get(self.index)
        if resumed is not None:
            self.token_ids, self.num_chars = list(resumed.token_ids), len(resumed.text)
            self.finished = resumed.is_finished

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Of the emitted ones, those that this router has emitted."""
        resumed = self.request.resumed.get(self.index)
        return len(self.token_ids) - (0 if resumed is None else len(resumed.token_ids))

    @property
    def gaps(self) -> TokenGaps:
        """Between the tokens that this router has emitted: fewer than two have none."""
        if self._first_token_s is None or self.num_generated < 2:
            return NO_GAPS
        return TokenGaps(self._last_token_s - self._first_token_s, self.num_generated - 1)

    @property
    def required_identity(self) -> Identity | None:
        """Once a token is emitted, only instances that compute the same may continue; None while any may."""
        return self.identity if self.token_ids else None

    @property
    def emitted_in_attempt(self) -> list[int]:
        return self.token_ids[self._num_before_attempt :]

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV an instance needs before it can go on."""
        return self.request.num_prompt_tokens + len(self.token_ids)

    def begin_attempt(
        self, objectives: Objectives = NO_OBJECTIVES, step_stretch: float | None = None
    ) -> common_pb2.InstanceRequest:
        """Raises the stream epoch, so that chunks of an earlier attempt are stale."""
        self.stream_epoch += 1
        self.handed_over = False
        self._is_first_chunk = True
        self._num_before_attempt = len(self.token_ids)
        request = self.request
        wire = common_pb2.InstanceRequest(
            request_id=f"{request.request_id}-{self.index}-{self.stream_epoch}",
            stream_epoch=self.stream_epoch,
            choice=self.index,
            prompt_token_ids=request.prompt_token_ids,
            emitted_token_ids=self.token_ids,
            sampling=to_wire(request.params),
            priority=request.instance_priority,
            cache_salt=request.cache_salt,
            lora=request.lora,
            step_stretch=step_stretch or 0.0,
            eos_token_ids=request.eos_token_ids,
        )
        set_objectives(wire, objectives)
        return wire

    @property
    def fingerprint(self) -> str:
        """Of the identity that computes it; empty before the first attempt."""
        return "" if self.identity is None else self.identity.fingerprint

    def at(self, decode: InstanceView, prefill: InstanceView | None) -> None:
        self.decode_key = decode.key
        self.prefill_key = prefill.key if prefill is not None else self.prefill_key
        self.identity = decode.info.identity

    def follow(self, first: Choice) -> None:
        """Prefers the instances of the request's first choice, which have just run the same prompt, and its weights."""
        self.decode_key, self.prefill_key = first.decode_key, first.prefill_key
        self.preferred_identity = first.identity

    def accept(self, chunk: common_pb2.TokenChunk) -> bool:
        """Whether to forward `chunk`; its tokens then count as emitted. Raises StreamViolation."""
        if chunk.stream_epoch < self.stream_epoch:
            return False
        token_ids, num_emitted = chunk.token_ids, len(self.token_ids)
        found = chunk.stream_epoch, chunk.choice, chunk.token_index, chunk.text_offset
        expected = self.stream_epoch, self.index, num_emitted, self.num_chars
        if found != expected:
            for check in zip(_PLACE, found, expected, strict=True):
                self._check(*check)
        request = self.request
        if chunk.logprobs or request.params.logprobs is not None:
            self._check_logprobs(chunk)
        if chunk.prompt_logprobs or not num_emitted:
            self._check_prompt_logprobs(chunk)
        if self.finished:
            raise StreamViolation("tokens after the finish")
        if num_emitted + len(token_ids) > request.max_tokens:
            raise StreamViolation(f"more than max_tokens={request.max_tokens} tokens")
        if self._is_first_chunk:
            self._take_counts(chunk)
        is_last = chunk.HasField("finish")
        if is_last:
            self._take_finish(chunk)
        if token_ids:
            self._note_time()
        self.token_ids.extend(token_ids)
        self.num_chars += len(chunk.text)
        if is_last and chunk.HasField("finish"):  # that of a hand-over was removed
            self._note_cached(chunk.finish.usage)
            self._complete_usage(chunk.finish.usage)
        return True

    def abort(self, text: str = "") -> common_pb2.TokenChunk:
        """Finishes the choice as aborted; returns its last chunk, with the `text` that is left of its tokens."""
        self.finished = self.aborted = True
        finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ABORT)
        self._complete_usage(finish.usage)
        return common_pb2.TokenChunk(
            stream_epoch=self.stream_epoch,
            choice=self.index,
            token_index=self.num_emitted,
            text_offset=self.num_chars,
            text=text,
            finish=finish,
        )

    def _note_time(self) -> None:
        self._last_token_s = self.now()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def _take_counts(self, chunk: common_pb2.TokenChunk) -> None:
        self._is_first_chunk = False
        if chunk.HasField("usage"):
            self._note_cached(chunk.usage)
            chunk.ClearField("usage")  # the client gets them with the finish

    def _take_finish(self, chunk: common_pb2.TokenChunk) -> None:
        reason = chunk.finish.reason
        if reason == common_pb2.FINISH_REASON_HAND_OVER:
            if not chunk.token_ids:
                raise StreamViolation("a hand-over without a token")
            self.handed_over = self._is_first_chunk = True
            self._note_cached(chunk.finish.usage)
            chunk.ClearField("finish")  # the client does not see hand-overs
        elif reason in _CLIENTS_REASONS:
            self.finished = True
        else:
            raise StreamViolation(f"the instance ended the choice: {_REASON_NAMES.get(reason, reason)}")

    def _note_cached(self, usage: common_pb2.Usage) -> None:
        if self.num_cached_tokens is None:
            self.num_cached_tokens, self._num_stored_tokens = usage.cached_tokens, usage.stored_tokens

    def _complete_usage(self, usage: common_pb2.Usage) -> None:
        """Usage of the whole choice, whichever instances shared it."""
        usage.prompt_tokens = self.request.num_prompt_tokens
        usage.completion_tokens = self.num_emitted
        usage.cached_tokens, usage.stored_tokens = self.num_cached_tokens or 0, self._num_stored_tokens

    def _check_logprobs(self, chunk: common_pb2.TokenChunk) -> None:
        """One position per id, each beginning with that id; none if the request has no `logprobs`."""
        is_requested = self.request.params.logprobs is not None
        self._check("number of logprobs", len(chunk.logprobs), len(chunk.token_ids) if is_requested else 0)
        for token_id, position in zip(chunk.token_ids, chunk.logprobs, strict=False):
            if not position.candidates:
                raise StreamViolation(f"no candidates for token id {token_id}")
            self._check("token id of the logprobs", position.candidates[0].token_id, token_id)

    def _check_prompt_logprobs(self, chunk: common_pb2.TokenChunk) -> None:
        """They come once, with the first token of the first choice."""
        is_due = self.request.params.prompt_logprobs is not None and self.index == 0 and not self.token_ids
        expected = self.request.num_prompt_tokens if is_due and chunk.token_ids else 0
        self._check("number of prompt_logprobs", len(chunk.prompt_logprobs), expected)
        for token_id, position in [*zip(self.request.prompt_token_ids, chunk.prompt_logprobs, strict=False)][1:]:
            if not position.candidates:
                raise StreamViolation(f"no candidates for prompt token id {token_id}")
            self._check("token id of the prompt_logprobs", position.candidates[0].token_id, token_id)

    def _check(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            raise StreamViolation(f"{name} is {found}, expected {expected}")
