"""Greedy tokens of the aggregated engine against transformers, in float32, on every path that could change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams, model_runner
from tandem.demo import MODEL_DIR
from tests.builders import lively_checkpoint
from tests.oracle import GreedyOracle, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gpt_oss")


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"dtype": "float32", "num_gpu_blocks_override": 4096, **options})


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Token ids for each prompt; nothing may stay behind in the engine."""
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    load = llm.core.load
    assert (load.running_blocks, load.held_blocks, load.num_running, load.num_waiting) == (0, 0, 0, 0)
    return [answer.outputs[0].token_ids for answer in answers]


def generate_with_logprobs(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Token ids and their log-probabilities."""
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        (one.token_ids, [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)])
        for one in outputs
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> GreedyOracle:
    return GreedyOracle(checkpoint)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(12, longest=600, vocab_size=1024, seed=1)


@pytest.fixture(scope="module")
def reference(checkpoint: Path, oracle: GreedyOracle, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens, checked against transformers once; the variations below must give the very same."""
    outputs = generate(make_llm(checkpoint), prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.check(prompt, output)
    return outputs


def assert_prompts_at_once_equal_transformers(folder: Path, longest: int, num_prompts: int = 50) -> list[list[int]]:
    llm = make_llm(folder)
    prompts = random_prompts(num_prompts, longest=longest, vocab_size=llm.core.info.vocab_size)
    oracle = GreedyOracle(folder, torch.float64)
    outputs = generate_with_logprobs(llm, prompts)
    for prompt, (token_ids, logprobs) in zip(prompts, outputs, strict=True):
        assert len(token_ids) == 64
        oracle.check(prompt, token_ids, logprobs)
    return [token_ids for token_ids, _ in outputs]


@pytest.mark.parametrize(
    ("architecture", "num_prompts"),
    [
        *((name, 12) for name in ARCHITECTURES),
        *(pytest.param(name, 50, marks=pytest.mark.slow) for name in (*ARCHITECTURES, "mixtral")),
    ],
)
def test_prompts_at_once_equal_transformers(architecture: str, num_prompts: int, tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, architecture)
    outputs = assert_prompts_at_once_equal_transformers(folder, 600, num_prompts)
    assert len({token for output in outputs for token in output}) >= 50, "the output does not vary: nothing was tested"


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3_moe", "gpt_oss"])
def test_a_gpu_gives_the_tokens_of_transformers(architecture: str, eager: bool, tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, architecture)
    llm = make_llm(folder, device="cuda", enforce_eager=eager)
    assert llm.core.info.attention_backend == "triton"
    prompts, oracle = random_prompts(20, longest=300, vocab_size=1000), GreedyOracle(folder)
    for prompt, (token_ids, logprobs) in zip(prompts, generate_with_logprobs(llm, prompts), strict=True):
        oracle.check(prompt, token_ids, logprobs)


@pytest.mark.slow
def test_fifty_prompts_at_once_equal_transformers_with_the_demo_model() -> None:
    """Ten times the weights of the random models: prompts up to 200 tokens, in several chunks all the same."""
    assert_prompts_at_once_equal_transformers(MODEL_DIR, longest=200)


@pytest.mark.parametrize("budget", [33, *(pytest.param(size, marks=pytest.mark.slow) for size in (16, 100, 512))])
def test_chunk_budget_does_not_change_tokens(
    checkpoint: Path, prompts: list[list[int]], reference: list[list[int]], budget: int
) -> None:
    assert generate(make_llm(checkpoint, max_num_batched_tokens=budget), prompts) == reference


def test_a_step_without_a_token_waits_for_the_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks may be handed over as soon as it has ended."""
    llm = make_llm(checkpoint, max_num_batched_tokens=16)
    waits = []
    monkeypatch.setattr(model_runner, "_synchronize", lambda device: waits.append(llm.core.load.num_steps))
    generate(llm, [[*range(5, 5 + 16 * 3 + 1)]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert waits == [0, 1, 2], "of the steps 0 to 5 the first three compute a chunk alone"


@pytest.mark.parametrize("block_size", [32, pytest.param(8, marks=pytest.mark.slow)])
def test_block_size_does_not_change_tokens(
    checkpoint: Path, prompts: list[list[int]], reference: list[list[int]], block_size: int
) -> None:
    assert generate(make_llm(checkpoint, block_size=block_size), prompts) == reference


def test_prefix_cache_hits_do_not_change_tokens(
    checkpoint: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    llm = make_llm(checkpoint)
    generate(llm, prompts)
    computed = llm.core.load.num_prefilled_tokens
    assert generate(llm, prompts) == reference
    repeated = llm.core.load.num_prefilled_tokens - computed
    assert repeated <= 16 * len(prompts), "the second time at most one block of each prompt is computed"


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_a_prefix_that_the_same_step_computes_does_not_change_tokens(architecture: str, tmp_path: Path) -> None:
    """Twelve prompts with one beginning arrive at once; mistral's layers have a sliding window."""
    options: dict[str, Any] = {"sliding_window": 100} if architecture == "mistral" else {}
    folder = lively_checkpoint(tmp_path, architecture, **options)
    *ends, common = sorted(random_prompts(13, longest=200, vocab_size=1000, seed=5), key=len)
    prompts = [[*common, *end] for end in ends]
    alone = generate(make_llm(folder, enable_prefix_caching=False), prompts)
    llm = make_llm(folder, max_num_batched_tokens=4096)
    assert generate(llm, prompts) == alone
    most = len(common) + sum(map(len, ends)) + 16 * len(prompts)
    assert llm.core.load.num_prefilled_tokens <= most < sum(map(len, prompts)), "the beginning is computed once"


def test_preemption_does_not_change_tokens(
    checkpoint: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    llm = make_llm(checkpoint, num_gpu_blocks_override=64)
    assert generate(llm, prompts) == reference
    assert llm.core.load.num_preemptions > 0


def test_a_pool_of_barely_enough_blocks_serves_the_longest_request(
    checkpoint: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    longest = max(len(prompt) for prompt in prompts) + 64
    llm = make_llm(checkpoint, num_gpu_blocks_override=-(-longest // 16), max_model_len=longest)
    assert generate(llm, prompts) == reference


def test_one_by_one_gives_the_tokens_of_the_batch(
    checkpoint: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    assert [generate(llm, [prompt])[0] for prompt in prompts[:6]] == reference[:6]


def test_threads_do_not_change_tokens(checkpoint: Path, prompts: list[list[int]], reference: list[list[int]]) -> None:
    before = torch.get_num_threads()
    try:
        assert generate(make_llm(checkpoint, num_threads=2), prompts[:4]) == reference[:4]
    finally:
        torch.set_num_threads(before)


def test_reference_attention_gives_the_tokens_of_the_compiled_one(
    checkpoint: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    llm = make_llm(checkpoint, attention_backend="reference")
    assert llm.core.info.attention_backend == "reference"
    assert generate(llm, prompts[:6]) == reference[:6]


def test_a_float16_checkpoint_runs_in_float16_with_the_same_bits_on_every_path(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "qwen2", dtype=torch.float16)
    prompts = random_prompts(5, longest=90, vocab_size=1000)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
    llm = make_llm(folder, dtype="auto", max_num_batched_tokens=33, num_gpu_blocks_override=14)
    assert llm.core.info.model_identity.dtype == "float16"
    together = outcomes(llm, prompts, params)
    assert llm.core.load.num_preemptions > 0
    assert outcomes(llm, prompts[:2], params) == together[:2], "from the prefix cache"
    alone = make_llm(folder, dtype="auto", enable_prefix_caching=False)
    assert [outcomes(alone, [prompt], params)[0] for prompt in prompts] == together
    errors = {dtype: mean_error(make_llm(folder, dtype=dtype), folder, prompts[1]) for dtype in ("float16", "bfloat16")}
    assert errors["float16"] < errors["bfloat16"] / 3


def outcomes(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[list[int], float | None]]:
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in answers]


def mean_error(llm: LLM, folder: Path, prompt: list[int]) -> float:
    """Of the log-probabilities of a prompt's tokens, against transformers in float32."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [answer] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    found = [entry[token].logprob for token, entry in zip(prompt, answer.prompt_logprobs or [], strict=True) if entry]
    expected = GreedyOracle(folder).logits(prompt[:1], prompt[1:]).log_softmax(-1)
    pairs = zip(found, prompt[1:], expected, strict=True)
    return sum(abs(one - row[token].item()) for one, token, row in pairs) / len(found)
