"""Requests of several LoRA adapters on one stack: each answer is the aggregated engine's with that adapter, and a
killed decode instance costs a pause and no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import Client, TandemError
from tests.builders import write_adapter
from tests.lively import PATIENT_PEERS, PATIENT_POOLS, random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.reference import Reference
from tests.system.stacks import DECODE_STEP_S, GREEDY, SEEDED, Model, Stack, started

NAMES = ("", "sql", "poet")


@pytest.fixture(scope="module")
def adapted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and two decode instances, with steps that are long enough to be hit."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: str(write_adapter(folder / name, checkpoint, seed=len(name))) for name in NAMES[1:]}
    model = Model(checkpoint, Reference(checkpoint, num_blocks=512, lora_adapters=adapters), folder)
    faults = {f"decode-{index}": f"engine.step=sleep:{DECODE_STEP_S}" for index in range(2)}
    args: dict[str, Any] = {"instance_args": PATIENT_PEERS, "router_args": PATIENT_POOLS, "faults": faults}
    with started(model, size=2, num_prefill=1, failpoints=False, lora_adapters=adapters, **args) as stack:
        yield stack


def test_each_answer_is_that_of_its_adapter_and_all_kv_moved(adapted: Stack, prompts: random.Random) -> None:
    """The same prompt for all of them at the same time: their pages are in one store."""
    for length in (40, 150):
        prompt = random_prompt(prompts, length)
        requests = [BackgroundRequest(adapted.rig.address, prompt, **SEEDED, lora=name) for name in NAMES]
        completions = [request.completion() for request in requests]
        assert len({completion.token_ids for completion in completions}) == len(NAMES)
        for name, completion in zip(NAMES, completions, strict=True):
            adapted.assert_exact(completion, prompt, {**SEEDED, "lora": name})
            adapted.assert_moved(completion)


def test_an_adapters_name_is_a_models_name(adapted: Stack, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 40)
    with Client(adapted.rig.address) as client:
        assert client.model_info().lora_adapters == ["poet", "sql"]
        completion = client.generate(prompt, **GREEDY, model="sql")
        assert completion.model == "sql"
        adapted.assert_exact(completion, prompt, {**GREEDY, "lora": "sql"})
        with pytest.raises(TandemError, match="adapter 'sq' is not served; served: 'poet', 'sql'"):
            client.generate(prompt, lora="sq")


def test_a_killed_decode_instance_costs_its_streams_a_pause_and_no_token(
    adapted: Stack, prompts: random.Random
) -> None:
    stream = {**SEEDED, "max_tokens": 150}
    batch = [(random_prompt(prompts, 30 + 10 * place), name) for place, name in enumerate(NAMES * 2)]
    requests = [BackgroundRequest(adapted.rig.address, prompt, **stream, lora=name) for prompt, name in batch]
    for request in requests:
        request.wait_first_token()
    adapted.rig.kill("decode-0")
    completions = [request.completion() for request in requests]
    for (prompt, name), completion in zip(batch, completions, strict=True):
        adapted.assert_exact(completion, prompt, {**stream, "lora": name})
    hit = [name for (_, name), one in zip(batch, completions, strict=True) if len(one.route.decode) > 1]
    assert any(hit), "no stream of an adapter was hit"
