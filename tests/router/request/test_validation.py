"""A catalogue of bad input: the exact status, the field and value in the message, and within 100 ms."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from engine.errors import InvalidRequest
from protos.tandem.v1 import common_pb2, generation_pb2
from router.request import validation
from router.request.validation import ModelLimits, ServedModel, check_model, validated
from serving.errors import InvalidArgument, NotFound
from serving.limits import LARGE_BYTES
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_model_folder
from tests.router.conftest import Run
from tests.router.rig import SHORT, Rig

IA = grpc.StatusCode.INVALID_ARGUMENT
RE = grpc.StatusCode.RESOURCE_EXHAUSTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
CONTEXT = 4096


class Case(NamedTuple):
    """One row: the request, the status, and what its text must hold."""

    row: str
    request: generation_pb2.GenerateRequest
    code: grpc.StatusCode
    says: str
    field: str = ""


def request(ids: list[int] | None = None, **fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=SHORT if ids is None else ids), **fields)


def sampling(row: str, says: str, code: grpc.StatusCode = IA, field: str = "", **fields: Any) -> Case:
    params = common_pb2.SamplingParams(**fields)
    return Case(row, request(sampling=params), code, says, field or next(iter(fields)))


def no_prompt(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**fields)


def both() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="a", token_ids=common_pb2.TokenIds(ids=[20]))


NAN, INF = math.nan, math.inf
CASES = [
    Case("4 empty message", no_prompt(), IA, "prompt: one of text, token_ids, chat is required", "prompt"),
    Case("8 4 MiB of ids", request([20] * 4_194_200), IA, "prompt is too long: 4194200 tokens, limit 4095", "prompt"),
    Case("10 empty text", no_prompt(text=""), IA, "prompt is empty", "prompt"),
    Case("11 empty ids", request([]), IA, "prompt is empty", "prompt"),
    Case("12 text and ids", both(), IA, "exactly one of", "prompt"),
    Case(
        "chat with an unknown role",
        no_prompt(chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="wizard", content="x")])),
        IA,
        "system, user, assistant, tool",
        "chat.messages[0].role",
    ),
    Case("chat without messages", no_prompt(chat=generation_pb2.Chat()), IA, "at least one message", "messages"),
    Case("13 id = vocab", request([20, 300]), IA, "token_ids[1]=300 out of range 0..299", "token_ids"),
    Case("14 id -1", request([-1]), IA, "token_ids[0]=-1 out of range 0..299", "token_ids"),
    Case("15 id 2^32+5", request([2**32 + 5]), IA, "token_ids[0]=4294967301 out of range", "token_ids"),
    Case("15 id 2^63-1", request([2**63 - 1]), IA, "out of range 0..299", "token_ids"),
    Case("16 padding gap", request([299, 300]), IA, "model vocabulary", "token_ids"),
    Case("17 prompt = context", request([20] * CONTEXT), IA, "limit 4095", "prompt"),
    Case(
        "18 prompt > context", request([20] * (CONTEXT + 1)), IA, "prompt 4097 + max_tokens 1 > context 4096", "prompt"
    ),
    sampling("18 sum > context", "prompt 10 + max_tokens 4087 > context 4096", max_tokens=4087),
    sampling("19 max_tokens 0", "max_tokens >= 1", max_tokens=0),
    sampling("20 max_tokens -1", "max_tokens >= 1", max_tokens=-1),
    sampling("20 max_tokens 2^63-1", "> context 4096", max_tokens=2**63 - 1),
    sampling("21 min > max", "min_tokens 9 > max_tokens 8", field="min_tokens", max_tokens=8, min_tokens=9),
    sampling("22 temperature NaN", "must be finite", temperature=NAN),
    *(sampling(f"23 temperature {t}", "0..2", temperature=t) for t in (INF, -INF, -0.1, 1e308)),
    *(sampling(f"25 top_p {p}", "(0,1]", top_p=p) for p in (0, -1, 1.0001, NAN)),
    *(sampling(f"26 top_k {k}", "0 or -1 (off), or 1..300", top_k=k) for k in (-2, 2**31)),
    *(sampling(f"27 min_p {p}", "[0,1]", min_p=p) for p in (NAN, 2)),
    *(sampling(f"28 repetition_penalty {p}", "[1e-09,2]", repetition_penalty=p) for p in (0, -1, NAN, INF)),
    sampling("28 repetition_penalty 5e-324", "5e-324 is out of range", repetition_penalty=5e-324),
    *(sampling(f"29 frequency_penalty {p}", "[-2,2]", frequency_penalty=p) for p in (2.01, -2.01, NAN)),
    *(sampling(f"29 presence_penalty {p}", "[-2,2]", presence_penalty=p) for p in (2.01, -2.01, NAN)),
    *(sampling(f"30 n {n}", "1..8", n=n) for n in (0, -1, 10**9)),
    sampling("31 n, greedy", "temperature", n=2, temperature=0),
    sampling("32 best_of < n", "best_of=1 < n=2", field="best_of", n=2, best_of=1),
    sampling("best_of > n", "best_of", UNIMPLEMENTED, n=2, best_of=3),
    *(sampling(f"33 logprobs {n}", "0..20", logprobs=n) for n in (-1, 10**6)),
    *(sampling(f"33 prompt_logprobs {n}", "0..20", prompt_logprobs=n) for n in (-1, 10**6)),
    sampling("36 empty stop", "stop[0] is empty", stop=[""]),
    sampling("37 10 000 stops", "at most 16", stop=["x"] * 10_000),
    sampling("37 stop of 1 MiB", "256", stop=["x" * 2**20]),
    sampling("40 stop id", "stop_token_ids[0]=300 out of range 0..299", stop_token_ids=[300]),
    sampling("40 129 stop ids", "at most 128", stop_token_ids=[20] * 129),
    sampling("42 bias id", "out of range", logit_bias={300: 1.0}),
    sampling("42 bias NaN", "[-100,100]", logit_bias={20: NAN}),
    sampling("42 bias 1e9", "[-100,100]", logit_bias={20: 1e9}),
    sampling("42 10^5 biases", "at most 1024", logit_bias=dict.fromkeys(range(100_000), 1.0)),
    sampling("43 no allowed ids", "no token can be sampled", allowed_token_ids=common_pb2.TokenIds()),
    Case("60 unknown adapter", request(lora="mine"), NOT_FOUND, "lora: adapter 'mine' is not served; served: none"),
    Case("61 adapter path", request(lora="../../etc/passwd"), IA, "[A-Za-z0-9._-]", "lora"),
    Case("61 adapter 10 KiB", request(lora="x" * 10240), IA, "1..128", "lora"),
    Case("61 adapter NUL", request(lora="a\0b"), IA, "a\\x00b", "lora"),
    Case("63 unknown model", request(model="gpt"), NOT_FOUND, "model: 'gpt' is not served; served: "),
    Case(
        "64 salt 1 MiB", request(cache_salt="x" * 2**20), IA, "1048576 bytes; allowed: at most 256 bytes", "cache_salt"
    ),
    Case("64 salt in bytes", request(cache_salt="é" * 129), IA, "258 bytes", "cache_salt"),
    Case("67 id 1 MiB", request(request_id="x" * 2**20), IA, "1..128", "request_id"),
    Case("67 id newline", request(request_id="a\nb"), IA, "a\\nb", "request_id"),
    Case("67 id escape", request(request_id="\x1b[31m"), IA, "\\x1b[31m", "request_id"),
    Case("68 idempotency", request(idempotency_key="k"), UNIMPLEMENTED, "idempotency_key"),
    Case("68 key too long", request(idempotency_key="k" * 129), IA, "129 bytes", "idempotency_key"),
    Case("78 1 M a", no_prompt(text="a" * 1_000_000), IA, "limit 4095", "prompt"),
    Case("78 1 M emoji", no_prompt(text="🙂" * 1_000_000), IA, "limit 4095", "prompt"),
    Case("78 1 MiB of words", no_prompt(text="word " * 209_715), IA, "limit 4095", "prompt"),
    Case("81 priority 2^31-1", request(priority=2**31 - 1), IA, "-100..100", "priority"),
    Case("81 priority -2^31", request(priority=-(2**31)), IA, "-100..100", "priority"),
    sampling("41 blank word", "bad_words[1] is blank", bad_words=["x", " "]),
    sampling("41 65 words", "at most 64 words", bad_words=["x"] * 65),
    sampling("41 word of 1 MiB", "256 bytes", bad_words=["x" * 2**20]),
    sampling(
        "41 nothing left",
        "no token can be sampled",
        allowed_token_ids=common_pb2.TokenIds(ids=[20]),
        bad_word_ids=[common_pb2.TokenIds(ids=[20])],
    ),
    sampling("46 regex", "at position 0: '[' cannot be read", regex="["),
    sampling("50 type", "at /type: 'stsring' is not a type", json_schema='{"type": "stsring"}'),
    sampling("54 1 MiB", "1..65536 bytes", json_schema=" " * 2**20),
    sampling("59 ignore_eos", "contradicts a constraint", regex="a", ignore_eos=True, field="ignore_eos"),
    sampling("41 bad id", "out of range 0..299", bad_word_ids=[common_pb2.TokenIds(ids=[300])]),
]


@pytest.fixture
async def rig(run: Run) -> AsyncIterator[Rig]:
    async with run(prefill=0, server={"max_message_bytes": 5 << 20}) as rig:
        yield rig


async def rejection(rig: Rig, request: generation_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.generate(request)
    return raised.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row)
async def test_bad_input_is_rejected_by_field_and_value(run: Run, case: Case) -> None:
    async with run(prefill=0, server={"max_message_bytes": 5 << 20}) as rig:
        wire = case.request.SerializeToString()  # the client's own work, not counted
        raw = rig.channel.unary_stream("/tandem.v1.GenerationService/Generate")
        cpu_s = []
        for _ in range(3):  # the best of three, in CPU time: other tests and services share this machine
            started_s = time.process_time()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in raw(wire):
                    pass
            cpu_s.append(time.process_time() - started_s)
            if cpu_s[-1] < 0.1:
                break
        error = raised.value
        assert error.code() is case.code
        details = str(error.details())
        assert case.says in details
        assert "request id" in details
        assert len(details.encode()) <= 512
        assert not rig.decode[0].recorded("decode")
        if case.field:
            if case.code is IA:
                assert case.field in fields_of(error)
            else:
                assert case.field in details
        # Generous only where the message alone is megabytes, which client and router move in one process here.
        assert min(cpu_s) < (0.1 if len(wire) < 1 << 20 else 0.5)


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    """The fields that the error's details name."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            bad_request = error_details_pb2.BadRequest()
            status_pb2.Status.FromString(value).details[0].Unpack(bad_request)
            return [violation.field for violation in bad_request.field_violations]
    return []


