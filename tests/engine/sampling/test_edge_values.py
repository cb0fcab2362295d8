"""Edge values of every sampling field: refused by name or served, and no harm to a neighbour in the batch."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, ErrorKind, TokensEvent
from engine.errors import InvalidRequest
from engine.sampling.params import MIN_REPETITION_PENALTY, validate
from tests.builders import lively_checkpoint, lively_model
from tests.oracle import random_prompts

VOCAB = 1024
PROMPT, NEIGHBOURS_PROMPT = random_prompts(2, longest=30, vocab_size=VOCAB, seed=1)
NEIGHBOUR = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, max_tokens=6, ignore_eos=True)
NUM_TOKENS = 4

SIZES = [0.0, 5e-324, 1e-45, 1e-37, MIN_REPETITION_PENALTY, 9e-10, 1e-5, 0.5, 1.0, math.nextafter(1, 0), 2.0, 100.0]
numbers = st.sampled_from([*SIZES, math.nextafter(2, 3), 3.4e38, 1e308, math.inf, math.nan, 1, 10**400, "1", None])
floats = numbers | st.sampled_from([-size for size in SIZES]) | st.floats()
integers = st.sampled_from([-(2**63), -1, 0, 1, 2, 20, VOCAB, VOCAB + 1, 2**31, 2**64, 10**400, 0.5, math.nan, None])
ids = st.sampled_from([-1, 0, 1, 7, VOCAB - 1, VOCAB, 2**63, 0.5])
flags = st.sampled_from([True, False, 1, None, math.nan])
texts = st.sampled_from(["", " ", "x", "x" * 257, "\ud800", 7])
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("n", "seed", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
one_field = st.one_of(
    st.tuples(st.sampled_from(FLOATS), floats),
    st.tuples(st.sampled_from(INTEGERS), integers),
    st.tuples(st.sampled_from(FLAGS), flags),
    st.tuples(st.sampled_from(["stop_token_ids", "allowed_token_ids"]), st.lists(ids, max_size=3)),
    st.tuples(st.sampled_from(["stop", "bad_words"]), st.lists(texts, max_size=2)),
    st.tuples(st.just("logit_bias"), st.dictionaries(ids, floats, max_size=3)),
    st.tuples(st.just("bad_word_ids"), st.lists(st.lists(ids, max_size=2), max_size=2)),
)
few_fields = st.lists(one_field, min_size=1, max_size=3).map(dict)
"""Few, since one wrong field refuses all of them."""
_numbers = count()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    folder = lively_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama", vocab_size=VOCAB)
    return LLM(folder, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=512).core


@pytest.fixture(scope="module")
def alone(core: EngineCore) -> list[int]:
    [(token_ids, _)] = run(core, (NEIGHBOURS_PROMPT, NEIGHBOUR))
    assert len(set(token_ids)) > 3
    return token_ids


def run(
    core: EngineCore, *requests: tuple[list[int], SamplingParams]
) -> list[tuple[list[int], ErrorKind | str | None]]:
    """Each request's tokens, all in one batch, and why it failed."""
    answers: dict[str, tuple[list[int], list[ErrorKind | str | None]]] = {}
    for prompt, params in requests:
        request_id = str(next(_numbers))
        answers[request_id] = ([], [])
        core.handle(AddRequest(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, seed=3)))
    while not all(ends for _, ends in answers.values()):
        for event in core.step():
            assert isinstance(event, TokensEvent)
            token_ids, ends = answers[event.request_id]
            token_ids += event.token_ids
            if event.finish_reason is not None:
                ends.append(event.error_kind or event.error)
    return [(token_ids, ends[0]) for token_ids, ends in answers.values()]


@settings(max_examples=300, deadline=None)
@given(given_fields=few_fields)
@example(given_fields={"repetition_penalty": 5e-324})
@example(given_fields={"repetition_penalty": 1e-45, "temperature": -0.0})
@example(given_fields={"repetition_penalty": 1e-37, "logit_bias": dict.fromkeys(PROMPT, 100.0)})
@example(given_fields={"repetition_penalty": MIN_REPETITION_PENALTY, "logit_bias": dict.fromkeys(PROMPT, 100.0)})
@example(given_fields={"temperature": 1e-5, "top_p": 5e-324, "min_p": 5e-324})
def test_edge_values_are_refused_by_name_or_served_beside_an_unharmed_neighbour(
    core: EngineCore, alone: list[int], given_fields: dict[str, Any]
) -> None:
    params, refused = SamplingParams(**given_fields), ""
    try:
        params = validate(params, vocab_size=VOCAB, max_model_len=256, num_prompt_tokens=len(PROMPT))
    except InvalidRequest as refusal:
        refused = refusal.field
    if refused:
        assert refused in SamplingParams.__struct_fields__
        return
    params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens or 1, NUM_TOKENS))
    (token_ids, error), (neighbour, _) = run(core, (PROMPT, params), (NEIGHBOURS_PROMPT, NEIGHBOUR))
    assert neighbour == alone
    may_exclude_all = params.allowed_token_ids is not None or params.bad_word_ids or params.min_tokens
    assert token_ids or (error == "nothing_allowed" and may_exclude_all)
    assert all(0 <= token_id < VOCAB for token_id in token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e-45, "logprobs": 2},
        {"repetition_penalty": 1e-37, "logit_bias": dict.fromkeys(PROMPT, 100.0)},
        {"repetition_penalty": 5e-324, "allowed_token_ids": (3,)},
    ],
)
def test_infinite_logits_of_a_requests_own_making_are_its_own_fault(
    core: EngineCore, alone: list[int], params: dict[str, Any], temperature: float
) -> None:
    broken = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, **params)  # validation refuses them
    (_, error), (neighbour, _) = run(core, (PROMPT, broken), (NEIGHBOURS_PROMPT, NEIGHBOUR))
    assert error == "nothing_allowed"
    assert neighbour == alone


def test_a_models_own_broken_logits_are_not_the_requests_fault(tmp_path: Path) -> None:
    model = lively_model("llama", vocab_size=VOCAB, tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[999] = torch.nan
    model.save_pretrained(tmp_path)
    core = LLM(tmp_path, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64).core
    changing = SamplingParams(logit_bias={7: 1.0}, repetition_penalty=1.5, min_tokens=1, max_tokens=NUM_TOKENS)
    assert 999 not in NEIGHBOURS_PROMPT
    (_, error), (token_ids, _) = run(core, ([999, 5], changing), (NEIGHBOURS_PROMPT, changing))
    assert error == "the model's logits are not finite: no token can be sampled"
    assert len(token_ids) == NUM_TOKENS
