"""Conversion between protobuf and the engine's types, with validation: nothing behind this module checks again.

A wrong field raises `InvalidArgument` with the field's name in the message. Conversion to protobuf does not fail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from google.protobuf.message import Message

from engine.core.messages import EngineRequest, FinishReason, HoldKV, RemoteKV
from engine.errors import InvalidRequest, shown
from engine.sampling.params import MAX_CHOICES, SamplingParams, validate
from protos.tandem.v1 import common_pb2, decode_pb2, prefill_pb2
from serving.errors import NotFound, invalid_argument

MAX_SALT_BYTES = 256
MAX_DURATION_S = 3600.0
MAX_STEP_STRETCH = 1e6
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
_TRANSFER_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

# A DNS name, an IPv4 address or an IPv6 address in brackets, and a port. No schemes: peers choose the address, and it
# is dialled from inside our network.
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?"
_IPV6 = r"\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,16})?\]"
_ADDRESS = re.compile(f"(?:{_NAME}|{_IPV6}):([0-9]{{1,5}})", re.ASCII)

FINISH_REASONS: dict[FinishReason, common_pb2.FinishReason.ValueType] = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORT,
    "hand_over": common_pb2.FINISH_REASON_HAND_OVER,
    "error": common_pb2.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this instance's requests, from the engine core's info and the settings."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """Of this instance's model folder, for requests that have none."""
    max_requests: int
    max_lease_s: float
    max_reservation_s: float
    lora_adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    stream_epoch: int
    index: int
    engine_request: EngineRequest

    @property
    def request_id(self) -> str:
        return self.engine_request.request_id


@dataclass(frozen=True, slots=True)
class TransferSource:
    """The transfer that a decode request's KV comes from."""

    transfer_id: str
    address: str
    instance_epoch: str


def prefill_choice(request: prefill_pb2.PrefillRequest, limits: Limits) -> Choice:
    """The choice of a Prefill call, whose KV is handed over."""
    lease_s = duration_s("hand_over.lease_s", request.hand_over.lease_s, limits.max_lease_s)
    hold_kv = HoldKV(transfer_id=transfer_id("hand_over", request.hand_over.transfer_id), lease_s=lease_s)
    return _choice(request.request, limits, hold_kv=hold_kv)


def decode_choice(start: decode_pb2.DecodeStart, limits: Limits) -> tuple[Choice, TransferSource | None]:
    """The choice of a Decode call, and the transfer that its KV comes from, if any (`remote_kv` is set)."""
    if not start.HasField("transfer"):
        return _choice(start.request, limits), None
    source = TransferSource(
        transfer_id=transfer_id("transfer", start.transfer.transfer_id),
        address=dial_address("transfer.address", start.transfer.address),
        instance_epoch=start.transfer.instance_epoch,
    )
    reservation_s = duration_s("transfer.reservation_s", start.transfer.reservation_s, limits.max_reservation_s)
    remote_kv = RemoteKV(transfer_id=source.transfer_id, reservation_s=reservation_s)
    return _choice(start.request, limits, remote_kv=remote_kv), source


def _choice(
    request: common_pb2.InstanceRequest,
    limits: Limits,
    *,
    hold_kv: HoldKV | None = None,
    remote_kv: RemoteKV | None = None,
) -> Choice:
    if not _REQUEST_ID.fullmatch(request.request_id):
        problem = f"is {shown(request.request_id)}"
        raise invalid_argument("request.request_id", problem, "1..256 printable ASCII characters without spaces")
    _in_range("request.stream_epoch", request.stream_epoch, 0, 2**63 - 1)
    _in_range("request.choice", request.choice, 0, MAX_CHOICES - 1)
    _in_range("request.priority", request.priority, -100, 100)
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise invalid_argument("request.cache_salt", "is too long", f"at most {MAX_SALT_BYTES} bytes")
    if request.lora and request.lora not in limits.lora_adapters:
        raise NotFound(f"request.lora: this instance has no adapter {shown(request.lora)}")
    prompt = token_ids("request.prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    emitted = token_ids("request.emitted_token_ids", request.emitted_token_ids, limits.vocab_size)
    if not prompt:
        raise invalid_argument("request.prompt_token_ids", "is empty", "at least one token")
    _check_length(len(prompt), len(emitted), None, limits.max_model_len)
    if request.eos_token_ids:
        # Each once, without those that this model cannot sample.
        sampled = (token_id for token_id in dict.fromkeys(request.eos_token_ids) if 0 <= token_id < limits.vocab_size)
        limits = replace(limits, eos_token_ids=tuple(sampled))
    params = sampling_params(request.sampling, limits, len(prompt))
    _check_length(len(prompt), len(emitted), params.max_tokens, limits.max_model_len)
    engine_request = EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        output_token_ids=emitted,
        params=params,
        eos_token_ids=limits.eos_token_ids,
        seed=request.sampling.seed,
        choice=request.choice,
        priority=request.priority,
        cache_salt=request.cache_salt,
        lora=request.lora,
        ttft_s=checked_seconds("request.ttft_s", request.ttft_s) or None,
        begin_s=checked_seconds("request.begin_s", request.begin_s) or None,
        itl_s=checked_seconds("request.itl_s", request.itl_s) or None,
        step_stretch=_step_stretch(request.step_stretch),
        hold_kv=hold_kv,
        remote_kv=remote_kv,
    )
    return Choice(request.stream_epoch, request.choice, engine_request)


