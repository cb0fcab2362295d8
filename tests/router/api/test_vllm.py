"""vLLM's gRPC at the router: the published stubs generate, and unsupported fields are rejected."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.tandem.v1 import common_pb2
from protos.vllm.grpc.engine import vllm_engine_pb2 as vllm
from protos.vllm.grpc.engine import vllm_engine_pb2_grpc
from router.api import vllm as module
from router.api.vllm import generate_request
from serving.errors import ServiceError
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids
from tests.router.conftest import Run
from tests.router.rig import PROMPT, SEED, SHORT, Rig, slow
from tests.waiting import until

CLIENT = Path(__file__).with_name("smg_client.py")


async def smg(*arguments: str) -> list[Any]:
    """What the published stubs say, one object for each line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in out.splitlines()]


async def call(rig: Rig, command: str, **request: Any) -> list[Any]:
    return await smg(command, rig.app.address, json.dumps(request))


def request_of(prompt: list[int] = PROMPT, **fields: Any) -> vllm.GenerateRequest:
    sampling = {"max_tokens": 6, "seed": SEED, **fields.pop("sampling", {})}
    return vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=prompt), sampling_params=vllm.SamplingParams(**sampling), **fields
    )


def stub(rig: Rig) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(rig.channel)


async def test_every_field_has_the_number_and_type_that_is_published() -> None:
    [published] = await smg("shape")
    for message in vllm.DESCRIPTOR.message_types_by_name.values():
        theirs = published[message.name]
        for field in message.fields:
            oneof = field.containing_oneof.name if field.containing_oneof else None
            ours = [field.number, field.type, field.is_repeated, oneof]
            assert theirs[field.name] == ours, f"{message.name}.{field.name}"
    requests = {name for name in published if name.endswith("Request") and name not in ("EmbedRequest",)}
    requests |= {"SamplingParams", "TokenizedInput"}
    for name in requests:
        known = {field.name for field in vllm.DESCRIPTOR.message_types_by_name[name].fields}
        assert published[name].keys() == known, f"a field of {name} would be rejected as unknown"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_published_stubs_generate(run: Run, stream: bool) -> None:
    async with run() as rig:
        answers = await call(
            rig,
            "Generate",
            request_id="theirs",
            tokenized={"original_text": "ignored", "input_ids": PROMPT},
            sampling_params={"temperature": 0.5, "max_tokens": 6, "seed": SEED, "n": 2, "logprobs": 1},
            stream=stream,
        )
        for index in range(2):
            ids = expected_ids(PROMPT, SEED, 6, index)
            chunks = [a["chunk"] for a in answers if "chunk" in a and a["chunk"].get("index", 0) == index]
            [complete] = [a["complete"] for a in answers if "complete" in a and a["complete"].get("index", 0) == index]
            assert complete["finish_reason"] == "length"
            assert complete["prompt_tokens"] == len(PROMPT)
            if stream:
                assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == ids
                assert complete["output_ids"] == chunks[-1]["token_ids"]
                found = [logprob for chunk in chunks for logprob in chunk["output_logprobs"]["token_logprobs"]]
                assert found == [-0.5 * i for i in range(6)]
            else:
                assert not chunks
                assert complete["output_ids"] == ids
                assert complete["output_logprobs"]["token_ids"] == ids
                assert complete["completion_tokens"] == 6


async def test_the_published_stubs_read_model_and_server_info(run: Run) -> None:
    async with run() as rig:
        [model] = await call(rig, "GetModelInfo")
        assert (model["served_model_name"], model["max_context_length"], model["vocab_size"]) == ("fake", 4096, 300)
        assert (model["eos_token_ids"], model["bos_token_id"], model["is_generation"]) == ([2], 1, True)
        [server] = await call(rig, "GetServerInfo")
        assert server["server_type"] == "tandem"
        assert "kv_connector" not in server, "it would be paired with other engines"
        [loads] = await call(rig, "GetLoads", include=["core"])
        assert loads["dp_rank_count"] == 1
        assert len(loads["loads"]) == 1


