"""Penalties and log-probabilities through the engine: equal to transformers', and the same at another instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, TokenLogprob, TokensEvent
from engine.llm import CompletionOutput
from tests.builders import lively_checkpoint
from tests.oracle import GreedyOracle, random_prompts
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder

NUM_TOKENS = 40
TOLERANCE = 1e-4
"""Of a log-probability: the same arithmetic in another order."""


def params_for(index: int) -> SamplingParams:
    """A different mixture for each request of a batch; some ask for nothing."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 5},
        {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 1.5, "frequency_penalty": 0.7, "logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 1.2, "top_k": 50, "repetition_penalty": 0.8, "logit_bias": {7: 3.0, 9: -50.0}, "logprobs": 0},
        {"temperature": 0.8, "allowed_token_ids": tuple(range(100, 400)), "frequency_penalty": 2.0, "logprobs": 20},
    ]
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=index, **ways[index % len(ways)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(32, longest=100, vocab_size=1024, seed=4)


@pytest.fixture(scope="module")
def together(checkpoint: Path, prompts: list[list[int]]) -> list[CompletionOutput]:
    """All prompts in one batch, with room for all."""
    return run(checkpoint, prompts)


def run(checkpoint: Path, prompts: list[list[int]], *, num_blocks: int = 1024) -> list[CompletionOutput]:
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=num_blocks)
    answers = llm.generate(prompts, [params_for(index) for index in range(len(prompts))], use_tqdm=False)
    assert (llm.core.load.num_preemptions > 0) == (num_blocks < 1024)
    return [answer.outputs[0] for answer in answers]


def assert_same(found: CompletionOutput, expected: CompletionOutput) -> None:
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


# Against transformers


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_greedy_with_a_repetition_penalty_is_transformers(
    checkpoint: Path, prompts: list[list[int]], penalty: float
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=512)
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain = msgspec.structs.replace(params, repetition_penalty=1.0)
    asked = prompts[:5]
    answers = [answer.outputs[0].token_ids for answer in llm.generate(asked, params, use_tqdm=False)]
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            repetition_penalty=penalty,
            max_new_tokens=NUM_TOKENS,
        )
        assert answer == expected[0, len(prompt) :].tolist()
    assert answers != [answer.outputs[0].token_ids for answer in llm.generate(asked, plain, use_tqdm=False)]


def test_logprobs_are_transformers_of_the_raw_logits(
    checkpoint: Path, prompts: list[list[int]], together: list[CompletionOutput]
) -> None:
    oracle = GreedyOracle(checkpoint)
    for index, (prompt, output) in enumerate(zip(prompts[:15], together, strict=False)):
        num = params_for(index).logprobs
        if num is None:
            assert (output.logprobs, output.cumulative_logprob) == (None, None)
            continue
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == NUM_TOKENS
        expected = oracle.logits(prompt, output.token_ids).log_softmax(dim=-1)
        for position, entries in enumerate(output.logprobs):
            token_id = output.token_ids[position]
            assert next(iter(entries)) == token_id
            best = expected[position].topk(num).indices.tolist()
            assert set(entries) == {token_id, *best}
            assert [one for one, entry in entries.items() if entry.rank == 1] == best[:1] or not num
            assert entries[token_id].rank == 1 + int((expected[position] > expected[position, token_id]).sum())
            for one, entry in entries.items():
                assert entry.logprob == pytest.approx(float(expected[position, one]), abs=TOLERANCE)
        own = expected.gather(1, torch.tensor(output.token_ids)[:, None]).sum()
        assert output.cumulative_logprob == pytest.approx(float(own), abs=TOLERANCE * NUM_TOKENS)


def test_penalties_and_allowed_ids_are_felt(together: list[CompletionOutput]) -> None:
    for index, output in enumerate(together):
        params = params_for(index)
        if params.repetition_penalty > 1 or params.presence_penalty:
            assert len(set(output.token_ids)) > 0.9 * NUM_TOKENS
        if params.allowed_token_ids:
            assert set(output.token_ids) <= set(params.allowed_token_ids)
        if params.logit_bias:
            assert 9 not in output.token_ids


