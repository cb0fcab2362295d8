"""Speculation changes when tokens come, never which: against the same engine without drafts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.core.messages import EngineRequest
from engine.errors import NotSupported
from engine.scheduling.drafts import Drafter
from engine.scheduling.request import Request
from tandem.demo import MODEL_DIR
from tests.builders import lively_checkpoint
from tests.drafting import all_is_drafted
from tests.oracle import random_prompts

__all__ = ["all_is_drafted"]
pytestmark = pytest.mark.usefixtures("all_is_drafted")
NUM_TOKENS = 48
FEW = list(range(20, 23))
"""Of which outputs repeat themselves, so that look-ups find something."""
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    {"temperature": 0.9, "logit_bias": {7: 3.0, 9: -50.0}, "logprobs": 0},
    {"temperature": 1.2, "n": 3},
    {"temperature": 0.9, "stop_token_ids": list(range(100)), "min_tokens": 20},
    {"temperature": 0.0, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 0},
    {"temperature": 1.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "frequency_penalty": -0.8, "bad_word_ids": [[7], [20, 21], *([i, i] for i in range(250))]},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["alpha", "alphabet", "beta"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5},
    },
    "required": ["name", "kind", "sizes"],
}
CONSTRAINED: list[dict[str, Any]] = [
    {"temperature": 0.0, "json_schema": SCHEMA},
    {"temperature": 1.0, "json_schema": SCHEMA, "logprobs": 2, "n": 2},
    {"temperature": 0.9, "json_object": True, "repetition_penalty": 1.1},
    {"temperature": 0.0, "regex": r"([a-f]{3} [0-9]+; ){4}", "min_tokens": 12},
    {"temperature": 1.3, "choice": ["one of these", "one of those", "another"]},
    {"temperature": 0.8, "grammar": 'root ::= "(" root ")" | [a-z ]*', "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 1.0},
]


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"dtype": "float32", "num_blocks": 2048, **options})


def params_of(index: int, ways: list[dict[str, Any]], **fields: Any) -> SamplingParams:
    way = ways[index % len(ways)]
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": index, **way, **fields})


Answers = list[Any]


def generate(llm: LLM, prompts: list[list[int]], ways: list[dict[str, Any]] = WAYS, **fields: Any) -> Answers:
    """All that is reported of each output."""
    params = [params_of(index, ways, **fields) for index in range(len(prompts))]
    answers = llm.generate(prompts, params, use_tqdm=False)
    load = llm.core.load
    assert (load.running_blocks, load.held_blocks, load.num_running, load.num_waiting) == (0, 0, 0, 0)
    return [
        (
            answer.prompt_logprobs,
            [(one.token_ids, one.logprobs, one.finish_reason, one.stop_reason) for one in answer.outputs],
        )
        for answer in answers
    ]


class Known:
    """Predicts what the stream is known to become, with errors."""

    def __init__(self, num_prompt_tokens: int, token_ids: list[int], seed: int) -> None:
        rng = Random(seed)
        self._first = num_prompt_tokens
        self._known = [token_id if rng.random() < 0.8 else 5 for token_id in token_ids]

    def predict(self, token_ids: list[int], most: int) -> list[int]:
        first = len(token_ids) - self._first
        return self._known[first : first + max(most, 0)]


def draft_what_came(llm: LLM, prompts: list[list[int]], answers: Answers, most: int = 5) -> None:
    """From now on, with any number of tokens in a step."""
    known = {
        tuple(prompt): [token_ids for token_ids, *_ in outputs]
        for prompt, (_, outputs) in zip(prompts, answers, strict=True)
    }

    def predictor(request: Request) -> Known:
        prompt = request.spec.prompt_token_ids
        return Known(len(prompt), known[tuple(prompt)][request.spec.choice], request.arrival)

    llm.core.scheduler.drafter = Drafter(
        most, max_num_rows=200, max_model_len=llm.core.info.max_model_len, predictor=predictor
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(24, longest=150, vocab_size=1000, seed=8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 33},
        {"num_blocks": 40},
        pytest.param({"block_size": 32, "num_threads": 1}, marks=pytest.mark.slow),
        pytest.param({"attention_backend": "reference"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_change_nothing(checkpoint: Path, prompts: list[list[int]], options: dict[str, Any]) -> None:
    expected = generate(make_llm(checkpoint, **options), prompts)
    llm = make_llm(checkpoint, num_speculative_tokens=5, **options)
    draft_what_came(llm, prompts, expected)
    assert generate(llm, prompts) == expected
    counters = llm.core.scheduler.counters
    assert counters.num_accepted_tokens > 200
    assert counters.num_draft_tokens - counters.num_accepted_tokens > 100, "hardly any was wrong"
    if options.get("num_blocks"):
        assert llm.core.load.num_preemptions > 0
    greedy = [0, len(WAYS), 2 * len(WAYS)]
    assert [generate(llm, prompts[index : index + 1])[0] for index in greedy] == [expected[index] for index in greedy]


@pytest.mark.parametrize(
    ("architecture", "options", "dtype"),
    [
        ("mistral", {"sliding_window": 40}, "bfloat16"),
        ("qwen3_moe", {}, "bfloat16"),
        ("gemma3_text", {}, "float32"),
        ("gpt2", {}, "float32"),
        pytest.param("mistral", {"sliding_window": 40}, "float32", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, "float32", marks=pytest.mark.slow),
        pytest.param("gemma3_text", {}, "bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt2", {}, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_nothing_in_any_architecture(
    architecture: str, options: dict[str, Any], dtype: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    llm = make_llm(lively_checkpoint(tmp_path, architecture, **options), dtype=dtype, num_speculative_tokens=5)
    llm.core.scheduler.drafter = Drafter()
    expected = generate(llm, prompts[:10])
    draft_what_came(llm, prompts, expected + [(None, [([],)])] * (len(prompts) - 10))
    assert generate(llm, prompts[:10]) == expected
    assert llm.core.scheduler.counters.num_accepted_tokens > 150


def test_looked_up_drafts_change_nothing(checkpoint: Path, prompts: list[list[int]]) -> None:
    fields: dict[str, Any] = {"allowed_token_ids": FEW, "logit_bias": None, "stop_token_ids": [], "min_tokens": 0}
    expected = generate(make_llm(checkpoint), prompts, **fields)
    llm = make_llm(checkpoint, speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    assert generate(llm, prompts, **fields) == expected
    assert llm.core.scheduler.counters.num_accepted_tokens > 300


def test_a_stop_string_inside_of_a_draft_ends_the_text_where_it_would() -> None:
    prompts = ["The tandem", "for x in range(10):"]
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
    llm = LLM(MODEL_DIR, num_speculative_tokens=6)
    whole = [answer.outputs[0].text for answer in llm.generate(prompts, SamplingParams(**fields), use_tqdm=False)]
    for cut in range(60, 100, 3):
        stops = [text[cut : cut + 5] for text in whole]
        params = [SamplingParams(**fields, stop=(stop,)) for stop in stops]
        for answer, text, stop in zip(llm.generate(prompts, params, use_tqdm=False), whole, stops, strict=True):
            [output] = answer.outputs
            assert (output.text, output.finish_reason, output.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert llm.core.scheduler.counters.num_accepted_tokens > 100


@pytest.mark.parametrize(
    ("options", "is_checked"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 33, "num_blocks": 24}, True),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 33, "num_blocks": 24}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_constrained_and_free_streams_in_one_batch_change_nothing(options: dict[str, Any], *, is_checked: bool) -> None:
    """Whether a draft ends before what its constraint does not admit, or has more."""
    prompts = random_prompts(len(CONSTRAINED) * 3, longest=60, vocab_size=1000, seed=9)
    llm = make_llm(MODEL_DIR, num_speculative_tokens=5, **options)
    num_admitted, llm.core.scheduler.drafter = llm.core.scheduler.drafter._num_admitted, Drafter()
    expected = generate(llm, prompts, CONSTRAINED, ignore_eos=False)
    num_preemptions = llm.core.load.num_preemptions
    draft_what_came(llm, prompts, expected)
    if is_checked:
        llm.core.scheduler.drafter._num_admitted = num_admitted
    assert generate(llm, prompts, CONSTRAINED, ignore_eos=False) == expected
    counters = llm.core.scheduler.counters
    assert counters.num_accepted_tokens > 300
    assert counters.num_draft_tokens - counters.num_accepted_tokens > 100
    assert (llm.core.load.num_preemptions > num_preemptions) == bool(options)


def test_an_engine_drafts_only_what_constraints_admit() -> None:
    llm, params = LLM(MODEL_DIR, num_speculative_tokens=5), SamplingParams(regex="a+b")
    assert params.constraint is not None
    grammar = llm.core._grammars.compiled(params.constraint)
    grammar.result()
    spec = EngineRequest(request_id="r", prompt_token_ids=[1], params=params, eos_token_ids=(0,))
    request = Request.from_spec(spec, arrival=0, fingerprint="00", grammar=grammar)
    assert llm.tokenizer is not None
    a, b, c = (llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    num_admitted = llm.core.scheduler.drafter._num_admitted
    assert [num_admitted(request, draft) for draft in ([a, a, c, a], [a, b, a], [b])] == [2, 2, 0]


def test_looked_up_drafts_of_constrained_streams_change_nothing() -> None:
    """A text that repeats its words, and a list of objects."""
    words = {"temperature": 0.7, "regex": "((red|green) (fish|bird)(, )?)*", "max_tokens": 150}
    objects = {"json_schema": {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}, "max_tokens": 300}
    ways: list[dict[str, Any]] = [words, {"temperature": 0.0, **objects}, {"temperature": 1.0, "top_p": 0.3, **objects}]
    prompts = random_prompts(6, longest=40, vocab_size=1000, seed=10)
    expected = generate(make_llm(MODEL_DIR), prompts, ways, ignore_eos=False)
    llm = make_llm(MODEL_DIR, num_speculative_tokens=5)
    assert generate(llm, prompts, ways, ignore_eos=False) == expected
    assert llm.core.scheduler.counters.num_accepted_tokens > 100


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "eagle", "num_speculative_tokens": 3}, "ngram"),
        ({"model": "small", "num_speculative_tokens": 3}, "ngram"),
        ({"method": "ngram"}, "num_speculative_tokens"),
    ],
)
def test_other_ways_to_speculate_are_named(checkpoint: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupported, match=message):
        make_llm(checkpoint, speculative_config=config)


def test_vllms_speculation_by_n_grams_is_ours(checkpoint: Path) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert make_llm(checkpoint, speculative_config=config).core.config.num_speculative_tokens == 3
