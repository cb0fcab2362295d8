"""Which instances of the two pools can hand KV over to each other, and what is logged of those that cannot."""

from __future__ import annotations

import logging

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import instance_pb2
from router.pools.instance_info import InstanceInfo
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.waiting import until


async def test_incompatible_instances_are_named_and_never_paired(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    odd = FakeInstance("prefill", "odd", identity={"dtype": "bfloat16", "fingerprint": "f1"})
    with caplog.at_level(logging.WARNING, "router.pools.pool"):
        async with run(prefill=[odd]) as rig:
            answer = await rig.generate()
            assert answer.is_exactly(12)
            assert answer.trailers["tandem-disaggregated"] == "no"
            assert not odd.recorded("prefill")
    logged = [record.getMessage() for record in caplog.records if "differs" in record.getMessage()]
    assert logged == [
        "dtype differs between decode decode-0 (float32) and prefill odd (bfloat16): they will not be paired"
    ]


async def test_mismatches_of_processes_that_have_ended_are_forgotten(run: Run) -> None:
    odd = FakeInstance("prefill", "odd", identity={"dtype": "bfloat16", "fingerprint": "f1"})
    async with run(prefill=[odd]) as rig:
        for _ in range(3):
            await odd.replace()
            await until(
                lambda: [one.key.epoch for one in rig.app.pools.prefill.views() if one.out is None] == [odd.epoch]
            )
            (kinds,) = rig.app.pools._reported_mismatches
            assert [identity.fingerprint for identity, _ in kinds] == ["f1", "f0"]


async def test_two_kinds_that_cannot_be_paired_are_logged_once_however_many_instances_they_have(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    odd = [FakeInstance("prefill", f"odd-{n}", identity={"dtype": "bfloat16", "fingerprint": "f1"}) for n in range(3)]
    decode = [FakeInstance("decode", f"decode-{n}") for n in range(3)]
    with caplog.at_level(logging.WARNING, "router.pools.pool"):
        async with run(prefill=odd, decode=decode) as rig:
            await rig.until_ready(num_prefill=3, num_decode=3)
    assert sum("differs" in record.getMessage() for record in caplog.records) == 1


VLLM = "vllm 0.32.0, CPUModelRunner, CPU_ATTN, KV float32"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("tandem/1", VLLM),
        (VLLM, "tandem/1"),
        (VLLM, VLLM.replace("32", "33")),
        ("tandem/1", "tandem/2"),
    ],
)
async def test_pools_of_different_engines_or_versions_are_named_and_never_paired(
    run: Run, caplog: pytest.LogCaptureFixture, ours: str, theirs: str
) -> None:
    decode = FakeInstance("decode", "decode-0", identity={"engine": ours, "fingerprint": "f0"})
    prefill = FakeInstance("prefill", "prefill-0", identity={"engine": theirs, "fingerprint": "f1"})
    always = {"mode": "always"}
    with caplog.at_level(logging.WARNING, "router"):
        async with run(prefill=[prefill], decode=[decode], disaggregation=always) as rig:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rig.generate()
    message = f"no prefill instance is available: engine of prefill-0 is {theirs}, of decode-0 {ours}"
    assert message in str(refused.value.details())
    assert not prefill.recorded("prefill")
    assert not decode.recorded("decode")
    logged = [record.getMessage() for record in caplog.records]
    assert (
        f"engine differs between decode decode-0 ({ours}) and prefill prefill-0 ({theirs}): they will not be paired"
        in logged
    )


def test_an_instances_name_commands_no_terminal_and_fits_a_line() -> None:
    def named(instance_id: str) -> str:
        return InstanceInfo.from_wire(instance_pb2.GetInstanceInfoResponse(instance_id=instance_id)).instance_id

    assert named("décode-0") == "décode-0"
    assert named("decode\x1b]0;title\x07") == "decode\\x1b]0;title\\x07"
    assert named("decode-" + "9" * 5000) == "decode-" + "9" * 246


def test_instances_with_the_same_adapters_share_one_set_of_their_names() -> None:
    """Each request asks for the adapters of all instances: what they have in common is looked through once."""

    def adapters(*names: str) -> frozenset[str]:
        return InstanceInfo.from_wire(instance_pb2.GetInstanceInfoResponse(lora_adapters=names)).lora_adapters

    assert adapters("clerk", "poet") is adapters("clerk", "poet")
    assert adapters("clerk", "poet") == {"clerk", "poet"} != adapters("clerk")