def seed_ids(seed: decode_pb2.DecodeSeed, choice: Choice, limits: Limits) -> list[int]:
    """The ids of a Seed: at least one, and not so many that the choice has ended."""
    ids = token_ids("seed.token_ids", seed.token_ids, limits.vocab_size)
    if not ids:
        raise invalid_argument("seed.token_ids", "is empty", "the ids that prefill emitted, at least one")
    request = choice.engine_request
    num_output_tokens = len(request.output_token_ids) + len(ids)
    _check_length(len(request.prompt_token_ids), num_output_tokens, request.params.max_tokens, limits.max_model_len)
    return ids


def token_ids(field: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    """`ids` as a list, each in 0..vocab_size-1."""
    checked = list(ids)
    if checked and not (min(checked) >= 0 and max(checked) < vocab_size):
        index, wrong = next((i, one) for i, one in enumerate(checked) if not 0 <= one < vocab_size)
        raise invalid_argument(f"{field}[{index}]", f"is {wrong}", f"0..{vocab_size - 1}")
    return checked


def sampling_params(message: common_pb2.SamplingParams, limits: Limits, num_prompt_tokens: int) -> SamplingParams:
    """The validated parameters of one choice, with `max_tokens` filled in. The seed is required."""
    if not message.HasField("seed"):
        raise invalid_argument(
            "request.sampling.seed", "is missing", "0..2^64-1: the router draws one for clients without"
        )
    given: dict[str, Any] = {"max_tokens": None}
    for descriptor, value in message.ListFields():
        if descriptor.name in ("n", "best_of"):  # the router has split the request into choices
            continue
        if descriptor.name == "allowed_token_ids":
            value = tuple(value.ids)
        elif descriptor.name == "choice":
            value = tuple(value.texts)
        elif descriptor.name == "bad_word_ids":
            value = tuple(tuple(sequence.ids) for sequence in value)
        elif descriptor.name == "logit_bias":
            value = dict(value)
        elif not isinstance(value, bool | int | float | str):
            value = tuple(value)
        given[descriptor.name] = value
    try:
        return validate(
            SamplingParams(**given),
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            num_prompt_tokens=num_prompt_tokens,
            eos_token_ids=limits.eos_token_ids,
        )
    except InvalidRequest as error:
        raise invalid_argument(f"request.sampling.{error.field}", error.problem, error.allowed) from error


def transfer_id(field: str, value: str) -> str:
    """A transfer id: part of file names and keys, hence its restricted alphabet."""
    if not _TRANSFER_ID.fullmatch(value):
        raise invalid_argument(f"{field}.transfer_id", f"is {shown(value)}", "1..128 of [A-Za-z0-9._-]")
    return value


def dial_address(field: str, value: str) -> str:
    """`host:port`; nothing else that gRPC would resolve."""
    if not may_be_dialled(value):
        raise invalid_argument(field, f"is {shown(value)}", "host:port of the prefill instance")
    return value


def may_be_dialled(address: str) -> bool:
    matched = _ADDRESS.fullmatch(address)
    return matched is not None and 0 < int(matched[1]) < 65536


def checked_seconds(field: str, value: float) -> float:
    """Seconds from a message; 0 if there are none."""
    if not 0 <= value <= MAX_DURATION_S:  # NaN neither
        raise invalid_argument(field, f"is {value}", f"0..{MAX_DURATION_S:g} seconds")
    return value


def _step_stretch(value: float) -> float | None:
    if value == 0:
        return None
    if not 1 <= value <= MAX_STEP_STRETCH:  # NaN neither
        raise invalid_argument("request.step_stretch", f"is {value}", f"0, or 1..{MAX_STEP_STRETCH:.0f}")
    return value


def duration_s(field: str, value: float, maximum_s: float) -> float:
    """Seconds, at most this instance's own maximum, which 0 (absent) stands for."""
    return min(checked_seconds(field, value) or maximum_s, maximum_s)


def _in_range(field: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise invalid_argument(field, f"is {value}", f"{lowest}..{highest}")


def _check_length(num_prompt_tokens: int, num_output_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
    """At least one token must be left to generate."""
    if num_prompt_tokens + num_output_tokens >= max_model_len:
        problem = f"{num_prompt_tokens} prompt and {num_output_tokens} output tokens fill the context"
        raise invalid_argument("request.prompt_token_ids", problem, f"together at most {max_model_len - 1}")
    if max_tokens is not None and num_output_tokens >= max_tokens:
        problem = f"{num_output_tokens} tokens are emitted already"
        raise invalid_argument("request.sampling.max_tokens", problem, f"more than {num_output_tokens}")


def common_fields(source: msgspec.Struct, message: type[Message]) -> dict[str, Any]:
    """The fields that a struct and a message have in common, by name."""
    names = message.DESCRIPTOR.fields_by_name
    return {name: getattr(source, name) for name in source.__struct_fields__ if name in names}
