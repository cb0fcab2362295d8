"""Log-probabilities of the prompt: equal to transformers', in any chunks, with cached blocks and after preemption."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine import LLM, SamplingParams
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, RemoteKV, TokensEvent
from engine.llm import RequestOutput
from tests.builders import lively_checkpoint
from tests.oracle import GreedyOracle, random_prompts

PARAMS = SamplingParams(
    temperature=0.0, prompt_logprobs=3, repetition_penalty=1.2, logit_bias={7: 5.0}, max_tokens=12, ignore_eos=True
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> GreedyOracle:
    return GreedyOracle(checkpoint)


def make_llm(checkpoint: Path, *, num_blocks: int = 512, max_num_batched_tokens: int = 512) -> LLM:
    return LLM(
        checkpoint,
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def check(oracle: GreedyOracle, prompt: list[int], answer: RequestOutput) -> None:
    """Every position but the first has its token first, and its token and the 3 best with transformers' values."""
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(prompt)
    if len(prompt) == 1:
        return
    expected = oracle.logits(prompt[:1], prompt[1:]).log_softmax(dim=-1)
    for position, entries in enumerate(answer.prompt_logprobs[1:]):
        assert entries is not None
        assert next(iter(entries)) == prompt[position + 1]
        assert set(entries) == {prompt[position + 1], *expected[position].topk(3).indices.tolist()}
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[position, token_id]), abs=1e-4)


@pytest.mark.parametrize("chunk", [512, 33])
def test_they_are_transformers_whole_or_in_chunks(checkpoint: Path, oracle: GreedyOracle, chunk: int) -> None:
    prompts = random_prompts(6, longest=150, vocab_size=1024, seed=chunk)
    llm = make_llm(checkpoint, max_num_batched_tokens=chunk)
    plain = llm.generate(prompts, msgspec.structs.replace(PARAMS, prompt_logprobs=None), use_tqdm=False)
    # STEP: the prefix cache is warm now, and not made use of
    for prompt, answer, other in zip(prompts, llm.generate(prompts, PARAMS, use_tqdm=False), plain, strict=True):
        check(oracle, prompt, answer)
        assert answer.num_cached_tokens == 0
        assert other.prompt_logprobs is None
        assert answer.outputs[0].token_ids == other.outputs[0].token_ids
    assert not llm.core._runner._prompt_logprobs._collected


def test_preemption_while_the_prompt_is_computed_leaves_no_gap(checkpoint: Path, oracle: GreedyOracle) -> None:
    prompts = random_prompts(8, longest=120, vocab_size=1024, seed=1)
    llm = make_llm(checkpoint, num_blocks=14, max_num_batched_tokens=24)
    params = msgspec.structs.replace(PARAMS, max_tokens=40)
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert llm.core.load.num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        check(oracle, prompt, answer)


def test_several_choices_tell_them_once(checkpoint: Path, oracle: GreedyOracle) -> None:
    [prompt] = random_prompts(2, longest=40, vocab_size=1024, seed=2)[1:]
    params = SamplingParams(n=3, prompt_logprobs=3, max_tokens=4, seed=1)
    llm = make_llm(checkpoint)
    [answer] = llm.generate([prompt], params, use_tqdm=False)
    check(oracle, prompt, answer)
    num_computed = llm.core.load.num_prefilled_tokens
    assert num_computed == len(prompt) + 2 * (len(prompt) - 32), "the other choices use the first one's blocks"
    assert answer.num_cached_tokens == 0


def test_they_are_not_returned_again_after_a_resumption(checkpoint: Path) -> None:
    core: EngineCore = make_llm(checkpoint).core
    for request_id, fields in {
        "first": {},
        "resumed": {"output_token_ids": [5]},
        "sister": {"choice": 1},
        "handed over": {"remote_kv": RemoteKV(transfer_id="t", reservation_s=0.1)},
    }.items():
        spec = EngineRequest(request_id=request_id, prompt_token_ids=[3, 4, 5], params=PARAMS, **fields)  # type: ignore[arg-type]
        core.handle(AddRequest(spec))
    returned: dict[str, int] = {}
    for _ in range(40):
        for event in core.step():
            if isinstance(event, TokensEvent):
                returned[event.request_id] = returned.get(event.request_id, 0) + len(event.prompt_logprobs)
    assert (returned["first"], returned["resumed"], returned["sister"], returned.get("handed over", 0)) == (3, 0, 0, 0)