@pytest.mark.parametrize(
    ("row", "wire"),
    [
        ("1 not protobuf", b"\xff\xff\xff\xff"),
        ("2 truncated", b"\x0a\x10abc"),
        ("3 invalid UTF-8", b"\x0a\x02\xff\xfe"),
    ],
)
async def test_bytes_that_are_no_request_are_rejected_as_such(rig: Rig, row: str, wire: bytes) -> None:
    call = rig.channel.unary_stream("/tandem.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call(wire):
            pass
    assert raised.value.code() is IA
    assert "request is not a valid GenerateRequest" in str(raised.value.details())


async def test_five_mebibytes_are_rejected_by_the_transport(run: Run) -> None:
    async with run(prefill=0) as rig:
        error = await rejection(rig, request([20] * (5 << 20)))
        assert error.code() is RE
        assert "larger than max" in str(error.details())


GOOD = {
    "5 unknown field": common_pb2.SamplingParams(max_tokens=2),
    "17 to the edge": common_pb2.SamplingParams(max_tokens=CONTEXT - len(SHORT)),
    "24 denormal temperature": common_pb2.SamplingParams(max_tokens=2, temperature=1e-45),
    "26 top_k off": common_pb2.SamplingParams(max_tokens=2, top_k=0),
    "26 top_k -1": common_pb2.SamplingParams(max_tokens=2, top_k=-1),
    "32 best_of = n": common_pb2.SamplingParams(max_tokens=2, best_of=2, n=2),
    "35 largest seed": common_pb2.SamplingParams(max_tokens=2, seed=2**64 - 1),
    "38 stop prefixes": common_pb2.SamplingParams(max_tokens=2, stop=["ab", "abc"]),
    "39 odd stops": common_pb2.SamplingParams(max_tokens=2, stop=["\ufffd", "\0", "e\u0301", "\u202eabc"]),
    "20 neutral penalties": common_pb2.SamplingParams(max_tokens=2, frequency_penalty=0, repetition_penalty=1),
    "29 penalties": common_pb2.SamplingParams(max_tokens=2, frequency_penalty=-2, presence_penalty=2),
    "28 repetition_penalty": common_pb2.SamplingParams(max_tokens=2, repetition_penalty=2),
    "33 logprobs": common_pb2.SamplingParams(max_tokens=2, logprobs=20),
    "42 biases": common_pb2.SamplingParams(max_tokens=2, logit_bias={20: 100.0, 299: -100.0}),
    "34 prompt_logprobs": common_pb2.SamplingParams(max_tokens=2, prompt_logprobs=20, n=2),
    "41 bad words": common_pb2.SamplingParams(max_tokens=2, bad_words=["cat", "漢字"]),
    "43 one allowed id": common_pb2.SamplingParams(max_tokens=2, allowed_token_ids=common_pb2.TokenIds(ids=[20])),
}


@pytest.mark.parametrize("row", GOOD)
async def test_odd_but_good_input_is_served(run: Run, row: str) -> None:
    async with run(prefill=0, decode=[FakeInstance("decode", max_model_len=CONTEXT)]) as rig:
        wanted = request(sampling=GOOD[row])
        if row.startswith("5 "):
            wanted = generation_pb2.GenerateRequest.FromString(wanted.SerializeToString() + b"\xba\x3e\x01x")
        call = rig.call(wanted)
        assert (await anext(aiter(call))).tokens.token_ids
        call.cancel()
        await rig.until_idle()


@pytest.mark.parametrize("salt", ["a/b", "..", "@", "a\0b", "é" * 128])
async def test_any_salt_up_to_256_bytes_is_taken(rig: Rig, salt: str) -> None:
    wanted = request(cache_salt=salt, sampling=common_pb2.SamplingParams(max_tokens=1))
    assert len((await rig.generate(wanted)).ids()) == 1
    assert rig.decode[0].recorded("decode")[0].detail.request.cache_salt == salt


@pytest.mark.parametrize("text", ["a\0b", "\ufeffx", "e" + "\u0301" * 2000, "<eos>"])
async def test_odd_text_is_served(rig: Rig, text: str) -> None:
    wanted = generation_pb2.GenerateRequest(text=text, sampling=common_pb2.SamplingParams(max_tokens=1))
    assert len((await rig.generate(wanted)).ids()) == 1


HELLO = generation_pb2.ChatMessage(role="user", content="hello")
BEGUN = generation_pb2.Resume(choices=[generation_pb2.ResumedChoice(choice=0, token_ids=[20])])
IN_A_THREAD = {
    "text": generation_pb2.GenerateRequest(text="hello"),
    "chat": generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages=[HELLO])),
    "resumed answer": request(resume=BEGUN, sampling=common_pb2.SamplingParams(seed=1)),
}


