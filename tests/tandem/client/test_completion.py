"""The client's own check: a token that is missing, repeated or out of order is an error, never a wrong text."""

from __future__ import annotations

import pytest

from protos.tandem.v1 import common_pb2, generation_pb2
from tandem.client.completion import CompletionAssembler, TokenLogprob, ToolCall
from tandem.client.errors import StreamError


def message(
    token_index: int,
    text: str,
    *,
    text_offset: int,
    ids: tuple[int, ...] = (7,),
    choice: int = 0,
    epoch: int = 0,
    finish: int | None = None,
) -> generation_pb2.GenerateResponse:
    chunk = common_pb2.TokenChunk(
        choice=choice, token_index=token_index, token_ids=ids, text=text, text_offset=text_offset, stream_epoch=epoch
    )
    if finish is not None:
        chunk.finish.reason = finish  # type: ignore[assignment]
        chunk.finish.usage.completion_tokens = token_index + len(ids)
    return generation_pb2.GenerateResponse(request_id="r", tokens=chunk, seed=5, prompt_tokens=3, model="demo")


STOP = common_pb2.FINISH_REASON_STOP


def test_pieces_are_put_together_in_order() -> None:
    assembler = CompletionAssembler()
    pieces = [
        assembler.add(message(0, "Grüße", text_offset=0)),
        assembler.add(message(1, "", text_offset=5, ids=(8, 9))),
        assembler.add(message(3, " 🚲", text_offset=5, ids=(10,), finish=STOP)),
    ]
    completion = assembler.finish()
    assert completion.text == "Grüße 🚲" == "".join(piece.text for piece in pieces)
    assert completion.token_ids == (7, 8, 9, 10)
    assert completion.finish_reason == "stop"
    assert completion.usage.completion_tokens == 4
    assert (completion.request_id, completion.seed, completion.prompt_tokens) == ("r", 5, 3)


def test_calls_are_put_together_and_parted_from_the_text() -> None:
    assembler = CompletionAssembler()
    first, second = message(0, "Hm.<call", text_offset=0), message(1, ">…", text_offset=8, finish=STOP)
    first.delta.content, first.delta.reasoning = "Hm.", "Well"
    first.delta.tool_calls.add(index=0, id="a", name="add", arguments='{"x"')
    second.delta.tool_calls.add(index=0, arguments=": 1}")
    second.delta.tool_calls.add(index=1, id="b", name="add", arguments="{}")
    pieces = [assembler.add(first), assembler.add(second)]
    assert pieces[1].tool_calls == (ToolCall("", "", ": 1}"), ToolCall("b", "add", "{}"))
    completion = assembler.finish()
    assert (completion.text, completion.content) == ("Hm.<call>…", "Hm.")
    assert completion.choices[0].reasoning == "Well"
    assert completion.tool_calls == (ToolCall("a", "add", '{"x": 1}'), ToolCall("b", "add", "{}"))


def test_a_part_of_a_call_that_has_not_begun_is_an_error() -> None:
    """Where an answer goes on at a router of another version, which takes the call's beginning for delivered."""
    assembler = CompletionAssembler()
    assembler.add(message(0, "<call", text_offset=0))
    second = message(1, ">…", text_offset=5, finish=STOP)
    second.delta.tool_calls.add(index=0, arguments=": 1}")
    with pytest.raises(StreamError, match="choice 0: a part of a call that has not begun"):
        assembler.add(second)


