"""A call belongs to the process that was picked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import common_pb2
from router.dispatch.instance_call import DecodeCall
from router.pools.in_flight import InFlightCalls
from router.pools.instance import ExpectedInstance
from router.pools.instance_info import InstanceKey
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.resilience.retry import CallFailed

PICKED = InstanceKey("a:1", "e1")


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_call_whose_process_has_ended_before_it_was_sent_is_not_sent(is_replaced: bool) -> None:
    channel = SimpleNamespace()  # of which nothing is used
    instance = SimpleNamespace(calls=InFlightCalls(), key=PICKED, expected=ExpectedInstance("decode"), channel=channel)
    choice = Choice(GenerationRequest("l", "r", "m", (1, 2, 3), SamplingParams(max_tokens=5)), 0)
    async with DecodeCall(cast("Any", instance), PICKED, choice, cast("Any", None)) as call:
        if is_replaced:
            instance.key = InstanceKey("a:1", "e2")
        else:
            call.instance_ended("its process has ended")
        with pytest.raises(CallFailed) as raised:
            call.start(common_pb2.InstanceRequest())
    assert (raised.value.kind, raised.value.death) == ("broken", None)
