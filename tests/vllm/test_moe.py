"""A mixture of experts: every kind of request is handed over between two vLLMs, through each connector, without a token
that differs from the built-in engine's and without one computed again."""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem import Client
from tandem.client.health import load
from tandem.local_stack.settings import StackSettings
from tests.builders import lively_checkpoint
from tests.engine_under_test import vllm_python
from tests.instance.test_vllm_metrics import VLLM, WITHOUT_COUNTERPART
from tests.process_logs import LOGS
from tests.system.connectors import CONNECTORS
from tests.system.questions import Question, make_questions
from tests.system.reference import Reference
from tests.system.rig import Rig
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

LENGTHS = (20, 32, 100, 700, 1500)
CHUNK = 512
"""Tokens of a step: the longest prompts take several."""
NUM_TOKENS = 40
NUM_KINDS = 6


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = byte_level_backend()
    end = backend.token_to_id("<|im_end|>")
    folder = lively_checkpoint(
        tmp_path_factory.mktemp("moe"),
        "qwen3_moe",
        vocab_size=backend.get_vocab_size(),
        eos_token_id=end,
        bos_token_id=None,
        moe_intermediate_size=64,  # vLLM's CPU kernels want a multiple of 32
    )
    return write_folder(folder, backend, BYTE_LEVEL_CONFIG)


@pytest.fixture(scope="module")
def reference(moe: Path) -> Reference:
    return Reference(moe, num_blocks=1024)


@pytest.fixture(scope="module")
def questions(reference: Reference) -> list[Question]:
    """Of every kind: greedy, seeded, penalties with log-probabilities, stop strings, two choices."""
    return make_questions(
        reference.llm, NUM_KINDS * len(LENGTHS), random.Random("moe"), num_tokens=NUM_TOKENS, lengths=LENGTHS
    )


@pytest.fixture(scope="module", params=["shared_storage", "redis", "nixl"])
def rig(request: pytest.FixtureRequest, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with (
        CONNECTORS[request.param](tmp_path_factory.mktemp("store")) as backing,
        LOGS.expected("EngineDeadError|CancelledError|EngineCore|vllm/"),
    ):
        settings = StackSettings(
            model=moe,
            model_name="moe",
            engine="vllm",
            engine_python=vllm_python(),
            disaggregation="always",
            dtype="float32",
            num_blocks=256,
            threads=1,
            pin=False,
            instance_args=(
                *("--block-size", "32", "--max-num-batched-tokens", str(CHUNK), "--metrics-listen", "127.0.0.1:0"),
                *backing.instance_args,
            ),
            router_args=("--pools-beat-timeout-s", "20", "--pools-core-silence-timeout-s", "20"),
            **backing.settings,  # type: ignore[arg-type]
        )
        running = Rig(settings, env=dict.fromkeys(("prefill-0", "decode-0"), backing.env))
        running.start()
        try:
            yield running
        finally:
            running.stop()


def test_the_first_request_moves_kv(rig: Rig) -> None:
    """Before the others: peers find each other, and what is made at the first transfer exists."""

    def has_moved() -> bool:
        with Client(rig.address, timeout_s=120) as client:
            usage = client.generate([7] * 100, max_tokens=4, cache_salt=str(random.random())).usage
        return usage.external_tokens == 100

    wait_until(has_moved, "no KV is handed over")


@pytest.mark.parametrize("kind", range(NUM_KINDS))
def test_every_kind_of_request_is_handed_over(rig: Rig, questions: list[Question], kind: int) -> None:
    asked = questions[kind::NUM_KINDS]
    assert len({question.kind for question in asked}) == 1
    assert {len(question.prompt) for question in asked} == set(LENGTHS)
    before = load(rig.stack.instances["decode-0"])
    num_choices = 0
    with Client(rig.address, timeout_s=300) as client:
        for question in asked:
            completion = client.generate(list(question.prompt), **question.sampling)
            question.assert_answered(completion)
            num_choices += len(completion.choices)
            # A second choice may find blocks of the first.
            assert max(choice.usage.external_tokens for choice in completion.choices) == len(question.prompt)
            assert {choice.usage.recomputed_tokens for choice in completion.choices} == {0}
            assert len({choice.token_ids for choice in completion.choices}) == len(completion.choices)
            assert all(len(set(choice.token_ids)) > 5 for choice in completion.choices), "equal outputs prove nothing"
    wait_until(lambda: not load(rig.stack.instances["decode-0"]).num_running)
    after = load(rig.stack.instances["decode-0"])
    # Each choice computes its first token's KV there, and nothing of the prompt.
    assert after.num_prefilled_tokens - before.num_prefilled_tokens == num_choices
    assert after.num_external_tokens - before.num_external_tokens >= sum(len(question.prompt) for question in asked)
    assert after.num_recomputed_blocks == before.num_recomputed_blocks


def samples(rig: Rig, name: str) -> dict[tuple[str, str], float]:
    """An instance's metrics under vLLM's names: values by name and source of tokens."""
    log = rig.stack.processes[name].spec.log_file.read_text()
    [address] = re.findall(r"metrics at (http://\S+)", log)
    text = urllib.request.urlopen(address, timeout=20).read().decode()
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("vllm:")]
    assert {family.name.removeprefix("vllm:") for family in families} >= {
        name for name in VLLM["metrics"].keys() - WITHOUT_COUNTERPART if not name.startswith("nixl_")
    }
    return {
        (sample.name.removeprefix("vllm:"), sample.labels.get("source", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_under_vllms_names_count_what_each_instance_did(rig: Rig) -> None:
    names = ("prefill-0", "decode-0")
    before = {name: samples(rig, name) for name in names}
    with Client(rig.address, timeout_s=120) as client:
        usage = client.generate([9] * 70, max_tokens=10, temperature=0.0, ignore_eos=True, cache_salt="metrics").usage
    assert (usage.external_tokens, usage.completion_tokens) == (70, 10)

    def moved(name: str, metric: str, source: str = "") -> float:
        return samples(rig, name)[metric, source] - before[name][metric, source]

    wait_until(lambda: moved("decode-0", "generation_tokens_total") >= 9)
    assert moved("prefill-0", "prompt_tokens_by_source_total", "local_compute") == 70
    assert moved("decode-0", "prompt_tokens_by_source_total", "external_kv_transfer") == 70
    assert moved("decode-0", "prompt_tokens_by_source_total", "local_compute") == 0
    assert sum(moved(name, "generation_tokens_total") for name in names) == 10