def test_logprobs_go_along_with_their_tokens() -> None:
    first, last = message(0, "a", text_offset=0, ids=(7, 8)), message(2, "b", text_offset=1, ids=(9,), finish=STOP)
    for response in (first, last):
        for token_id in response.tokens.token_ids:
            position = response.tokens.logprobs.add()
            position.candidates.add(token_id=token_id, logprob=-token_id / 8, rank=2)
            position.candidates.add(token_id=5, logprob=-0.25, rank=1)
    first.tokens.prompt_logprobs.add()
    first.tokens.prompt_logprobs.add().candidates.add(token_id=3, logprob=-2.0, rank=7)
    assembler = CompletionAssembler()
    pieces = [assembler.add(first), assembler.add(last)]
    expected = ((), (TokenLogprob(3, -2.0, 7),))
    assert [assembler.finish().prompt_logprobs, *(piece.prompt_logprobs for piece in pieces)] == [
        expected,
        expected,
        (),
    ]
    assert [len(piece.logprobs) for piece in pieces] == [2, 1]
    [choice] = assembler.finish().choices
    assert choice.logprobs == pieces[0].logprobs + pieces[1].logprobs
    best = TokenLogprob(5, -0.25, 1)
    assert choice.logprobs == tuple((TokenLogprob(one, -one / 8, 2), best) for one in (7, 8, 9))


def test_logprobs_of_another_number_of_tokens_are_an_error() -> None:
    response = message(0, "a", text_offset=0, ids=(7, 8))
    response.tokens.logprobs.add().candidates.add(token_id=7)
    with pytest.raises(StreamError, match="1 logprobs for 2 token ids"):
        CompletionAssembler().add(response)


def test_choices_grow_side_by_side() -> None:
    assembler = CompletionAssembler(2)
    assembler.add(message(0, "a", text_offset=0, choice=1))
    assembler.add(message(0, "b", text_offset=0, choice=0, finish=STOP))
    assembler.add(message(1, "c", text_offset=1, choice=1, finish=STOP))
    assert [choice.text for choice in assembler.finish().choices] == ["b", "ac"]


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (message(2, "b", text_offset=1), "token_index 2 where 1 was expected"),
        (message(0, "b", text_offset=1), "token_index 0 where 1 was expected"),
        (message(1, "b", text_offset=0), "text_offset 0 where 1 was expected"),
        (message(1, "b", text_offset=2), "text_offset 2 where 1 was expected"),
        (message(1, "b", text_offset=1, epoch=1), "stream_epoch fell from 2 to 1"),
        (message(0, "b", text_offset=0, choice=1), "choice 1 was not requested"),
        (message(0, "b", text_offset=0, choice=-1), "choice -1 was not requested"),
    ],
)
def test_a_gap_a_repeat_or_a_stale_epoch_is_an_error(second: generation_pb2.GenerateResponse, what: str) -> None:
    assembler = CompletionAssembler()
    assembler.add(message(0, "a", text_offset=0, epoch=2))
    with pytest.raises(StreamError, match=what):
        assembler.add(second)


def test_a_choice_that_never_begins_is_an_error() -> None:
    assembler = CompletionAssembler(2)
    assembler.add(message(0, "a", text_offset=0, choice=1, finish=STOP))
    assert not assembler.is_finished
    with pytest.raises(StreamError, match="choice 0 ended after 0 tokens without a finish reason"):
        assembler.finish()


def test_an_absurd_number_of_choices_costs_no_memory() -> None:
    """The router rejects it, when it gets it."""
    assembler = CompletionAssembler((1 << 32) - 1)
    assembler.add(message(0, "a", text_offset=0, choice=(1 << 31) - 1, finish=STOP))
    assert not assembler.is_finished
    with pytest.raises(StreamError, match="choice 0 ended after 0 tokens"):
        assembler.finish()


def test_nothing_may_follow_the_end() -> None:
    assembler = CompletionAssembler()
    assembler.add(message(0, "a", text_offset=0, finish=STOP))
    with pytest.raises(StreamError, match="continued after its end"):
        assembler.add(message(1, "b", text_offset=1))


def test_a_stream_that_just_stops_is_an_error() -> None:
    assembler = CompletionAssembler()
    assembler.add(message(0, "a", text_offset=0))
    with pytest.raises(StreamError, match="without a finish reason"):
        assembler.finish()
    with pytest.raises(StreamError):
        CompletionAssembler().finish()
