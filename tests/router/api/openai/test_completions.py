"""/v1/completions as OpenAI's own client sees it: the same tokens as over gRPC, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tokenizers import processors

from engine.sampling.params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai import responses
from router.api.openai.requests import CompletionBody
from router.api.openai.responses import (
    CompletionFormat,
    TextOffset,
    TokenTexts,
    completion_logprobs,
    prompt_logprobs,
)
from router.dispatch.handler import Siblings
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids, text_of
from tests.router.api.openai.conftest import RunHttp
from tests.router.rig import PROMPT, SEED, SHORT
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_fallback, byte_level, byte_level_backend, word_piece
from tests.waiting import until


async def test_a_completion_has_the_tokens_of_the_grpc_answer(run_http: RunHttp) -> None:
    async with run_http() as http:
        reference = await http.rig.generate(max_tokens=40)
        answer = await http.openai.completions.create(
            model="fake", prompt=PROMPT, max_tokens=40, seed=SEED, extra_body={"return_token_ids": True}
        )
        [choice] = answer.choices
        assert choice.text == reference.text()
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == reference.ids()
        assert choice.model_extra["prompt_token_ids"] == PROMPT
        assert (choice.index, choice.finish_reason) == (0, "length")
        assert (answer.object, answer.model) == ("text_completion", "fake")
        await http.rig.until_idle()


async def test_usage_covers_both_instances(run_http: RunHttp) -> None:
    async with run_http() as http:
        answer = await http.openai.completions.create(model="fake", prompt=PROMPT, max_tokens=5)
        usage = answer.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 5, 105)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 16


async def test_a_stream_has_the_tokens_of_the_grpc_answer(run_http: RunHttp) -> None:
    async with run_http() as http:
        reference = await http.rig.generate(max_tokens=20)
        stream = await http.openai.completions.create(
            model="fake",
            prompt=PROMPT,
            max_tokens=20,
            seed=SEED,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        events = [event async for event in stream]
        *pieces, last = events
        assert "".join(piece.choices[0].text for piece in pieces) == reference.text()
        ids = [piece.choices[0].model_extra["token_ids"] for piece in pieces]
        assert [token_id for some in ids for token_id in some] == reference.ids()
        assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert all(piece.usage is None for piece in pieces)
        assert last.choices == []
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 20)
        assert len({event.id for event in events}) == 1


async def test_a_stream_ends_with_done(run_http: RunHttp) -> None:
    async with run_http() as http:
        response = await http.post(prompt=SHORT, max_tokens=2, stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-accel-buffering"] == "no", "nginx would hold the events back"
        assert response.headers["cache-control"] == "no-cache"
        events = response.text.split("\n\n")
        assert len(events) == 4
        assert all(event.startswith("data: {") for event in events[:2])
        assert events[2:] == ["data: [DONE]", ""]


async def test_text_prompts_are_tokenised_as_over_grpc(run_http: RunHttp) -> None:
    async with run_http() as http:
        request = generation_pb2.GenerateRequest(
            text="héllo", sampling=common_pb2.SamplingParams(max_tokens=6, seed=SEED)
        )
        reference = await http.rig.generate(request)
        answer = await http.openai.completions.create(model="fake", prompt="héllo", max_tokens=6, seed=SEED)
        assert answer.choices[0].text == reference.text()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len("héllo".encode())


async def test_several_prompts_are_answered_in_their_order(run_http: RunHttp) -> None:
    async with run_http() as http:
        prompts = [SHORT, PROMPT, [30, 31, 32]]
        answer = await http.openai.completions.create(model="fake", prompt=prompts, max_tokens=5, n=2, seed=SEED)
        assert [choice.index for choice in answer.choices] == list(range(6))
        for index, choice in enumerate(answer.choices):
            ids = expected_ids(prompts[index // 2], SEED, 5, index % 2)
            assert choice.text == text_of(ids), f"choice {index}"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (113, 30)


async def test_several_texts_stream_side_by_side(run_http: RunHttp) -> None:
    async with run_http() as http:
        stream = await http.openai.completions.create(
            model="fake", prompt=["one", "two"], max_tokens=8, seed=SEED, stream=True
        )
        texts = {0: "", 1: ""}
        async for event in stream:
            texts[event.choices[0].index] += event.choices[0].text
        for index, prompt in enumerate(("one", "two")):
            alone = await http.openai.completions.create(model="fake", prompt=prompt, max_tokens=8, seed=SEED)
            assert texts[index] == alone.choices[0].text


async def test_one_invalid_prompt_of_several_rejects_them_all(run_http: RunHttp) -> None:
    async with run_http() as http:
        with pytest.raises(openai.BadRequestError) as raised:
            await http.openai.completions.create(model="fake", prompt=[SHORT, [5000]], max_tokens=500)
        assert raised.value.param == "prompt"
        await http.rig.until_idle()


async def test_sixteen_tokens_are_the_default(run_http: RunHttp) -> None:
    async with run_http() as http:
        answer = await http.openai.completions.create(model="fake", prompt=SHORT)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16


async def test_a_seed_repeats_and_none_differs(run_http: RunHttp) -> None:
    async with run_http() as http:

        async def text(seed: int | None) -> str:
            answer = await http.openai.completions.create(model="fake", prompt=SHORT, max_tokens=30, seed=seed)
            return answer.choices[0].text

        assert await text(5) == await text(5)
        assert await text(None) != await text(None)


async def test_logprobs_have_four_columns(run_http: RunHttp, model: ServedModel) -> None:
    assert model.tokenizer is not None
    async with run_http() as http:
        answer = await http.openai.completions.create(model="fake", prompt=SHORT, max_tokens=3, seed=SEED, logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        ids = expected_ids(SHORT, SEED, 3)
        texts = [model.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        assert logprobs.tokens == texts
        assert logprobs.token_logprobs == [0.0, -0.5, -1.0]
        assert logprobs.top_logprobs == [{text: -0.5 * i} for i, text in enumerate(texts)]
        assert logprobs.text_offset == [0, len(texts[0]), len(texts[0] + texts[1])]


async def test_an_echo_precedes_every_choice(run_http: RunHttp) -> None:
    async with run_http() as http:
        answer = await http.openai.completions.create(
            model="fake", prompt="héllo", max_tokens=3, n=2, seed=SEED, echo=True, logprobs=0
        )
        plain = await http.openai.completions.create(model="fake", prompt="héllo", max_tokens=3, n=2, seed=SEED)
        for echoed, alone in zip(answer.choices, plain.choices, strict=True):
            assert echoed.text == "héllo" + alone.text
            assert echoed.logprobs is not None
            assert echoed.logprobs.token_logprobs == [None, *[-1.0] * 5, 0.0, -0.5, -1.0]
            assert len(echoed.logprobs.tokens or []) == 9
            offsets = echoed.logprobs.text_offset or []
            assert offsets[:6] == [0, 1, 1, 2, 3, 4], "a token a byte; a character counts where it is complete"
            assert offsets[6] == len("héllo")
        streamed = await http.openai.completions.create(
            model="fake", prompt="héllo", max_tokens=3, seed=SEED, echo=True, stream=True
        )
        assert "".join([event.choices[0].text async for event in streamed]) == answer.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_loop_does_not_make_columns_of_a_whole_prompt(
    run_http: RunHttp, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A message has a hundred thousand candidates at most."""
    threads = list[threading.Thread]()

    def recorded(*of: Any) -> Any:
        threads.append(threading.current_thread())
        return prompt_logprobs(*of)

    monkeypatch.setattr(responses, "prompt_logprobs", recorded)
    async with run_http() as http:
        answer = await http.openai.completions.create(
            model="fake", prompt=["hello", "and again"], max_tokens=3, seed=SEED, echo=True, logprobs=1, stream=stream
        )
        if stream:
            assert [event async for event in answer]
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_an_echo_is_the_clients_text_and_not_that_of_its_tokens() -> None:
    """Tokenizers put special tokens around it, or normalise it."""
    body = CompletionBody.parse(b'{"prompt": ["Hello", [5]], "echo": true}')
    form = CompletionFormat(body, TokenTexts(None))
    assert form.echo(0, (1, 2), common_pb2.TokenChunk()) == ("Hello", None)
    assert form.echo(1, (5,), common_pb2.TokenChunk()) == ("", None)


