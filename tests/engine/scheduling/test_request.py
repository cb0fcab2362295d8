"""Which token ends a request."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.messages import EngineRequest
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