async def test_a_text_prompt_and_prompt_logprobs(run: Run) -> None:
    async with run() as rig:
        request = vllm.GenerateRequest(
            text="hi",
            sampling_params=vllm.SamplingParams(max_tokens=1, seed=SEED, prompt_logprobs=1),
        )
        [answer] = [answer async for answer in stub(rig).Generate(request)]
        received = answer.complete.input_logprobs
        assert len(received.token_ids) == 2
        assert [item.HasField("value") for item in received.token_logprobs] == [False, True]
        assert [list(top.token_ids) for top in received.top_logprobs] == [[], [received.token_ids[1]]]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_loop_does_not_convert_the_log_probabilities_of_a_prompt(
    run: Run, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A message has a hundred thousand candidates at most."""
    threads = list[threading.Thread]()

    def recorded(prompt: tuple[int, ...], chunk: common_pb2.TokenChunk, num_top: int) -> Any:
        if chunk.prompt_logprobs:
            threads.append(threading.current_thread())
        return converted(prompt, chunk, num_top)

    converted = module._input_logprobs
    monkeypatch.setattr(module, "_input_logprobs", recorded)
    async with run() as rig:
        request = request_of(stream=stream, sampling={"prompt_logprobs": 1})
        answers = [answer async for answer in stub(rig).Generate(request)]
        first = answers[0].chunk if stream else answers[0].complete
        assert len(first.input_logprobs.token_ids) == len(PROMPT)
    assert threads
    assert threading.main_thread() not in threads


async def test_absent_fields_take_vllms_defaults(run: Run) -> None:
    async with run() as rig:
        own = msgspec.structs.replace(rig.app.service.model.defaults, max_tokens=7, temperature=0.5, min_p=0.1)
        rig.app.service.model = dataclasses.replace(rig.app.service.model, defaults=own)
        await anext(aiter(stub(rig).Generate(vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=SHORT)))))
        sampling = rig.decode[0].recorded("decode")[0].detail.request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)
        assert not sampling.skip_special_tokens
        assert sampling.max_tokens == 4096 - len(SHORT)
        assert sampling.HasField("seed")
        await rig.until_idle()


async def test_an_abort_ends_the_requests_of_its_label(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.05))]) as rig:
        running = stub(rig).Generate(request_of(request_id="mine", stream=True, sampling={"max_tokens": 2000}))
        await anext(aiter(running))
        await stub(rig).Abort(vllm.AbortRequest(request_ids=["mine", "nobody"]))
        *_, last = [answer async for answer in running]
        assert last.complete.finish_reason == "abort"
        await rig.until_idle()


async def test_a_client_that_cancels_ends_its_request(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.05))]) as rig:
        running = stub(rig).Generate(request_of(stream=True, sampling={"max_tokens": 2000}))
        await anext(aiter(running))
        running.cancel()
        await rig.decode[0].until("decode cancelled")
        await rig.until_idle()


async def test_health_follows_the_pools(run: Run) -> None:
    async with run(prefill=0) as rig:
        health = health_pb2_grpc.HealthStub(rig.channel)
        asked = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")

        async def is_healthy() -> bool:
            received = (await stub(rig).HealthCheck(vllm.HealthCheckRequest())).healthy
            status = (await health.Check(asked)).status
            return bool(received and status == health_pb2.HealthCheckResponse.SERVING)

        async with asyncio.timeout(20):
            while not await is_healthy():
                await asyncio.sleep(0.01)
        await rig.decode[0].kill()
        async with asyncio.timeout(20):
            while await is_healthy():
                await asyncio.sleep(0.01)


async def test_loads_add_up_both_pools(run: Run) -> None:
    async with run(prefill=1, decode=2) as rig:
        for number, fake in enumerate([*rig.prefill, *rig.decode]):
            fake.behaviour.num_running, fake.behaviour.num_waiting = 10**number, 2 * 10**number
        async with asyncio.timeout(20):
            while (load := (await stub(rig).GetLoads(vllm.GetLoadsRequest())).loads[0]).num_total_reqs != 333:
                await asyncio.sleep(0.01)
        assert (load.num_running_reqs, load.num_waiting_reqs) == (111, 222)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub(rig).GetLoads(vllm.GetLoadsRequest(dp_rank=1))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_loads_are_without_instances_that_are_out(run: Run) -> None:
    """The last report of a dead one says nothing of now; a draining one still runs what it has, and is no capacity."""
    sizes = Behaviour(num_running=1, slots=4, free_blocks=100)
    decode = [
        FakeInstance("decode", name, behaviour=dataclasses.replace(sizes), identity={"block_size": 16})
        for name in ("stays", "drains", "dies")
    ]
    async with run(prefill=0, decode=decode) as rig:
        [load] = (await stub(rig).GetLoads(vllm.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.max_running_requests, load.max_total_num_tokens) == (3, 12, 4800)
        decode[1].behaviour.draining = True
        await decode[2].kill()
        await rig.until_ready(num_decode=1)
        [load] = (await stub(rig).GetLoads(vllm.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.max_running_requests, load.max_total_num_tokens) == (2, 4, 1600)


async def test_the_service_can_be_switched_off(run: Run) -> None:
    async with run(router={"vllm_engine": False}) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub(rig).HealthCheck(vllm.HealthCheckRequest())
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"json_object": True}, {"json_object": True}),
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "root ::= [a]"}, {"grammar": "root ::= [a]"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"choice": vllm.ChoiceConstraint(choices=["a", "b"])}, {"choice": common_pb2.Texts(texts=["a", "b"])}),
    ],
)
def test_a_constraint_becomes_tandems(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    converted = generate_request(request_of(sampling=theirs)).sampling
    expected = common_pb2.SamplingParams(**ours)
    assert converted.WhichOneof("constraint") == expected.WhichOneof("constraint") == next(iter(ours))
    name = next(iter(ours))
    assert getattr(converted, name) == getattr(expected, name)


LATER = b"\xba\x3e\x01\x31"
"""Field 999 with the text "1", as a later version might have it."""

REJECTED: list[tuple[vllm.GenerateRequest, str, str]] = [
    (
        request_of(sampling={"structural_tag": "{}"}),
        "INVALID_ARGUMENT",
        "structural_tag: at /: is not a structural tag",
    ),
    (
        request_of(sampling={"json_schema": '{"not": {}}'}),
        "INVALID_ARGUMENT",
        "json_schema: at /: not is not supported",
    ),
    (request_of(sampling={"regex": "(?=a)"}), "INVALID_ARGUMENT", "regex: at position 0"),
    (request_of(sampling={"choice": vllm.ChoiceConstraint()}), "INVALID_ARGUMENT", "choice: () is not a list of texts"),
    (request_of(sampling={"truncate_prompt_tokens": 5}), "INVALID_ARGUMENT", "truncate_prompt_tokens"),
    (request_of(sampling={"seed": -1}), "INVALID_ARGUMENT", "0..2147483647"),
    (request_of(sampling={"logprobs": -1}), "INVALID_ARGUMENT", "logprobs"),
    (request_of(sampling={"n": 9}), "INVALID_ARGUMENT", "1..8"),
    (request_of(sampling={"temperature": float("nan")}), "INVALID_ARGUMENT", "must be finite"),
    (request_of(mm_inputs=vllm.MultimodalInputs()), "INVALID_ARGUMENT", "mm_inputs"),
    (request_of(kv_transfer_params_json="{}"), "PERMISSION_DENIED", "kv_transfer_params_json"),
    (request_of(kv_transfer_params=vllm.KvTransferParams(remote_host="x")), "PERMISSION_DENIED", "kv_transfer_params"),
    (request_of([300]), "INVALID_ARGUMENT", "out of range"),
    (request_of([]), "INVALID_ARGUMENT", "prompt is empty"),
    (vllm.GenerateRequest(), "INVALID_ARGUMENT", "one of text, token_ids, chat is required"),
    (request_of(request_id="a b"), "INVALID_ARGUMENT", "request_id"),
    (vllm.GenerateRequest.FromString(request_of().SerializeToString() + LATER), "INVALID_ARGUMENT", "field 999"),
    (
        vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams.FromString(LATER)),
        "INVALID_ARGUMENT",
        "sampling_params: field 999",
    ),
]


async def test_what_is_unsupported_is_rejected(run: Run) -> None:
    async with run() as rig:
        for request_, code, detail in REJECTED:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await anext(aiter(stub(rig).Generate(request_)))
            assert (raised.value.code().name, detail in str(raised.value.details())) == (code, True), raised.value
        assert not rig.decode[0].recorded("decode")


async def test_what_is_unsupported_does_not_count_as_a_request_that_runs(run: Run) -> None:
    async with run(http={"listen": "127.0.0.1:0", "page": True}) as rig:
        for request_, _, _ in REJECTED:
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(stub(rig).Generate(request_)))
        metrics = rig.app.service.metrics
        assert metrics.log is not None
        await until(lambda: metrics.num_received == sum(metrics.ended.values()))
        assert not metrics.log.running


def test_the_data_parallel_rank_is_ignored() -> None:
    later = vllm.GenerateRequest.FromString(request_of().SerializeToString() + b"\x48\x01")
    try:
        assert list(generate_request(later).token_ids.ids) == PROMPT
    except ServiceError as error:
        pytest.fail(str(error))
