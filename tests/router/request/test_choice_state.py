"""The router is the sole authority on which tokens have been emitted."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from engine.sampling.params import SamplingParams
from instance.convert import MAX_DURATION_S
from protos.tandem.v1 import common_pb2
from router.picking.settings import DisaggregationSettings, SloSettings
from router.request.choice_state import Choice, StreamViolation
from router.request.generation_request import GenerationRequest, from_wire, to_wire
from tests.sampling_fields import a_value_of


def choice(max_tokens: int = 10, **params: Any) -> Choice:
    request = GenerationRequest("l", "r", "m", (1, 2, 3), SamplingParams(max_tokens=max_tokens, **params))
    begun = Choice(request, index=1)
    begun.begin_attempt()
    return begun


def chunk(*ids: int, text: str = "", reason: Any = None, **fields: Any) -> common_pb2.TokenChunk:
    made = common_pb2.TokenChunk(**{"stream_epoch": 1, "choice": 1, **fields}, token_ids=ids, text=text)
    if reason is not None:
        made.finish.reason = reason
    return made


def test_ids_and_characters_are_counted() -> None:
    begun = choice()
    assert begun.accept(chunk(7, 8, text="aé"))
    assert begun.accept(chunk(9, token_index=2, text_offset=2, text="🙂"))
    assert (begun.token_ids, begun.num_chars) == ([7, 8, 9], 3)


def test_gaps_are_those_from_the_choices_own_first_token_to_its_last() -> None:
    begun, now_s = choice(), 5.0
    begun.now = lambda: now_s
    assert begun.gaps == (0.0, 0)
    begun.accept(chunk(7, text="a"))
    assert begun.gaps == (0.0, 0)
    now_s = 6.0
    begun.accept(chunk(8, 9, token_index=1, text_offset=1))
    assert begun.gaps == (1.0, 2)
    now_s = 60.0
    begun.accept(chunk(token_index=3, text_offset=1, text="rest", reason=common_pb2.FINISH_REASON_STOP))
    assert begun.gaps == (1.0, 2), "held-back text is no token"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (chunk(9, token_index=2, text_offset=1), "token_index is 2, expected 1"),
        (chunk(9, token_index=0, text_offset=1), "token_index is 0, expected 1"),
        (chunk(9, token_index=1, text_offset=0), "text_offset is 0, expected 1"),
        (chunk(9, token_index=1, text_offset=1, choice=0), "choice is 0, expected 1"),
        (chunk(9, token_index=1, text_offset=1, stream_epoch=2), "stream_epoch is 2, expected 1"),
        (chunk(*range(10), token_index=1, text_offset=1), "more than max_tokens=10"),
        (chunk(token_index=1, text_offset=1, reason=common_pb2.FINISH_REASON_HAND_OVER), "without a token"),
        (chunk(9, token_index=1, text_offset=1, reason=common_pb2.FINISH_REASON_ERROR), "ended the choice"),
        (chunk(9, token_index=1, text_offset=1, reason=common_pb2.FINISH_REASON_ABORT), "ended the choice"),
        (chunk(9, token_index=1, text_offset=1, reason=99), "ended the choice: 99"),  # of a later version
    ],
)
def test_what_does_not_continue_the_stream_emits_nothing(wrong: common_pb2.TokenChunk, says: str) -> None:
    begun = choice()
    begun.accept(chunk(7, text="a"))
    with pytest.raises(StreamViolation, match=says):
        begun.accept(wrong)
    assert (begun.token_ids, begun.num_chars, begun.finished) == ([7], 1, False)


def with_logprobs(made: common_pb2.TokenChunk, *token_ids: int) -> common_pb2.TokenChunk:
    """`made` with a position for each of `token_ids`, as first candidate; -1 stands for a position without any."""
    for token_id in token_ids:
        position = made.logprobs.add()
        if token_id >= 0:
            position.candidates.add(token_id=token_id, logprob=-0.5, rank=1)
            position.candidates.add(token_id=99, logprob=-1.5, rank=2)
    return made


def test_logprobs_run_parallel_to_the_ids() -> None:
    begun = choice(logprobs=1)
    assert begun.accept(with_logprobs(chunk(7, 8), 7, 8))
    assert begun.accept(chunk(token_index=2, text="only text"))
    assert begun.accept(
        with_logprobs(chunk(9, token_index=2, text_offset=9, reason=common_pb2.FINISH_REASON_LENGTH), 9)
    )
    assert (begun.token_ids, begun.finished) == ([7, 8, 9], True)


@pytest.mark.parametrize(
    ("is_asked", "wrong", "says"),
    [
        (True, chunk(7), "number of logprobs is 0, expected 1"),
        (True, with_logprobs(chunk(7, 8), 7), "number of logprobs is 1, expected 2"),
        (True, with_logprobs(chunk(7), 7, 8), "number of logprobs is 2, expected 1"),
        (True, with_logprobs(chunk(7, 8), 8, 7), "token id of the logprobs is 8, expected 7"),
        (True, with_logprobs(chunk(7), -1), "no candidates for token id 7"),
        (False, with_logprobs(chunk(7), 7), "number of logprobs is 1, expected 0"),
    ],
)
def test_logprobs_that_do_not_fit_emit_nothing(is_asked: bool, wrong: common_pb2.TokenChunk, says: str) -> None:
    begun = choice(logprobs=0) if is_asked else choice()
    with pytest.raises(StreamViolation, match=says):
        begun.accept(wrong)
    assert begun.token_ids == []


def with_prompt_logprobs(made: common_pb2.TokenChunk, *token_ids: int | None) -> common_pb2.TokenChunk:
    for token_id in token_ids:
        position = made.prompt_logprobs.add()
        if token_id is not None:
            position.candidates.add(token_id=token_id, logprob=-0.5, rank=1)
    return made


def test_prompt_logprobs_come_once_with_the_first_token_of_the_first_choice() -> None:
    begun = choice(prompt_logprobs=0)
    begun.index = 0
    assert begun.accept(with_prompt_logprobs(chunk(7, choice=0), None, 2, 3))
    assert begun.accept(chunk(8, choice=0, token_index=1))
    begun.begin_attempt()
    assert begun.accept(chunk(9, choice=0, token_index=2, stream_epoch=2))
    assert choice(prompt_logprobs=0).accept(chunk(7)), "a second choice brings none"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (chunk(7, choice=0), "number of prompt_logprobs is 0, expected 3"),
        (with_prompt_logprobs(chunk(7, choice=0), None, 2), "number of prompt_logprobs is 2, expected 3"),
        (with_prompt_logprobs(chunk(7, choice=0), None, 3, 2), "token id of the prompt_logprobs is 3, expected 2"),
        (with_prompt_logprobs(chunk(7, choice=0), None, None, 3), "no candidates for prompt token id 2"),
        (with_prompt_logprobs(chunk(choice=0), None, 2, 3), "number of prompt_logprobs is 3, expected 0"),
    ],
)
def test_prompt_logprobs_that_do_not_fit_emit_nothing(wrong: common_pb2.TokenChunk, says: str) -> None:
    begun = choice(prompt_logprobs=0)
    begun.index = 0
    with pytest.raises(StreamViolation, match=says):
        begun.accept(wrong)
    assert begun.token_ids == []


def test_an_earlier_epoch_is_dropped_and_the_next_attempt_gets_the_emitted_ids() -> None:
    begun = choice()
    begun.accept(chunk(7, text="a"))
    request = begun.begin_attempt()
    assert (request.stream_epoch, list(request.emitted_token_ids), request.request_id) == (2, [7], "r-1-2")
    assert not begun.accept(chunk(8, token_index=1, text_offset=1))
    assert begun.emitted_in_attempt == []
    assert begun.accept(chunk(8, token_index=1, text_offset=1, stream_epoch=2))
    assert begun.emitted_in_attempt == [8]


def test_nothing_follows_a_finish() -> None:
    begun = choice()
    begun.accept(chunk(7, reason=common_pb2.FINISH_REASON_STOP))
    with pytest.raises(StreamViolation, match="after the finish"):
        begun.accept(chunk(8, token_index=1))


def test_usage_counts_every_token_once_and_the_first_prefills_cache() -> None:
    begun = choice()
    first = chunk(7, reason=common_pb2.FINISH_REASON_HAND_OVER)
    first.finish.usage.CopyFrom(common_pb2.Usage(cached_tokens=2, stored_tokens=1))
    begun.accept(first)
    assert not first.HasField("finish")
    last = chunk(8, token_index=1, reason=common_pb2.FINISH_REASON_LENGTH)
    last.finish.usage.CopyFrom(
        common_pb2.Usage(prompt_tokens=4, completion_tokens=1, cached_tokens=3, external_tokens=1)
    )
    begun.accept(last)
    assert last.finish.usage == common_pb2.Usage(
        prompt_tokens=3, completion_tokens=2, cached_tokens=2, external_tokens=1, stored_tokens=1
    )


def counting(made: common_pb2.TokenChunk, **counts: int) -> common_pb2.TokenChunk:
    """`made` with the counts that an instance sends with its first chunk."""
    made.usage.CopyFrom(common_pb2.Usage(**counts))
    return made


def test_what_the_first_attempt_found_cached_counts_however_it_ends() -> None:
    begun = choice()
    first = counting(chunk(7), cached_tokens=2, stored_tokens=1)
    assert begun.accept(first)
    assert (begun.num_cached_tokens, first.HasField("usage")) == (2, False)
    begun.begin_attempt()
    second = counting(chunk(8, token_index=1, stream_epoch=2), cached_tokens=3)
    assert begun.accept(second)
    assert not second.HasField("usage")
    last = chunk(9, token_index=2, stream_epoch=2, reason=common_pb2.FINISH_REASON_LENGTH)
    last.finish.usage.CopyFrom(common_pb2.Usage(cached_tokens=3))
    begun.accept(last)
    assert last.finish.usage == common_pb2.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2, stored_tokens=1)


def test_the_counts_of_the_decode_instance_do_not_reach_the_client() -> None:
    begun = choice()
    begun.accept(chunk(7, reason=common_pb2.FINISH_REASON_HAND_OVER))
    second = counting(chunk(8, token_index=1), cached_tokens=3)
    assert begun.accept(second)
    assert (begun.num_cached_tokens, second.HasField("usage")) == (0, False)


def test_an_aborted_choice_keeps_its_counts_and_invents_none() -> None:
    begun = choice()
    assert begun.abort().finish.usage == common_pb2.Usage(prompt_tokens=3)
    assert begun.num_cached_tokens is None
    begun = choice()
    begun.accept(counting(chunk(7), cached_tokens=2, stored_tokens=1))
    assert begun.abort().finish.usage == common_pb2.Usage(
        prompt_tokens=3, completion_tokens=1, cached_tokens=2, stored_tokens=1
    )


def test_sampling_parameters_survive_the_way_to_the_instance() -> None:
    params = SamplingParams(
        n=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=2**64 - 1, stop=("a", "b"), stop_token_ids=(4,),
        ignore_eos=True, max_tokens=9, min_tokens=2, include_stop_str_in_output=True, skip_special_tokens=False,
        presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5, logprobs=0, prompt_logprobs=2,
        logit_bias={3: -1.0}, allowed_token_ids=(1, 2), bad_words=("x",),
        bad_word_ids=((5,), (6, 7)),
    )  # fmt: skip
    wire = to_wire(params)
    assert not wire.HasField("n")
    wire.n = 3
    assert from_wire(wire, {}) == params


NOT_FOR_INSTANCES = {"n", "best_of"}
"""Fields that the router answers for itself."""


@pytest.mark.parametrize("name", sorted(set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - NOT_FOR_INSTANCES))
def test_no_field_of_the_message_is_lost_on_the_way_to_the_instance(name: str) -> None:
    """One that `_SCALARS` or `_LISTS` lacks would be ignored without an error."""
    message = common_pb2.SamplingParams(**{name: a_value_of(name)})
    assert getattr(to_wire(from_wire(message, {})), name) == getattr(message, name)


@pytest.mark.parametrize(
    "constraint",
    [{"json_object": True}, {"json_schema": "{}"}, {"regex": "a"}, {"choice": ("a", "b")}, {"grammar": "root ::= [a]"}],
)
def test_a_constraint_survives_the_way_to_the_instance(constraint: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=None, **constraint)
    assert from_wire(to_wire(params), {}) == params


def test_values_of_the_request_override_the_models_defaults() -> None:
    wire = common_pb2.SamplingParams(temperature=0.0)
    params = from_wire(wire, {"temperature": 0.7, "top_k": 5})
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 5, None)


def test_an_attempt_carries_what_is_left_of_the_objectives() -> None:
    slo = SloSettings(ttft_ms=500, itl_ms=20)
    request = choice().begin_attempt(slo.objectives(waited_s=0.2, late_wait_s=5.0, is_first=False))
    assert (request.ttft_s, request.itl_s, request.begin_s) == (pytest.approx(0.3), 0.02, pytest.approx(5.3))
    late = choice().begin_attempt(slo.objectives(waited_s=9.0, late_wait_s=5.0, is_first=False))
    assert 0 < late.ttft_s <= 0.001, "late, not without an objective"
    assert late.begin_s == pytest.approx(5.0, abs=0.01), "after a failed attempt it may wait as long again"
    for waited_s, begin_s in ((0.2, 5.3), (4.9, 0.6), (9.0, 0.5)):
        first = choice().begin_attempt(slo.objectives(waited_s, late_wait_s=5.0, is_first=True))
        assert first.begin_s == pytest.approx(begin_s), (
            "the wait for admission counts, one for an instance may be longer"
        )
    without = choice().begin_attempt(SloSettings().objectives(waited_s=9.0, late_wait_s=5.0, is_first=False))
    assert (without.ttft_s, without.itl_s, without.begin_s) == (0.0, 0.0, 0.0)


def test_no_objective_and_no_wait_is_longer_than_instances_accept() -> None:
    slo = SloSettings(ttft_ms=3_600_000)
    request = choice().begin_attempt(slo.objectives(waited_s=0.0, late_wait_s=math.inf, is_first=True))
    assert (request.ttft_s, request.begin_s) == (MAX_DURATION_S, MAX_DURATION_S)
    for name in ("lease_s", "reservation_s"):
        DisaggregationSettings.model_validate({name: MAX_DURATION_S})
        with pytest.raises(ValidationError, match=name):
            DisaggregationSettings.model_validate({name: MAX_DURATION_S + 1})