async def test_a_stop_ends_a_choice(run_http: RunHttp) -> None:
    async with run_http(decode=[FakeInstance("decode", behaviour=Behaviour(stop_at=2))]) as http:
        answer = await http.openai.completions.create(model="fake", prompt=SHORT, max_tokens=9, seed=SEED)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text == text_of(expected_ids(SHORT, SEED, 3))


async def test_every_parameter_reaches_the_instance(run_http: RunHttp) -> None:
    async with run_http() as http:
        await http.openai.completions.create(
            model="fake",
            prompt=SHORT,
            max_tokens=3,
            temperature=0.5,
            top_p=0.9,
            frequency_penalty=0.1,
            presence_penalty=-0.2,
            logit_bias={"17": -3},
            stop=["x", "y"],
            user="a-user",
            extra_body={
                "top_k": 4,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "ignore_eos": True,
                "min_tokens": 2,
                "stop_token_ids": [11],
                "cache_salt": "salt",
                "priority": -7,
                "bad_words": ["ab"],
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
            },
        )
        wanted = http.rig.decode[0].recorded("decode")[0].detail.request
        sampling = wanted.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
        assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.1, -0.2, 1.1)
        assert (sampling.min_tokens, sampling.ignore_eos, sampling.skip_special_tokens) == (2, True, False)
        assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x", "y"], [11])
        assert (dict(sampling.logit_bias), list(sampling.bad_words)) == ({17: -3.0}, ["ab"])
        assert sampling.include_stop_str_in_output
        assert (wanted.cache_salt, wanted.priority) == ("salt", 7)  # vLLM's lower is the router's larger


