"""What comes from the wire is checked once, and what passes arrives unchanged."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.messages import HoldKV, RemoteKV
from engine.sampling.params import SamplingParams
from instance import convert
from instance.convert import Limits
from protos.tandem.v1 import common_pb2, decode_pb2, prefill_pb2
from serving.errors import InvalidArgument, NotFound
from tandem.client.request import sampling_params
from tests.instance.rig import instance_request

LIMITS = Limits(
    vocab_size=480, max_model_len=256, eos_token_ids=(2,), max_requests=8, max_lease_s=30.0, max_reservation_s=20.0
)
IDS = st.lists(st.integers(0, 479), min_size=1, max_size=100)


def prefill(request: common_pb2.InstanceRequest, *, transfer_id: str = "t", lease_s: float = 2.0) -> convert.Choice:
    hand_over = prefill_pb2.HandOver(transfer_id=transfer_id, lease_s=lease_s)
    return convert.prefill_choice(prefill_pb2.PrefillRequest(request=request, hand_over=hand_over), LIMITS)


def decode(
    request: common_pb2.InstanceRequest, **transfer: Any
) -> tuple[convert.Choice, convert.TransferSource | None]:
    message = decode_pb2.DecodeStart(request=request)
    if transfer:
        message.transfer.MergeFrom(decode_pb2.TransferSource(**transfer))
    return convert.decode_choice(message, LIMITS)


@given(
    prompt=IDS,
    emitted=st.lists(st.integers(0, 479), max_size=100),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 7),
    priority=st.integers(-100, 100),
    temperature=st.floats(0.01, 2),
    stop=st.lists(st.text(min_size=1, max_size=20), max_size=4),
)
def test_what_is_in_range_arrives_unchanged(
    prompt: list[int],
    emitted: list[int],
    seed: int,
    epoch: int,
    choice: int,
    priority: int,
    temperature: float,
    stop: list[str],
) -> None:
    sampling = {"seed": seed, "max_tokens": 150, "temperature": temperature, "stop": stop}
    request = instance_request(
        prompt_token_ids=prompt,
        emitted_token_ids=emitted,
        stream_epoch=epoch,
        choice=choice,
        priority=priority,
        sampling=sampling,
    )
    received = common_pb2.InstanceRequest.FromString(request.SerializeToString())
    converted = prefill(received)
    got = converted.engine_request
    assert (converted.stream_epoch, converted.index, got.choice) == (epoch, choice, choice)
    assert (got.prompt_token_ids, got.output_token_ids) == (prompt, emitted)
    assert (got.seed, got.params.seed, got.priority) == (seed, seed, priority)
    assert (got.params.temperature, list(got.params.stop), got.params.max_tokens) == (temperature, stop, 150)
    assert got.eos_token_ids == (2,)
    assert got.hold_kv == HoldKV(transfer_id="t", lease_s=2.0)


@pytest.mark.parametrize(
    ("sent", "taken"), [([], (2,)), ([9, 3], (9, 3)), ([3, 3, 480, -1, 2**63 - 1], (3,)), ([480], ())]
)
def test_the_routers_eos_ids_end_a_choice_and_the_instances_own_where_it_has_none(
    sent: list[int], taken: tuple[int, ...]
) -> None:
    request = instance_request(eos_token_ids=sent)
    assert prefill(request).engine_request.eos_token_ids == taken
    assert decode(request)[0].engine_request.eos_token_ids == taken


def test_parameters_are_checked_against_the_routers_eos_ids() -> None:
    request = instance_request(eos_token_ids=[9], sampling={"ignore_eos": False, "min_tokens": 1})
    request.sampling.allowed_token_ids.ids.append(9)
    with pytest.raises(InvalidArgument, match="end the output"):
        prefill(request)
    request.sampling.allowed_token_ids.ids[:] = [2]
    assert prefill(request).engine_request.params.allowed_token_ids == (2,)


def test_what_changes_logits_and_asks_for_logprobs_arrives_unchanged() -> None:
    sampling = common_pb2.SamplingParams(
        seed=1,
        max_tokens=9,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logprobs=0,
        logit_bias={3: -1.5, 4: 100.0},
        allowed_token_ids=common_pb2.TokenIds(ids=[3, 4]),
        prompt_logprobs=2,
        bad_words=["x"],
        bad_word_ids=[common_pb2.TokenIds(ids=[5]), common_pb2.TokenIds(ids=[6, 7])],
    )
    request = instance_request()
    request.sampling.CopyFrom(sampling)
    params = prefill(request).engine_request.params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-0.5, 1.5, 1.25)
    assert (params.logprobs, params.logit_bias, params.allowed_token_ids) == (0, {3: -1.5, 4: 100.0}, (3, 4))
    assert (params.prompt_logprobs, params.bad_words, params.bad_word_ids) == (2, ("x",), ((5,), (6, 7)))


CONSTRAINTS: dict[str, Any] = {
    "json_object": True, "json_schema": '{"type": "null"}', "regex": "a", "choice": ("a", "b"),
    "grammar": 'root ::= "a"',
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_arrives_unchanged(name: str) -> None:
    value = CONSTRAINTS[name]
    request = instance_request()
    request.sampling.ignore_eos = False
    request.sampling.MergeFrom(sampling_params({name: value}))
    params = prefill(request).engine_request.params
    assert (getattr(params, name), params.constraint) == (value, SamplingParams(**{name: value}).constraint)


def test_a_constraint_that_cannot_be_followed_is_refused_at_the_instance_too() -> None:
    request = instance_request()
    request.sampling.ignore_eos = False
    request.sampling.json_schema = '{"not": {}}'
    with pytest.raises(InvalidArgument, match=r"request\.sampling\.json_schema: at /: not is not supported"):
        prefill(request)


@given(wrong=st.integers(-(2**63), -1) | st.integers(480, 2**63 - 1), place=st.integers(0, 9))
def test_an_id_out_of_range_is_refused_by_place_and_value(wrong: int, place: int) -> None:
    ids = list(range(10))
    ids[place] = wrong
    with pytest.raises(InvalidArgument, match=rf"prompt_token_ids\[{place}\]: is {wrong}; allowed: 0\.\.479"):
        prefill(instance_request(prompt_token_ids=ids))


def test_an_id_that_would_wrap_in_32_bits_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"emitted_token_ids\[0\]: is 4294967301"):
        prefill(instance_request(emitted_token_ids=[2**32 + 5]))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"request_id": ""}, "request.request_id"),
        ({"request_id": "two words"}, "request.request_id"),
        ({"request_id": "x" * 257}, "request.request_id"),
        ({"prompt_token_ids": []}, "request.prompt_token_ids"),
        ({"prompt_token_ids": [1] * 256}, "request.prompt_token_ids"),
        ({"emitted_token_ids": [1] * 32}, "request.sampling.max_tokens"),
        ({"choice": 8}, "request.choice"),
        ({"choice": -1}, "request.choice"),
        ({"stream_epoch": -1}, "request.stream_epoch"),
        ({"priority": 101}, "request.priority"),
        ({"cache_salt": "é" * 129}, "request.cache_salt"),
        ({"sampling": {"temperature": math.nan}}, "request.sampling.temperature"),
        ({"sampling": {"max_tokens": 0}}, "request.sampling.max_tokens"),
        ({"sampling": {"top_p": 0.0}}, "request.sampling.top_p"),
        ({"sampling": {"stop": [""]}}, "request.sampling.stop"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        prefill(instance_request(**fields))
    assert [violation.field for violation in caught.value.violations] == [names]


def test_a_seed_must_be_there() -> None:
    request = instance_request()
    request.sampling.ClearField("seed")
    with pytest.raises(InvalidArgument, match=r"sampling\.seed"):
        prefill(request)


def test_an_unknown_adapter_is_not_found() -> None:
    with pytest.raises(NotFound, match=r"request\.lora: this instance has no adapter 'poet'"):
        prefill(instance_request(lora="poet"))


def test_the_engine_gets_the_adapter() -> None:
    limits = dataclasses.replace(LIMITS, lora_adapters=frozenset({"poet"}))
    message = decode_pb2.DecodeStart(request=instance_request(lora="poet"))
    choice, _ = convert.decode_choice(message, limits)
    assert choice.engine_request.lora == "poet"


def test_a_prefill_hands_over() -> None:
    with pytest.raises(InvalidArgument, match=r"hand_over\.transfer_id: is ''"):
        convert.prefill_choice(prefill_pb2.PrefillRequest(request=instance_request()), LIMITS)


def test_absent_limits_take_the_instance_s_own() -> None:
    request = instance_request()
    request.sampling.ClearField("max_tokens")
    choice, source = decode(request, transfer_id="t", address="10.0.0.7:7000", instance_epoch="e")
    assert choice.engine_request.params.max_tokens == 246
    assert choice.engine_request.remote_kv == RemoteKV(transfer_id="t", reservation_s=20.0)
    assert source == convert.TransferSource("t", "10.0.0.7:7000", "e")


def test_a_longer_lease_than_ours_is_cut() -> None:
    assert prefill(instance_request(), lease_s=3000.0).engine_request.hold_kv == HoldKV(transfer_id="t", lease_s=30.0)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan, 1e9])
def test_a_duration_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match=r"hand_over\.lease_s"):
        prefill(instance_request(), lease_s=seconds)


@pytest.mark.parametrize("transfer_id", ["", "../../etc", "a b", "x" * 129, "naïve"])
def test_a_transfer_id_that_could_be_a_path_is_refused(transfer_id: str) -> None:
    with pytest.raises(InvalidArgument, match="transfer_id"):
        prefill(instance_request(), transfer_id=transfer_id)


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.7:7000", "prefill-0.prefill.ns.svc:50051", "[::1]:80", "localhost:1"),
        *("prefill-0.ns.svc.cluster.local.:7000", "[fe80::1%eth0]:80"),
    ],
)
def test_a_host_and_port_may_be_dialled(address: str) -> None:
    assert convert.dial_address("a", address) == address


OTHER_TARGETS = """unix:/run/x unix:///run/x:1 xds:///svc:1 dns:///host:80 host host:0 host:65536 host:x :80 -h:80
    ::1:80 ipv4:10.0.0.1:80,10.0.0.2:80 user@host:80 http://host:80 host:80/path
    .:80 host..:80 [fe80::1%]:80 [fe80::1%e/0]:80 [fe80::1%é]:80 host%eth0:80"""


@pytest.mark.parametrize("address", ["", "h\n:80", *OTHER_TARGETS.split()])
def test_anything_else_may_not(address: str) -> None:
    with pytest.raises(InvalidArgument):
        convert.dial_address("transfer.address", address)


def test_a_seed_that_ends_the_choice_or_is_empty_is_refused() -> None:
    choice, _ = decode(instance_request(emitted_token_ids=[5, 6], sampling={"max_tokens": 4}))
    assert convert.seed_ids(decode_pb2.DecodeSeed(token_ids=[7]), choice, LIMITS) == [7]
    for ids in ([], [7, 8], [480], [-1]):
        with pytest.raises(InvalidArgument):
            convert.seed_ids(decode_pb2.DecodeSeed(token_ids=ids), choice, LIMITS)


def test_objectives_arrive_and_zero_is_none() -> None:
    request = instance_request()
    engine_request = prefill(request).engine_request
    assert (engine_request.ttft_s, engine_request.itl_s, engine_request.begin_s) == (None, None, None)
    request.ttft_s, request.itl_s, request.begin_s = 0.5, 0.02, 5.5
    engine_request = prefill(request).engine_request
    assert (engine_request.ttft_s, engine_request.itl_s, engine_request.begin_s) == (0.5, 0.02, 5.5)


@pytest.mark.parametrize("stretch", [-1.0, 0.5, math.nan, math.inf, 1e308, 1e6 + 1])
def test_a_step_stretch_is_none_or_at_least_one_and_at_most_a_million(stretch: float) -> None:
    request = instance_request()
    assert prefill(request).engine_request.step_stretch is None
    for admitted in (1.0, 3.0, 1e6):
        request.step_stretch = admitted
        assert prefill(request).engine_request.step_stretch == admitted
    request.step_stretch = stretch
    with pytest.raises(InvalidArgument, match=r"request\.step_stretch"):
        prefill(request)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 3601.0])
def test_an_objective_out_of_range_is_named(seconds: float) -> None:
    request = instance_request()
    request.itl_s = seconds
    with pytest.raises(InvalidArgument, match=r"request\.itl_s"):
        prefill(request)
