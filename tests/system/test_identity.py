"""A reader whose model differs from that of the instance that holds KV is rejected; the error names the field.

The test plays the router and a reader: it has a prompt computed and held, and attaches to the transfer.
"""

from __future__ import annotations

import queue
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from engine.identity import ModelIdentity
from kv_transfer.transfer.client import (
    MAX_PROTOCOL_VERSION,
    MIN_PROTOCOL_VERSION,
    identity_from_proto,
    identity_to_proto,
)
from protos.tandem.v1 import (
    common_pb2,
    instance_pb2,
    instance_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.engine_under_test import BLOCK_SIZE
from tests.lively import random_prompt
from tests.system.stacks import Stack, on

LENGTH = 3 * BLOCK_SIZE + 5
TIMEOUT_S = 20.0
DIFFERENT = {
    "engine": "vllm 0.32.0",
    "weights_digest": "0" * 64,
    "config_digest": "1" * 64,
    "tokenizer_digest": "2" * 64,
    "dtype": "bfloat16",
    "block_size": 32,
    "layout_version": 99,
    "layout_digest": "3" * 64,
    "fingerprint": "4" * 64,
}

Open = kv_transfer_pb2.AttachOpen


class Holder:
    """A prefill instance, and one prompt that it has computed and holds for its reader."""

    def __init__(self, channel: grpc.Channel, prompt: list[int]) -> None:
        aio: Any = channel  # the stubs are typed for the asyncio channel alone
        self._attach: Any = kv_transfer_pb2_grpc.KvTransferServiceStub(aio)
        instance: Any = instance_pb2_grpc.InstanceServiceStub(aio)
        prefill: Any = prefill_pb2_grpc.PrefillServiceStub(aio)
        info = instance.GetInstanceInfo(instance_pb2.GetInstanceInfoRequest(), timeout=TIMEOUT_S)
        self.identity: ModelIdentity = identity_from_proto(info.identity)
        self.transfer_id = uuid.uuid4().hex
        self.open = Open(
            transfer_id=self.transfer_id,
            instance_epoch=info.instance_epoch,
            identity=info.identity,
            min_protocol_version=MIN_PROTOCOL_VERSION,
            max_protocol_version=MAX_PROTOCOL_VERSION,
        )
        request = common_pb2.InstanceRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(temperature=0.0, seed=7, max_tokens=8),
        )
        hand_over = prefill_pb2.HandOver(transfer_id=self.transfer_id, lease_s=TIMEOUT_S)
        start = prefill_pb2.PrefillRequest(request=request, hand_over=hand_over)
        *_, last = prefill.Prefill(start, timeout=TIMEOUT_S)
        assert last.tokens.finish.reason == common_pb2.FINISH_REASON_HAND_OVER

    def attach(self, opened: Open) -> list[kv_transfer_pb2.AttachResponse]:
        """The responses that a reader gets until all pages are there; then it releases."""
        requests: queue.Queue[kv_transfer_pb2.AttachRequest | None] = queue.Queue()
        requests.put(kv_transfer_pb2.AttachRequest(open=opened))
        responses = []
        try:
            for response in self._attach.Attach(iter(requests.get, None), timeout=TIMEOUT_S):
                responses.append(response)
                if response.HasField("complete"):
                    release = kv_transfer_pb2.AttachRelease(loaded=True)
                    requests.put(kv_transfer_pb2.AttachRequest(release=release))
                    requests.put(None)
        finally:
            requests.put(None)
        return responses

    def with_identity(self, **fields: object) -> Open:
        """The opening message of a reader that differs in these fields, and therefore in its fingerprint."""
        values = {name: getattr(self.identity, name) for name in self.identity.__struct_fields__}
        values = {**values, "fingerprint": "", **fields}
        opened = Open()
        opened.CopyFrom(self.open)
        opened.identity.CopyFrom(identity_to_proto(ModelIdentity(**values)))
        return opened


@contextmanager
def holder(stack: Stack, prompt: list[int]) -> Iterator[Holder]:
    with grpc.insecure_channel(stack.rig.stack.instances["prefill-0"]) as channel:
        yield Holder(channel, prompt)


def rejected(attach: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Status and text of the error."""
    with pytest.raises(grpc.RpcError) as caught:
        attach()
    error: Any = caught.value
    return error.code(), error.details()


@on("shared_storage", "nixl")
def test_a_reader_is_rejected_for_each_field_that_differs_and_served_when_none_does(
    stack: Stack, prompts: random.Random
) -> None:
    with holder(stack, random_prompt(prompts, LENGTH)) as held:
        assert DIFFERENT.keys() == set(held.identity.__struct_fields__), "a field of the identity is not tried here"
        for field, other in DIFFERENT.items():
            status, text = rejected(lambda: held.attach(held.with_identity(**{field: other})))  # noqa: B023
            assert status is grpc.StatusCode.FAILED_PRECONDITION
            assert field in text
            assert str(other) in text
            assert str(getattr(held.identity, field)) in text
        assert stack.settled()["prefill-0"].num_transfers == 1, "a rejected reader has ended the transfer"
        *_, complete = held.attach(held.open)
        assert complete.complete.num_tokens == LENGTH


@on("shared_storage")
def test_a_reader_of_another_process_or_protocol_is_rejected(stack: Stack, prompts: random.Random) -> None:
    with holder(stack, random_prompt(prompts, LENGTH)) as held:
        stale, newer = Open(), Open()
        stale.CopyFrom(held.open)
        stale.instance_epoch = "of the process before"
        status, text = rejected(lambda: held.attach(stale))
        assert (status, "restarted" in text) == (grpc.StatusCode.NOT_FOUND, True)
        newer.CopyFrom(held.open)
        newer.min_protocol_version = newer.max_protocol_version = MAX_PROTOCOL_VERSION + 1
        status, text = rejected(lambda: held.attach(newer))
        assert (status, "protocol_version" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        held.attach(held.open)