async def test_a_null_means_not_given(run_http: RunHttp) -> None:
    async with run_http() as http:
        response = await http.post(prompt=SHORT, max_tokens=None, stop=None, tools=None, nonsense=None, seed=None)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("limits", [{"queue_timeout_s": 0.1}, {"max_queued": 0}], ids=str)
async def test_prompts_that_find_no_room_beside_each_other_take_turns(
    run_http: RunHttp, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_put_off, one_ended = 0, Siblings.one_ended

    async def put_off(siblings: Siblings) -> bool:
        nonlocal num_put_off
        num_put_off += 1
        return await one_ended(siblings)

    monkeypatch.setattr(Siblings, "one_ended", put_off)
    permits = asyncio.Semaphore(0)
    decode = FakeInstance("decode", behaviour=Behaviour(permits=permits))
    async with run_http(prefill=0, decode=[decode], admission={"max_requests": 1, **limits}) as http:
        asking = asyncio.create_task(http.post(prompt=[SHORT, PROMPT, SHORT, PROMPT], max_tokens=2))
        await until(lambda: num_put_off >= 3 or asking.done())
        for _ in range(8):
            permits.release()
        answer = (await asking).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3], answer
        assert answer["usage"]["completion_tokens"] == 8
        assert not http.rig.app.admission.num_rejected, "all were answered"


async def test_prompts_that_other_requests_leave_no_room_are_a_429(run_http: RunHttp) -> None:
    permits = asyncio.Semaphore(0)
    decode = FakeInstance("decode", behaviour=Behaviour(permits=permits))
    limits = {"max_requests": 1, "queue_timeout_s": 0.1}
    async with run_http(prefill=0, decode=[decode], admission=limits) as http:
        running = asyncio.create_task(http.post(prompt=SHORT, max_tokens=2))
        await decode.until("decode")
        assert (await http.post(prompt=[SHORT, PROMPT], max_tokens=2)).status_code == 429
        permits.release()
        permits.release()
        assert (await running).status_code == 200


def bos_before_bytes() -> Tokenizer:
    """Llama 3's way."""
    backend = byte_level_backend()
    bos = "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return Tokenizer(backend.to_str(), BYTE_LEVEL_CONFIG)


@pytest.mark.parametrize("make", [bos_before_bytes, byte_fallback])
def test_text_offsets_of_an_echo_end_where_the_own_text_begins(make: Callable[[], Tokenizer]) -> None:
    """What a tokenizer adds is before the client's text: a first token, and in Llama 2's way a space."""
    tokenizer, given = make(), "hello world"
    form = CompletionFormat(
        CompletionBody.parse(b'{"prompt": "hello world", "logprobs": 0, "echo": true}'), TokenTexts(tokenizer)
    )
    ids = tuple(tokenizer.encode(given))
    chunk = common_pb2.TokenChunk()
    chunk.prompt_logprobs.add()
    for token_id in ids[1:]:
        chunk.prompt_logprobs.add().candidates.add(token_id=token_id, logprob=-1.0, rank=1)
    text, columns = form.echo(0, ids, chunk)
    assert text == given
    assert columns is not None
    num_left = [len("".join(columns["tokens"][index:])) for index in range(len(ids))]
    assert num_left[0] > len(text)
    assert columns["text_offset"] == [max(len(text) - number, 0) for number in num_left]