@pytest.mark.parametrize("what", IN_A_THREAD)
async def test_where_no_thread_can_be_started_the_router_is_full(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(executor: object, *work: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "run_in_executor", fails)
        error = await rejection(rig, IN_A_THREAD[what])
    assert error.code() is RE
    assert "no thread can be started" in str(error.details())


@pytest.mark.parametrize(("name", "what"), [("template_messages", "messages"), ("Tools", "tools")])
async def test_the_loop_does_not_read_a_long_chat(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    """Its JSON takes time, of calls and of tools."""
    threads = list[threading.Thread]()

    def read(*_: object, **__: object) -> None:
        threads.append(threading.current_thread())
        raise InvalidRequest(what, "are read")

    monkeypatch.setattr(validation, name, read if name == "template_messages" else SimpleNamespace(of=read))
    tool = generation_pb2.Tool(name="f", parameters=json.dumps({"description": "x" * LARGE_BYTES}))
    chat = generation_pb2.Chat(messages=[HELLO], tools=[tool] if what == "tools" else [])
    error = await rejection(rig, generation_pb2.GenerateRequest(chat=chat))
    assert f"{what}: are read" in str(error.details())
    assert threads
    assert threading.main_thread() not in threads


async def test_stop_strings_require_a_tokenizer(model: ServedModel) -> None:
    """By the client's name for them, before an instance rejects them by another."""
    bare, limits = replace(model, tokenizer=None), ModelLimits(CONTEXT, 300, CONTEXT, CONTEXT)
    wanted = request(sampling=common_pb2.SamplingParams(stop=["x"]))
    with pytest.raises(InvalidArgument, match=r"^stop: requires a tokenizer") as raised:
        await validated(wanted, bare, limits, deadline_s=None)
    assert [violation.field for violation in raised.value.violations] == ["stop"]


POET = Behaviour(lora_adapters=["poet", "clerk"], num_running=9)
"""Of an instance that is only taken when it must be."""


@pytest.mark.parametrize(
    "named", [{"lora": "poet"}, {"model": "poet"}, {"model": "fake", "lora": "poet"}, {"model": "poet", "lora": "poet"}]
)
async def test_an_adapter_that_one_decode_instance_has_is_named_by_lora_or_by_model(
    run: Run, named: dict[str, Any]
) -> None:
    decode = [FakeInstance("decode", "plain"), FakeInstance("decode", "poet", behaviour=POET)]
    async with run(prefill=0, decode=decode) as rig:
        answer = await rig.generate(request(sampling=common_pb2.SamplingParams(max_tokens=2), **named))
        assert answer.responses[0].model == "poet"
        assert [one.detail.request.lora for one in decode[1].recorded("decode")] == ["poet"]
        assert not decode[0].recorded("decode")
        plain = await rig.generate(request(sampling=common_pb2.SamplingParams(max_tokens=2)))
        assert plain.responses[0].model == "fake"
        assert [one.detail.request.lora for one in decode[0].recorded("decode")] == [""]


ADAPTERS = [
    Case(
        "another adapter",
        request(lora="mine"),
        NOT_FOUND,
        "lora: adapter 'mine' is not served; served: 'clerk', 'poet'",
    ),
    Case(
        "another model",
        request(model="mine"),
        NOT_FOUND,
        "model: 'mine' is not served; served: 'fake', 'clerk', 'poet'",
    ),
    Case("another model, an adapter", request(model="mine", lora="poet"), NOT_FOUND, "model: 'mine' is not served"),
    Case("two", request(model="clerk", lora="poet"), IA, "is 'poet', and model names the adapter 'clerk'", "lora"),
]


@pytest.mark.parametrize("case", ADAPTERS, ids=[case.row for case in ADAPTERS])
async def test_what_adapters_there_are_is_said(run: Run, case: Case) -> None:
    async with run(prefill=0, decode=[FakeInstance("decode", behaviour=POET)]) as rig:
        error = await rejection(rig, case.request)
        assert (error.code(), fields_of(error)) == (case.code, [case.field] if case.field else [])
        assert case.says in str(error.details())


def test_of_many_adapters_an_error_names_a_few(model: ServedModel) -> None:
    """The router's log and its live page keep the text."""
    with pytest.raises(NotFound, match=r"served: 'fake', 'a000', .*, 'a014' and 985 more$") as raised:
        check_model("mine", model, [f"a{number:03}" for number in range(1000)])
    assert len(str(raised.value)) < 256


async def test_the_model_s_name_means_the_model_though_an_adapter_has_it(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=Behaviour(lora_adapters=["fake", "poet"]))
    async with run(prefill=0, decode=[decode]) as rig:
        error = await rejection(rig, request(model="mine"))
        assert "model: 'mine' is not served; served: 'fake', 'poet' (" in str(error.details())
        params = common_pb2.SamplingParams(max_tokens=2)
        await rig.generate(request(sampling=params, model="fake"))
        await rig.generate(request(sampling=params, lora="fake"))
        assert [one.detail.request.lora for one in decode.recorded("decode")] == ["", "fake"]


async def test_an_adapter_of_an_instance_that_is_not_ready_is_unavailable_not_unknown(run: Run) -> None:
    decode = [FakeInstance("decode", "plain"), FakeInstance("decode", "poet", behaviour=POET)]
    async with run(prefill=0, decode=decode) as rig:
        await decode[1].kill()
        await rig.until_ready(num_decode=1)
        error = await rejection(rig, request(lora="poet"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        info = await rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
        assert list(info.lora_adapters) == ["clerk", "poet"]


async def test_unknown_instances_make_a_request_unavailable_not_wrong(run: Run) -> None:
    async with run(prefill=0, decode=0) as rig:
        error = await rejection(rig, request())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no decode instance" in str(error.details())


async def test_the_models_defaults_apply_to_absent_fields(run: Run, tmp_path: Any) -> None:
    folder = write_model_folder(tmp_path / "m", temperature=0.6, top_k=20, max_new_tokens=100_000)
    model = ServedModel.from_folder(folder, "fake")
    async with run.func(model, folder, prefill=0) as rig:  # type: ignore[attr-defined]
        call = rig.call(request(sampling=common_pb2.SamplingParams(top_k=7)))
        await anext(aiter(call))
        call.cancel()
        params = rig.decode[0].recorded("decode")[0].detail.request.sampling
        assert (params.temperature, params.top_k) == (0.6, 7)
        assert params.max_tokens == CONTEXT - len(SHORT)  # a default longer than the context is cut, not rejected
        await rig.until_idle()
