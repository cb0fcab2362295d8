"""Penalties, biases and log-probabilities through a whole stack equal those of the aggregated engine."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest

from engine import LLM, SamplingParams
from engine.llm import CompletionOutput, Logprob
from protos.tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tandem import Client
from tandem.client.completion import Choice, TokenLogprob
from tandem.client.request import sampling_params
from tests.lively import random_prompt
from tests.system.rig import Rig
from tests.system.stacks import on_stack

pytestmark = on_stack("pair shared_storage")
PENALISED: dict[str, Any] = {
    "temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    "logit_bias": {7: 2.0}, "bad_word_ids": [[50], [60, 61]], "logprobs": 3, "seed": 5,
    "max_tokens": 24, "ignore_eos": True,
}  # fmt: skip
GREEDY: dict[str, Any] = {
    "temperature": 0.0, "repetition_penalty": 1.3, "allowed_token_ids": list(range(20, 300)), "logprobs": 0,
    "max_tokens": 24, "ignore_eos": True,
}  # fmt: skip


def expected(llm: LLM, prompt: list[int], sampling: dict[str, Any]) -> CompletionOutput:
    [answer] = llm.generate([prompt], SamplingParams(**sampling), use_tqdm=False)
    return answer.outputs[0]


def assert_same(choice: Choice, output: CompletionOutput) -> None:
    assert list(choice.token_ids) == output.token_ids
    assert choice.text == output.text
    assert output.logprobs is not None
    assert_same_logprobs(choice.logprobs, output.logprobs)


def assert_same_logprobs(found: tuple[tuple[TokenLogprob, ...], ...], expected: list[dict[int, Logprob]]) -> None:
    for position, entries in zip(found, expected, strict=True):
        assert [(one.token_id, one.rank) for one in position] == [(one, entry.rank) for one, entry in entries.items()]
        assert [one.logprob for one in position] == pytest.approx([one.logprob for one in entries.values()], abs=1e-4)


@pytest.mark.parametrize("length", [17, 150])
@pytest.mark.parametrize("sampling", [PENALISED, GREEDY], ids=["sampled", "greedy"])
def test_a_handed_over_answer_is_the_aggregated_engines(
    rig: Rig, llm: LLM, prompts: random.Random, length: int, sampling: dict[str, Any]
) -> None:
    prompt = random_prompt(prompts, length)
    with Client(rig.address) as client:
        pieces = list(client.stream(prompt, **sampling))
        completion = client.generate(prompt, **sampling)
    output = expected(llm, prompt, sampling)
    assert output.logprobs is not None
    assert_same(completion.choices[0], output)
    assert completion.usage.external_tokens > 0
    assert pieces[0].logprobs, "the first token, which prefill samples, has its own"
    assert_same_logprobs(tuple(position for piece in pieces for position in piece.logprobs), output.logprobs)


@pytest.mark.parametrize("num_emitted", [0, 1, 11, 23])
def test_a_decode_instance_alone_continues_after_any_emitted_ids(
    rig: Rig, llm: LLM, prompts: random.Random, num_emitted: int
) -> None:
    """As the router requests it for an aggregated request (nothing emitted) and for a resumed one."""
    prompt = random_prompt(prompts, 70)
    output = expected(llm, prompt, PENALISED)
    start = decode_pb2.DecodeStart(
        request=common_pb2.InstanceRequest(
            request_id="resumed",
            stream_epoch=2,
            prompt_token_ids=prompt,
            emitted_token_ids=output.token_ids[:num_emitted],
            sampling=sampling_params(PENALISED),
        )
    )
    with grpc.insecure_channel(rig.stack.instances["decode-0"]) as channel:
        decode: Any = decode_pb2_grpc.DecodeServiceStub(channel).Decode  # type: ignore[arg-type]
        answers = [answer.tokens for answer in decode(iter([decode_pb2.DecodeRequest(start=start)]), timeout=30)]
    assert answers[0].token_index == num_emitted
    assert [token_id for chunk in answers for token_id in chunk.token_ids] == output.token_ids[num_emitted:]
    found = tuple(
        tuple(TokenLogprob(one.token_id, one.logprob, one.rank) for one in position.candidates)
        for chunk in answers
        for position in chunk.logprobs
    )
    assert output.logprobs is not None
    assert_same_logprobs(found, output.logprobs[num_emitted:])


def test_the_prompts_logprobs_come_with_the_first_token(rig: Rig, llm: LLM, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 150)
    sampling: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    [answer] = llm.generate([prompt], SamplingParams(**sampling), use_tqdm=False)
    with Client(rig.address) as client:
        pieces = list(client.stream(prompt, **sampling))
        completion = client.generate(prompt, **sampling)
    assert [bool(piece.prompt_logprobs) for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    assert completion.prompt_logprobs[0] == ()
    assert answer.prompt_logprobs is not None
    assert_same_logprobs(completion.prompt_logprobs[1:], [entries for entries in answer.prompt_logprobs if entries])


def test_a_bad_word_is_not_generated(rig: Rig, llm: LLM, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 40)
    sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    assert llm.tokenizer is not None
    whole = expected(llm, prompt, sampling)
    word = next(text for one in whole.token_ids if (text := llm.tokenizer.decode([one])).isalnum())
    sampling["bad_words"] = [word]
    with Client(rig.address) as client:
        completion = client.generate(prompt, **sampling)
    assert list(completion.token_ids) == expected(llm, prompt, sampling).token_ids != whole.token_ids
    assert llm.tokenizer.encode(word, add_special_tokens=False)[0] not in completion.token_ids
