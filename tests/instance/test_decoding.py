"""Decode calls that violate the protocol are rejected before they reach the core."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from engine.core.messages import AbortRequests, Seed
from protos.tandem.v1 import decode_pb2
from tests.instance.rig import Decoding, Rig, instance_request, refusal


@pytest.mark.parametrize(
    "first",
    [
        decode_pb2.DecodeRequest(),
        decode_pb2.DecodeRequest(seed=decode_pb2.DecodeSeed(token_ids=[1])),
        decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart()),
        decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=instance_request(prompt_token_ids=[2**40]))),
        decode_pb2.DecodeRequest(
            start=decode_pb2.DecodeStart(
                request=instance_request(),
                transfer=decode_pb2.TransferSource(transfer_id="t1", address="unix:/run/secret", reservation_s=1),
            )
        ),
    ],
)
async def test_a_malformed_start_is_an_invalid_argument(decode: Rig, first: decode_pb2.DecodeRequest) -> None:
    async def requests() -> AsyncIterator[decode_pb2.DecodeRequest]:
        yield first

    error = await refusal(decode.decode.Decode(requests()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not decode.core.commands


async def test_a_stream_that_ends_without_its_seed_is_an_invalid_argument(decode: Rig, prefill: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decoding.call.done_writing()
    assert (await refusal(decoding.call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await decode.core.wait_for(AbortRequests) == AbortRequests(["r1"])


@pytest.mark.parametrize("ids", [[], [480], [1] * 32])
async def test_a_wrong_seed_is_an_invalid_argument(decode: Rig, prefill: Rig, ids: list[int]) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decoding.seed(*ids)
    assert (await refusal(decoding.call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not decode.core.of(Seed)
    assert await decode.core.wait_for(AbortRequests) == AbortRequests(["r1"])
