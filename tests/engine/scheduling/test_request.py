"""Which token ends a request, and what counts once."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.messages import EngineRequest, HoldKV
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request


@pytest.mark.parametrize(
    ("token", "num_output", "fields", "expected"),
    [
        (5, 3, {}, (None, None)),
        (1, 3, {}, ("stop", None)),
        (1, 3, {"ignore_eos": True}, (None, None)),
        (1, 3, {"ignore_eos": True, "stop_token_ids": (1,)}, ("stop", 1)),
        (7, 3, {"stop_token_ids": (6, 7)}, ("stop", 7)),
        (1, 3, {"min_tokens": 4}, (None, None)),
        (1, 4, {"min_tokens": 4}, ("stop", None)),
        (7, 3, {"min_tokens": 4, "stop_token_ids": (7,)}, (None, None)),
        (5, 16, {}, ("length", None)),
        (1, 16, {}, ("stop", None)),
        (1, 16, {"ignore_eos": True}, ("length", None)),
        (5, 20, {"max_tokens": None}, (None, None)),
        (5, 90, {"max_tokens": None}, ("length", None)),
    ],
)
def test_a_token_ends_the_output(
    token: int, num_output: int, fields: dict[str, Any], expected: tuple[Any, Any]
) -> None:
    spec = EngineRequest(
        request_id="r",
        prompt_token_ids=[0] * 10,
        output_token_ids=[0] * (num_output - 1) + [token],
        params=SamplingParams(**fields),
        eos_token_ids=(1, 2),
    )
    assert Request.from_spec(spec, arrival=0, fingerprint="f").check_stop(max_model_len=100) == expected


@pytest.mark.parametrize(("token", "expected"), [(1, ("stop", None)), (7, ("stop", 7)), (5, ("hand_over", None))])
def test_an_answer_that_its_first_token_ends_is_not_handed_over(token: int, expected: tuple[Any, Any]) -> None:
    spec = EngineRequest(
        request_id="r",
        prompt_token_ids=[0] * 10,
        params=SamplingParams(stop_token_ids=(7,)),
        eos_token_ids=(1, 2),
        hold_kv=HoldKV(transfer_id="t", lease_s=1.0),
    )
    assert Request.from_spec(spec, arrival=0, fingerprint="f").append([token], max_model_len=100) == expected


def test_the_time_in_the_queue_ends_with_the_first_step() -> None:
    spec = EngineRequest(request_id="r", prompt_token_ids=[0] * 10, params=SamplingParams())
    request = Request.from_spec(spec, arrival=0, fingerprint="f")
    request.begin()
    queued_s, request.arrived_s = request.queue_s, request.arrived_s - 100.0
    request.begin()
    assert request.queue_s == queued_s
