"""Completions, and the check that every token arrived once and in order.

GenerateResponse … ──CompletionAssembler.add()──▶ Piece …    (what a stream yields)
                            └─finish()─▶ Completion (the whole)

The router numbers tokens and characters of every choice. The assembler counts them too and raises StreamError on the
first difference, so a caller never reads a gap or a repetition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from protos.tandem.v1 import common_pb2, generation_pb2
from tandem.client.errors import StreamError

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a choice: KV of `cached` ones was found where the prompt was prefilled, of which `stored` in a
    store; `external` ones came as KV from another instance, `recomputed` ones should have."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    recomputed_tokens: int = 0
    stored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position; `rank` 1 is the most likely token. Natural logarithm, of the model's raw logits:
    before biases, penalties and temperature."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes, or in a Piece the next part of one: a part without an id belongs to the call before
    it. Without a constraint `arguments` is what the model wrote, valid JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one choice in one message of the stream."""

    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    token_index: int = 0
    """Tokens of this choice before this piece."""
    finish_reason: str | None = None
    """stop, length, abort or error on the choice's last piece."""
    usage: Usage | None = None
    """On the choice's last piece."""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Of each token of `token_ids`, if requested: the token itself first, then the best others."""
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Of each prompt token, if requested, on the first piece of the first choice; () for the first token."""
    content: str = ""
    """`text` without reasoning and tool calls."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer to the prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop, length, abort or error."""
    usage: Usage
    stop_string: str | None = None
    """The string of `stop` that ended it."""
    stop_token_id: int | None = None
    """The id of `stop_token_ids` that ended it."""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """As in Piece, of all of `token_ids`."""
    content: str = ""
    """`text` without reasoning and tool calls."""
    reasoning: str = ""
    """What the model thought first, if it does."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of a chat with tools."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a router ran a request: its attempts in order; equal ones in a row appear once. Of an answer that went on
    at another router, what that one did."""

    prefill: tuple[str, ...] = ()
    """Names of the prefill instances; () where the decode instance also prefilled."""
    decode: tuple[str, ...] = ()
    """Names of the decode instances; () if the server did not say."""
    disaggregated: bool = False
    """Whether prefill and decode ran on two instances in the last attempt."""
    reason: str = ""
    """Why, in words."""

    @classmethod
    def from_trailers(cls, trailers: Iterable[tuple[str, str | bytes]]) -> Route:
        values = {key: value for key, value in trailers if isinstance(value, str)}
        prefill, decode = (
            tuple(filter(None, values.get(name, "").split(","))) for name in ("tandem-prefill", "tandem-decode")
        )
        is_split = values.get("tandem-disaggregated", "").endswith("yes")
        return cls(prefill, decode, is_split, values.get("tandem-reason", ""))


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `text`, `token_ids`, `finish_reason`, `usage`, `content` and `tool_calls` are those of the
    first choice."""

    request_id: str
    model: str
    seed: int | None
    """With which the same answer comes again: the request's, or the router's."""
    prompt_tokens: int
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Of each prompt token, if requested; () for the first, which nothing predicts."""
    route: Route = Route()
    """Which instances answered."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.choices[0].usage

    @property
    def content(self) -> str:
        return self.choices[0].content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls


@dataclass(slots=True)
class _ChoiceState:
    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0
    num_chars: int = 0
    epoch: int = 0
    has_calls: bool = False
    finish: common_pb2.Finish | None = None
    fingerprint: str = ""

    def add(self, response: generation_pb2.GenerateResponse) -> Piece:
        chunk, is_divided = response.tokens, response.HasField("delta")
        name = f"choice {chunk.choice}"
        if self.finish is not None:
            raise StreamError(f"{name} continued after its end")
        if chunk.token_index != self.num_tokens:
            raise StreamError(f"{name}: token_index {chunk.token_index} where {self.num_tokens} was expected")
        if chunk.text_offset != self.num_chars:
            raise StreamError(f"{name}: text_offset {chunk.text_offset} where {self.num_chars} was expected")
        if chunk.stream_epoch < self.epoch:
            raise StreamError(f"{name}: stream_epoch fell from {self.epoch} to {chunk.stream_epoch}")
        if chunk.logprobs and len(chunk.logprobs) != len(chunk.token_ids):
            raise StreamError(f"{name}: {len(chunk.logprobs)} logprobs for {len(chunk.token_ids)} token ids")
        calls = response.delta.tool_calls
        if calls and not (calls[0].id or self.has_calls):
            raise StreamError(f"{name}: a part of a call that has not begun: a router of another version?")
        self.finish = chunk.finish if chunk.HasField("finish") else None
        piece = Piece(
            text=chunk.text,
            token_ids=tuple(chunk.token_ids),
            choice=chunk.choice,
            token_index=chunk.token_index,
            finish_reason=None if self.finish is None else _REASONS.get(self.finish.reason, "unknown"),
            usage=None if self.finish is None else _usage(self.finish.usage),
            logprobs=_positions(chunk.logprobs),
            prompt_logprobs=_positions(chunk.prompt_logprobs),
            content=response.delta.content if is_divided else chunk.text,
            reasoning=response.delta.reasoning,
            tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in calls),
        )
        self.pieces.append(piece)
        self.num_tokens += len(piece.token_ids)
        self.num_chars += len(piece.text)
        self.epoch = chunk.stream_epoch
        self.has_calls = self.has_calls or bool(calls)
        self.fingerprint = self.fingerprint or response.fingerprint
        return piece

    def resumed(self, choice: int) -> generation_pb2.ResumedChoice:
        """As the next router needs it, whose stream epochs begin again."""
        self.epoch = 0
        token_ids = (token_id for piece in self.pieces for token_id in piece.token_ids)
        finished = self.finish is not None
        return generation_pb2.ResumedChoice(
            choice=choice, token_ids=token_ids, finished=finished, fingerprint=self.fingerprint
        )

    def finished(self, choice: int) -> Choice:
        finish = self.finish
        if finish is None:
            raise StreamError(f"choice {choice} ended after {self.num_tokens} tokens without a finish reason")
        return Choice(
            text="".join(piece.text for piece in self.pieces),
            token_ids=tuple(token_id for piece in self.pieces for token_id in piece.token_ids),
            finish_reason=_REASONS.get(finish.reason, "unknown"),
            usage=_usage(finish.usage),
            stop_string=finish.stop_string if finish.HasField("stop_string") else None,
            stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
            logprobs=tuple(position for piece in self.pieces for position in piece.logprobs),
            content="".join(piece.content for piece in self.pieces),
            reasoning="".join(piece.reasoning for piece in self.pieces),
            tool_calls=_whole_calls(part for piece in self.pieces for part in piece.tool_calls),
        )


def _whole_calls(parts: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for part in parts:
        if part.id:
            calls.append(part)
        else:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, calls[-1].arguments + part.arguments)
    return tuple(calls)


def _positions(positions: Iterable[common_pb2.TokenLogprobs]) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(
        tuple(TokenLogprob(item.token_id, item.logprob, item.rank) for item in position.candidates)
        for position in positions
    )


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(**{one.name: getattr(usage, one.name) for one in fields(Usage)})


class CompletionAssembler:
    """Checks the messages of one request and assembles its completion."""

    def __init__(self, num_choices: int = 1) -> None:
        self.route = Route()
        """Set when the call has ended."""
        self._num_choices = num_choices
        """As its caller wrote it; whether it is allowed is the router's to say."""
        self._choices: dict[int, _ChoiceState] = {}
        """Those that have begun."""
        self._first: generation_pb2.GenerateResponse | None = None
        self.num_pieces = 0

    def add(self, response: generation_pb2.GenerateResponse) -> Piece:
        """The piece of `response`; raises StreamError if it is not the next one of its choice."""
        if self._first is None:
            self._first = response
        elif response.model and response.prompt_tokens != self._first.prompt_tokens:
            before = f"{self._first.prompt_tokens} where the answer began"
            raise StreamError(
                f"the prompt has {response.prompt_tokens} tokens, {before}: a template with the date in it?"
            )
        choice = response.tokens.choice
        if not 0 <= choice < self._num_choices:
            raise StreamError(f"choice {choice} was not requested")
        piece = self._choices.setdefault(choice, _ChoiceState()).add(response)
        self.num_pieces += 1
        return piece

    @property
    def is_finished(self) -> bool:
        """Nothing more is to come."""
        return len(self._choices) == self._num_choices and all(one.finish is not None for one in self._choices.values())

    def resumed(self, request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
        """`request`, for a router that continues the answer behind what has come. Only once something has."""
        assert self._first is not None, "an answer that has not begun is requested again as it was"
        again = generation_pb2.GenerateRequest()
        again.CopyFrom(request)
        again.request_id = self._first.request_id  # by which its caller aborts it
        again.sampling.seed = self._first.seed
        again.resume.CopyFrom(
            generation_pb2.Resume(choices=[self._choices[index].resumed(index) for index in sorted(self._choices)])
        )
        return again

    def finish(self) -> Completion:
        """The whole answer; raises StreamError if a choice has no finish reason."""
        states = ((index, self._choices.get(index, _ChoiceState())) for index in range(self._num_choices))
        choices = tuple(state.finished(index) for index, state in states)
        first = self._first
        if first is None:
            raise StreamError("the stream was empty")
        return Completion(
            request_id=first.request_id,
            model=first.model,
            seed=first.seed if first.HasField("seed") else None,
            prompt_tokens=first.prompt_tokens,
            choices=choices,
            prompt_logprobs=tuple(position for piece in self._choices[0].pieces for position in piece.prompt_logprobs),
            route=self.route,
        )
