"""Rows 8-44 of the bad-input catalogue that concern ids, sampling values and lengths."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequest
from engine.sampling.params import SamplingParams, validate, validate_prompt

VOCAB, CONTEXT = 1000, 128


def check(*, num_prompt_tokens: int = 8, eos_token_ids: Sequence[int] = (), **fields: Any) -> SamplingParams:
    return validate(
        SamplingParams(**fields),
        vocab_size=VOCAB,
        max_model_len=CONTEXT,
        num_prompt_tokens=num_prompt_tokens,
        eos_token_ids=eos_token_ids,
    )


def test_defaults_are_vllms_and_pass() -> None:
    params = check()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.seed) == (16, 0, (), None)
    assert params.skip_special_tokens
    assert params.detokenize
    assert not params.ignore_eos


def test_a_string_or_lists_become_tuples() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_a_value_of_another_type_is_rejected_by_its_field(field: str) -> None:
    wrong: Any = object()
    with pytest.raises(InvalidRequest) as caught:
        check(**{field: wrong})
    assert caught.value.field == field


def test_params_travel_between_processes_unchanged() -> None:
    params = SamplingParams(stop=("\ufffd", "\0"), seed=2**64 - 1, temperature=0.7, stop_token_ids=(3,))
    lists = SamplingParams(logit_bias={7: -1.5}, allowed_token_ids=(1,), bad_words=("x",), bad_word_ids=((3,), (4, 5)))
    for sent in (params, lists):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=SamplingParams) == sent


NAN, INF = math.nan, math.inf
REFUSED: list[tuple[str, Any, str]] = [
    # row 19, 20
    ("max_tokens", 0, "max_tokens >= 1"),
    ("max_tokens", -1, "max_tokens >= 1"),
    ("max_tokens", 2**31 - 1, "prompt 8 + max_tokens 2147483647 > context 128"),
    ("max_tokens", 2**63 - 1, "> context 128"),
    ("max_tokens", 1.5, "not an integer"),
    ("max_tokens", True, "not an integer"),
    ("min_tokens", -1, "out of range"),
    # rows 22-23
    ("temperature", NAN, "must be finite"),
    *[("temperature", v, "0..2") for v in (INF, -INF, -0.1, 1e308, 2.01, 10**400, "hot", None, True)],
    # rows 25-29
    *[("top_p", v, "(0,1]") for v in (0, -1, 1.0001, NAN, "x")],
    *[("top_k", v, "1..1000") for v in (-2, 1001, 2**31, 0.5)],
    *[("min_p", v, "[0,1]") for v in (NAN, 2, -0.1)],
    *[("repetition_penalty", v, "[1e-09,2]") for v in (0, -1, NAN, INF, 2.1, 5e-324, 1e-45, 1e-37, 9e-10)],
    *[("frequency_penalty", v, "[-2,2]") for v in (2.01, -2.01, NAN)],
    *[("presence_penalty", v, "[-2,2]") for v in (2.01, -2.01, NAN)],
    # rows 30, 33, 35
    *[("n", v, "1..8") for v in (0, -1, 9, 10**9, 1.0)],
    *[("logprobs", v, "0..20") for v in (-1, 10**6)],
    *[("prompt_logprobs", v, "0..20") for v in (-1, 10**6)],
    *[("seed", v, "0..2^64-1") for v in (-1, 2**64)],
    # rows 36-37
    ("stop", [""], "stop[0] is empty"),
    ("stop", ["a", ""], "stop[1] is empty"),
    ("stop", ["x"] * 10_000, "at most 16"),
    ("stop", ["x" * 2**20], "1..256 bytes"),
    ("stop", ["\u00e9" * 129], "has 258 bytes"),
    ("stop", ["a\ud800"], "not valid Unicode"),
    ("stop", [7], "not a string"),
    ("stop", 7, "not a string or a list"),
    # row 40
    ("stop_token_ids", [5, VOCAB], "stop_token_ids[1]=1000 out of range 0..999"),
    ("stop_token_ids", [-1], "stop_token_ids[0]=-1 out of range 0..999"),
    ("stop_token_ids", [2**63 - 1], "out of range"),
    ("stop_token_ids", ["5"], "not an integer"),
    ("stop_token_ids", [1] * 129, "at most 128"),
    # rows 41-43
    ("allowed_token_ids", [], "empty"),
    ("allowed_token_ids", [VOCAB], "out of range 0..999"),
    ("logit_bias", {VOCAB: 1.0}, "out of range 0..999"),
    ("logit_bias", {1: NAN}, "[-100,100]"),
    ("logit_bias", {1: 1e9}, "[-100,100]"),
    ("logit_bias", dict.fromkeys(range(100_000), 1.0), "at most 1024"),
    ("ignore_eos", 1, "not a boolean"),
]


@pytest.mark.parametrize(("field", "value", "says"), REFUSED)
def test_a_bad_value_is_refused_by_its_name(field: str, value: Any, says: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest) as refusal:
        check(**{field: value})
    assert refusal.value.field == field
    assert says in str(refusal.value)
    assert len(str(refusal.value)) <= 512
    assert time.process_time() - start < 0.1


def test_prompt_logprobs_are_limited_by_the_whole_answer() -> None:
    def prompt_of(num_tokens: int, num: int) -> SamplingParams:
        params = SamplingParams(prompt_logprobs=num)
        return validate(params, vocab_size=VOCAB, max_model_len=2**20, num_prompt_tokens=num_tokens)

    prompt_of(2**17, 0)
    prompt_of(2**17 // 21, 20)
    with pytest.raises(InvalidRequest, match="with 20 at most 6241 prompt tokens") as refusal:
        prompt_of(2**17 // 21 + 1, 20)
    assert refusal.value.field == "prompt_logprobs"


def test_edges_of_every_range_pass() -> None:
    check(temperature=2, top_p=1e-9, top_k=VOCAB, min_p=1, n=8, seed=2**64 - 1, stop=["x" * 256] * 16)
    check(temperature=0, top_k=-1, seed=0, stop_token_ids=list(range(128)), min_tokens=16)
    check(stop=["\ufffd", "\0", "e\u0301", "\u0645\u0631"])
    check(presence_penalty=2, frequency_penalty=-2, repetition_penalty=2, logprobs=20, allowed_token_ids=[VOCAB - 1])
    check(repetition_penalty=1e-9, logprobs=0, logit_bias=dict.fromkeys(range(1000), -100))


def test_what_changes_logits_says_so() -> None:
    assert not check(logprobs=5, logit_bias={}, temperature=0.3).changes_logits
    penalties: list[dict[str, Any]] = [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
    ]
    for wish in penalties:
        assert check(**wish).is_penalised
        assert check(**wish).changes_logits
    biases: list[dict[str, Any]] = [{"logit_bias": {1: 0.5}}, {"allowed_token_ids": [3]}]
    for wish in biases:
        assert not check(**wish).is_penalised
        assert check(**wish).changes_logits


def test_allowed_ids_that_all_stop_leave_nothing_before_min_tokens() -> None:
    check(allowed_token_ids=[3, 4], stop_token_ids=[3, 4])
    check(allowed_token_ids=[3, 4], stop_token_ids=[3], min_tokens=2)
    check(allowed_token_ids=[3, 4], eos_token_ids=[3, 4])
    check(allowed_token_ids=[3, 4], eos_token_ids=[3, 4], min_tokens=2, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="min_tokens=2: no token can be sampled"):
        check(allowed_token_ids=[3, 4], eos_token_ids=[3], stop_token_ids=[4], min_tokens=2)
    with pytest.raises(InvalidRequest, match="no token can be sampled") as refusal:
        check(allowed_token_ids=[3, 4], stop_token_ids=[4, 3], min_tokens=2)
    assert refusal.value.field == "allowed_token_ids"


def test_denormal_temperature_is_greedy() -> None:
    assert check(temperature=1e-45).is_greedy
    assert not check(temperature=1e-4).is_greedy


def test_several_choices_of_one_greedy_text_are_refused_with_both_fields() -> None:
    with pytest.raises(InvalidRequest, match=r"n=2 with temperature=0") as refusal:
        check(n=2, temperature=0)
    assert refusal.value.field == "n"


def test_min_tokens_over_max_tokens_names_both() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens 5 > max_tokens 4"):
        check(min_tokens=5, max_tokens=4)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="detokenize"):
        check(stop="x", detokenize=False)


def test_prompt_and_output_may_fill_the_context_and_no_more() -> None:
    assert check(num_prompt_tokens=CONTEXT - 1, max_tokens=1).max_tokens == 1
    with pytest.raises(InvalidRequest, match="prompt 127 \\+ max_tokens 2 > context 128"):
        check(num_prompt_tokens=CONTEXT - 1, max_tokens=2)
    with pytest.raises(InvalidRequest, match="prompt 128 \\+ max_tokens 1 > context 128"):
        check(num_prompt_tokens=CONTEXT, max_tokens=1)


def test_no_max_tokens_fills_the_context() -> None:
    assert check(num_prompt_tokens=100, max_tokens=None).max_tokens == 28


def test_prompts_are_checked_id_by_id() -> None:
    validate_prompt([0, VOCAB - 1], VOCAB, CONTEXT)
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        validate_prompt([], VOCAB, CONTEXT)
    for bad in (VOCAB, -1, 2**32 + 5, 2**63 - 1):
        with pytest.raises(
            InvalidRequest, match=rf"token_ids\[2\]={bad} out of range 0\.\.999 of the model vocabulary"
        ):
            validate_prompt([1, 2, bad, 3], VOCAB, CONTEXT)
    with pytest.raises(InvalidRequest, match="not an integer"):
        validate_prompt([1, 2.5], VOCAB, CONTEXT)  # type: ignore[list-item]
    validate_prompt([1] * (CONTEXT - 1), VOCAB, CONTEXT)
    with pytest.raises(InvalidRequest, match="prompt is too long: 4194288 tokens, limit 127"):
        validate_prompt([1] * 4_194_288, VOCAB, CONTEXT)
