"""Invalid requests over the wire to a real router: the exact status, and no effect on other requests.

The router's own test has the whole table; here a real stack is behind it.
"""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest

from protos.tandem.v1 import generation_pb2
from tandem import Client, TandemError
from tests.lively import random_prompt
from tests.system.rig import Rig
from tests.system.stacks import on_stack

pytestmark = on_stack("pair shared_storage")
METHOD = "/tandem.v1.GenerationService/Generate"


def raw_call(address: str, message: bytes) -> grpc.StatusCode:
    """Sends raw bytes; returns the status of the answer."""
    with grpc.insecure_channel(address) as opened:
        channel: Any = opened  # the bytes need not be a message
        call = channel.unary_stream(METHOD)(message, timeout=30)
        try:
            list(call)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"\xff\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x1a\x05ab", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x1a\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT),
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(5 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["not protobuf", "cut short", "not UTF-8", "empty", "5 MiB"],
)
def test_bytes_that_are_no_request(rig: Rig, message: bytes, status: grpc.StatusCode) -> None:
    assert raw_call(rig.address, message) is status


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("", {}, ["empty"]),
        ([-1], {}, ["token_ids[0]", "-1"]),
        ("hi", {"temperature": float("nan")}, ["temperature", "nan"]),
        ("hi", {"request_id": "a\nb"}, ["request_id"]),
    ],
)
def test_a_wrong_field_is_named_with_its_value(rig: Rig, prompt: Any, options: Any, named: list[str]) -> None:
    with Client(rig.address) as client, pytest.raises(TandemError) as caught:
        client.generate(prompt, **options)
    assert caught.value.status == "INVALID_ARGUMENT", caught.value
    for word in named:
        assert word in caught.value.message
    assert len(caught.value.message) <= 512


def test_a_model_that_is_not_served_is_not_found(rig: Rig) -> None:
    with Client(rig.address) as client, pytest.raises(TandemError, match=r"NOT_FOUND.*gpt-9"):
        client.generate("hi", model="gpt-9", max_tokens=1)


def test_a_running_answer_is_not_disturbed_by_invalid_requests(rig: Rig, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 80)
    sampling: Any = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    with Client(rig.address) as client:
        alone = client.generate(prompt, **sampling)
        stream = client.stream(prompt, **sampling)
        ids = list(next(stream).token_ids)
        for _ in range(20):
            raw_call(rig.address, generation_pb2.GenerateRequest().SerializeToString())
            raw_call(rig.address, b"\xff\xff")
        for piece in stream:
            ids += piece.token_ids
    assert tuple(ids) == alone.token_ids
