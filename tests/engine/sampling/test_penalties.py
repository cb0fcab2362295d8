"""Biases, penalties and allowed ids against Python loops over the vocabulary, and their order."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.messages import EngineRequest
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import LogitAdjustments, SeenTokens
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler_output import LogitsRow

VOCAB = 50


def request(prompt: list[int], output: list[int], **params: Any) -> Request:
    spec = EngineRequest(
        request_id="r", prompt_token_ids=prompt, output_token_ids=output, params=SamplingParams(**params)
    )
    return Request.from_spec(spec, arrival=0, fingerprint="00")


def rows_of(requests: list[Request]) -> list[LogitsRow]:
    return [LogitsRow(one) for one in requests]


def slow_changes(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """The definition, token by token, in float32 as vLLM computes."""
    changed = []
    for token_id, logit in enumerate(np.array(logits, np.float32)):
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            logit = np.float32(-math.inf)
        logit += np.float32((params.logit_bias or {}).get(token_id, 0.0))
        if token_id in prompt or token_id in output:
            penalty = np.float32(params.repetition_penalty)
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= np.float32(params.frequency_penalty) * np.float32(output.count(token_id))
        if token_id in output:
            logit -= np.float32(params.presence_penalty)
        changed.append(float(logit))
    return changed


def random_params(rng: random.Random) -> dict[str, Any]:
    """Any mixture, nothing at all among them."""
    biases = {rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.randrange(1, 9))}
    allowed = tuple(rng.sample(range(VOCAB), rng.randrange(1, VOCAB)))
    parameters = {
        "repetition_penalty": rng.choice([0.5, 1.1, 2.0]),
        "frequency_penalty": rng.choice([-2.0, 0.3, 1.7]),
        "presence_penalty": rng.choice([-0.4, 0.9, 2.0]),
        "logit_bias": biases,
        "allowed_token_ids": allowed,
    }
    return {name: value for name, value in parameters.items() if rng.random() < 0.5}


def test_every_step_of_a_growing_batch_is_the_definition() -> None:
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(40):
        requests = []
        for _ in range(rng.randrange(1, 9)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            output = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 5]))]
            requests.append(request(prompt, output, **random_params(rng)))
        changes = LogitAdjustments()
        for _ in range(5):
            drawing = rng.sample(requests, rng.randrange(1, len(requests) + 1))  # others wait or are preempted
            logits = torch.randn(len(drawing), VOCAB, generator=generator) * 3
            logits[0, 3] = 0.0
            expected = [
                slow_changes(row, one.spec.prompt_token_ids, one.token_ids[one.num_prompt_tokens :], one.spec.params)
                for row, one in zip(logits.tolist(), drawing, strict=True)
            ]
            changes.apply(logits, rows_of(drawing))
            assert logits.tolist() == expected
            for one in drawing:
                one.token_ids += [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 3]))]


def test_the_last_token_of_a_bad_word_is_not_drawn_after_the_others() -> None:
    words = ((9,), (1, 2), (1, 1, 3), (5, 6))
    logits = torch.zeros(5, VOCAB)
    after = [request([5], output, bad_word_ids=words) for output in ([], [1], [1, 1], [4, 5], [1, 2])]
    LogitAdjustments().apply(logits, rows_of(after))
    # The prompt's 5 begins no word: words are of the output, as in vLLM.
    assert [row.isinf().nonzero().flatten().tolist() for row in logits] == [[9], [2, 9], [2, 3, 9], [6, 9], [9]]


def test_rows_of_requests_that_ask_for_nothing_are_left_as_they_are() -> None:
    logits = torch.randn(3, VOCAB)
    logits[0, 0] = math.nan
    before = logits.clone()
    plain, neutral = request([1, 2], [2]), request([1, 2], [2], logit_bias={}, repetition_penalty=1.0)
    changes = LogitAdjustments()
    changes.apply(logits, rows_of([plain, neutral, plain]))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    assert not changes._by_request


def test_the_prompt_counts_for_repetition_alone() -> None:
    logits = torch.ones(2, VOCAB)
    both = [
        request([5], [], repetition_penalty=2.0),
        request([5], [6, 6], frequency_penalty=0.25, presence_penalty=0.125),
    ]
    LogitAdjustments().apply(logits, rows_of(both))
    assert logits[0, 5] == 0.5
    assert logits[1, 5] == 1.0
    assert logits[1, 6] == 1.0 - 2 * 0.25 - 0.125


def test_a_bias_comes_before_the_penalties_and_does_not_bring_back_what_is_not_allowed() -> None:
    logits = torch.ones(1, VOCAB)
    asking = request([5], [], repetition_penalty=2.0, logit_bias={5: 3.0, 6: 100.0}, allowed_token_ids=(5, 7))
    LogitAdjustments().apply(logits, rows_of([asking]))
    assert logits[0, 5] == (1.0 + 3.0) / 2.0
    assert logits[0, 6] == -math.inf
    assert logits[0, 7] == 1.0
    assert logits.isfinite().sum() == 2


def test_a_record_ends_with_its_request() -> None:
    changes, ended, running = LogitAdjustments(), request([5], [], top_k=3, presence_penalty=1.0), request([5], [])
    changes.apply(torch.zeros(1, VOCAB), rows_of([ended]))
    ended.status = RequestStatus.PREEMPTED
    changes.apply(torch.zeros(1, VOCAB), rows_of([running]))
    assert list(changes._by_request) == [ended]
    del ended
    assert not changes._by_request


@pytest.mark.parametrize("prompt", [[], [4, 4, 9]])
def test_counting_in_pieces_is_counting_at_once(prompt: list[int]) -> None:
    rng = random.Random(2)
    output = [rng.randrange(500) for _ in range(1000)]
    seen = SeenTokens(prompt)
    for start in range(0, 1000, 7):
        seen.add(output[start : start + 7])
    counted = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
    assert counted == {token_id: output.count(token_id) for token_id in {*prompt, *output}}
    assert seen.num_output_tokens == 1000