@pytest.mark.parametrize("num_at_once", [1, 2, 3, 100])
def test_text_offsets_do_not_depend_on_how_much_text_is_delivered_with_the_tokens(num_at_once: int) -> None:
    """What may become a stop string, or is a part of a character, comes later; special tokens are left out."""
    tokenizer = byte_level()
    hidden = min(tokenizer.special_ids)
    assert tokenizer.token_bytes is not None
    form = CompletionFormat(CompletionBody.parse(b'{"prompt": "x", "logprobs": 0}'), TokenTexts(tokenizer))
    all_ids = [*tokenizer.encode("It is\n漢字."), hidden, *tokenizer.encode("\n\tYes")]
    offset, offsets = TextOffset(0, tokenizer), list[int]()
    for at in range(0, len(all_ids), num_at_once):
        chunk = common_pb2.TokenChunk(token_ids=all_ids[at : at + num_at_once])
        for token_id in chunk.token_ids:
            chunk.logprobs.add().candidates.add(token_id=token_id, logprob=-1.0, rank=1)
        columns = form.logprobs(chunk, offset)
        assert columns is not None
        offsets += columns["text_offset"]
    data = [tokenizer.token_bytes.of(one) for one in all_ids]
    data[all_ids.index(hidden)] = b""
    assert offsets == [len(b"".join(data[:number]).decode(errors="ignore")) for number in range(len(data))]


def bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """A token for each byte."""
    table = tokenizer.token_bytes
    assert table is not None
    ids = {table.of(one): one for one in range(tokenizer.vocab_size)}
    return [ids[data[at : at + 1]] for at in range(len(data))]


@pytest.mark.parametrize(
    ("make", "prompt", "output"),
    [
        (byte_level, "ab€".encode()[:4], "ab€".encode()[4:] + b"xyz"),
        (byte_fallback, "ab😀".encode()[:5], "ab😀".encode()[5:] + b"xyz"),
        (byte_fallback, b"ab", "😀".encode()[:3] + b"xyz"),
        (byte_fallback, None, "hello world"),
        (word_piece, "hello", "hello world hello"),
    ],
    ids=["a prompt within a character", "with byte fallback", "no characters", "a prompt without text", "words"],
)
def test_text_offsets_are_those_in_the_text(
    make: Callable[[], Tokenizer], prompt: str | bytes | None, output: str | bytes
) -> None:
    tokenizer = make()

    def ids_of(text: str | bytes) -> list[int]:
        return (
            bytes_of(tokenizer, text) if isinstance(text, bytes) else tokenizer.encode(text, add_special_tokens=False)
        )

    given, ids = ids_of(prompt) if prompt is not None else [tokenizer.bos_token_id or 0], ids_of(output)
    body = CompletionBody.parse(json.dumps({"prompt": given, "logprobs": 0, "echo": True}).encode())
    form, chunk = CompletionFormat(body, TokenTexts(tokenizer)), common_pb2.TokenChunk()
    for positions, one in [(chunk.prompt_logprobs, given), (chunk.logprobs, ids)]:
        for token_id in one:
            positions.add().candidates.add(token_id=token_id, logprob=-1.0, rank=1)
    echo, echoed = form.echo(0, tuple(given), chunk)
    call: Any = SimpleNamespace(prompt=tuple(given), request=SimpleNamespace(params=SamplingParams()))
    own = form.logprobs(chunk, form.offset(len(echo), call))
    assert echoed is not None
    assert own is not None
    alone = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    behind = IncrementalDetokenizer(tokenizer, prompt=given)
    assert echoed["text_offset"] == [*accumulate((len(alone.push([one])) for one in given), initial=0)][:-1]
    assert own["text_offset"] == [*accumulate((len(behind.push([one])) for one in ids), initial=len(echo))][:-1]


def test_of_candidates_with_one_text_the_chosen_ones_value_counts() -> None:
    """Parts of characters all have the text U+FFFD."""
    tokenizer = byte_level()
    candidates = common_pb2.TokenLogprobs()
    for rank, token_id in enumerate(bytes_of(tokenizer, b"\xe2\xc3A"), 1):
        candidates.candidates.add(token_id=token_id, logprob=-float(rank), rank=rank)
    columns = completion_logprobs(TokenTexts(tokenizer), [candidates.candidates], TextOffset(), 3)
    assert (columns["tokens"], columns["token_logprobs"]) == (["\ufffd"], [-1.0])
    assert columns["top_logprobs"] == [{"\ufffd": -1.0, "A": -3.0}]