# The same on every path


def test_a_batch_of_32_gives_what_each_gives_alone(
    checkpoint: Path, prompts: list[list[int]], together: list[CompletionOutput]
) -> None:
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=512)
    for index in range(10):
        [alone] = llm.generate([prompts[index]], params_for(index), use_tqdm=False)
        assert_same(alone.outputs[0], together[index])


def test_preemption_changes_neither_tokens_nor_logprobs(
    checkpoint: Path, prompts: list[list[int]], together: list[CompletionOutput]
) -> None:
    for found, expected in zip(run(checkpoint, prompts, num_blocks=40), together, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_an_answer_resumed_at_any_position_goes_on_alike(
    checkpoint: Path, prompts: list[list[int]], together: list[CompletionOutput], index: int
) -> None:
    """What a router does when an instance dies: prompt and emitted ids go to another one, as separate fields."""
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=1024), wake=lambda: None)
    whole = together[index]
    for cut in range(1, NUM_TOKENS):
        spec = EngineRequest(
            request_id=str(cut),
            prompt_token_ids=prompts[index],
            output_token_ids=whole.token_ids[:cut],
            params=params_for(index),
            seed=index,
        )
        core.handle(AddRequest(spec))
    rests = gathered(core, NUM_TOKENS - 1)
    core.shutdown()
    undivided = [[(token_id, one.logprob) for token_id, one in entries.items()] for entries in whole.logprobs or []]
    for cut in range(1, NUM_TOKENS):
        token_ids, logprobs = rests[str(cut)]
        assert token_ids == whole.token_ids[cut:]
        assert [[(one.token_id, one.logprob) for one in found] for found in logprobs] == undivided[cut:]


def gathered(core: EngineCore, num_requests: int) -> dict[str, tuple[list[int], list[list[TokenLogprob]]]]:
    """Run until all have finished: by request id, the ids and what goes with them."""
    answers: dict[str, tuple[list[int], list[list[TokenLogprob]]]] = {}
    num_finished = 0
    while num_finished < num_requests:
        for event in core.step():
            assert isinstance(event, TokensEvent)
            token_ids, logprobs = answers.setdefault(event.request_id, ([], []))
            token_ids += event.token_ids
            logprobs += event.logprobs
            num_finished += event.finish_reason is not None
    return answers


# What a person sees


def test_the_offline_answer_has_vllms_shape_and_ends_with_a_stop_string(tmp_path: Path) -> None:
    backend = byte_level_backend()
    folder = lively_checkpoint(tmp_path / "model", vocab_size=backend.get_vocab_size(), bos_token_id=None)
    write_folder(folder, backend, BYTE_LEVEL_CONFIG)
    llm = LLM(folder, dtype="float32", num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=30, ignore_eos=True)
    [whole] = llm.generate("Once upon a time", params, use_tqdm=False)
    [output] = whole.outputs
    assert llm.tokenizer is not None
    assert output.logprobs is not None
    assert len(output.logprobs) == 30
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert list(entries) == sorted(entries, key=lambda one: entries[one].rank or 0), "greedy: best first"
        assert entries[token_id].decoded_token == llm.tokenizer.decode([token_id], skip_special_tokens=False)
    # STEP: a stop string cuts ids and log-probabilities alike
    stop = output.text[len(output.text) // 2 :][:2]
    [cut] = llm.generate("Once upon a time", msgspec.structs.replace(params, stop=(stop,)), use_tqdm=False)
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].logprobs == output.logprobs[: len(cut.outputs[0].token_ids)]


def test_parameters_that_exclude_every_token_end_their_request_alone(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=512)
    impossible = SamplingParams(allowed_token_ids=(3, 4), bad_word_ids=((3,), (4, 4)), max_tokens=5, ignore_eos=True)
    [failed] = llm.generate(prompts[:1], impossible, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "exclude every token" in str(failed.outputs[0].error)
    [answer] = llm.generate(prompts[:1], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 5
