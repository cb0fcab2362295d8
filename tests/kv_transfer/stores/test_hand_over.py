"""Two real engine cores and the real connector, without the network: tokens after a hand-over are the aggregated
engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig, KVConnectorConfig
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, TokensEvent
from kv_transfer.page.format import Buffer, PageKey
from tests.builders import write_adapter
from tests.drafting import all_is_drafted
from tests.kv_transfer.core_pair import CorePair, Outcome, aggregated, store_config
from tests.kv_transfer.memory_store import STORES, MemoryStore
from tests.oracle import random_prompts
from tests.prefix_cache import forget_all
from tests.waiting import wait_until

__all__ = ["all_is_drafted"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, max_tokens=24, ignore_eos=True, seed=11)
PENALISED = SamplingParams(
    temperature=0.8, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={7: 2.0},
    logprobs=3, prompt_logprobs=1, max_tokens=24, ignore_eos=True, seed=12,
)  # fmt: skip


@pytest.fixture
def pair(checkpoint: Path, tmp_path: Path) -> Iterator[CorePair]:
    pair = CorePair(store_config(checkpoint, tmp_path))
    yield pair
    pair.close()
    leftovers = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and "transfers" in path.parts]
    assert leftovers == [], "transfer-scoped files stayed behind"


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_after_a_hand_over_are_the_aggregated_engines(
    checkpoint: Path, pair: CorePair, params: SamplingParams
) -> None:
    prompts = [*random_prompts(10, longest=300, vocab_size=1024, seed=5), [7] * 16, [8] * 64]
    for index, prompt in enumerate(prompts):
        pair.start(f"r{index}", prompt, params)
    pair.run()
    outcomes = list(pair.outcomes.values())
    assert [outcome.token_ids for outcome in outcomes] == aggregated(checkpoint, prompts, params)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.loaded is not None
        assert outcome.loaded.num_recomputed_blocks == 0
        assert outcome.loaded.num_external_tokens == len(prompt) - 16 * outcome.num_local_blocks
    load = pair.decode.load
    assert load.num_prefilled_tokens == 0, "decode computed prompt tokens"
    assert load.num_generated_tokens == sum(len(outcome.token_ids) - 1 for outcome in outcomes)


@pytest.mark.usefixtures("all_is_drafted")
def test_drafts_after_a_hand_over_do_not_change_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """The outputs have few different tokens: what came before comes again."""
    params = SamplingParams(temperature=0.9, allowed_token_ids=(5, 6, 7), max_tokens=48, ignore_eos=True, seed=11)
    prompts = random_prompts(10, longest=300, vocab_size=1024, seed=5)
    pair = CorePair(store_config(checkpoint, tmp_path, num_speculative_tokens=5))
    for index, prompt in enumerate(prompts):
        pair.start(f"r{index}", prompt, params)
    pair.run()
    outcomes = pair.outcomes.values()
    assert [outcome.token_ids for outcome in outcomes] == aggregated(checkpoint, prompts, params)
    assert (pair.prefill.load.num_draft_tokens, pair.decode.load.num_accepted_tokens > 20) == (0, True)
    pair.close()


def test_requests_of_several_adapters_are_handed_over_and_share_no_pages(checkpoint: Path, tmp_path: Path) -> None:
    """The same prompts for each adapter, in one store."""
    names = ("", "sql", "poet")
    adapters = {name: str(write_adapter(tmp_path / name, checkpoint, seed=len(name))) for name in names[1:]}
    prompts = random_prompts(3, longest=100, vocab_size=1024, seed=5)
    pair = CorePair(store_config(checkpoint, tmp_path, lora_adapters=adapters))
    for name in names:
        for index, prompt in enumerate(prompts):
            pair.start(f"{name}{index}", prompt, GREEDY, lora=name)
    pair.run()
    answers = [outcome.token_ids for outcome in pair.outcomes.values()]
    alone = LLM(checkpoint, skip_tokenizer_init=True, dtype="float32", num_blocks=256, lora_adapters=adapters)
    given = [{"prompt_token_ids": prompt} for prompt in prompts * len(names)]
    each = [name for name in names for _ in prompts]
    expected = alone.generate(given, GREEDY, use_tqdm=False, lora=each)
    assert answers == [one.outputs[0].token_ids for one in expected]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    for outcome, prompt in zip(pair.outcomes.values(), prompts * len(names), strict=True):
        assert outcome.loaded is not None
        assert (outcome.loaded.num_recomputed_blocks, outcome.num_local_blocks) == (0, 0)
        assert outcome.loaded.num_external_tokens == len(prompt)
    pair.close()


def test_quantised_engines_hand_over_to_their_like_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A prompt of three blocks, again and with a stranger's pages in the store."""
    [prompt] = random_prompts(2, longest=53, vocab_size=1024, seed=5)[1:]
    kinds = ("int8", "none", "int8")
    configs = [store_config(checkpoint, tmp_path, quantization=kind) for kind in kinds]
    answers = []
    for kind, config in zip(kinds, configs, strict=True):
        llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_blocks=64, quantization=kind)
        [expected] = llm.generate([prompt], GREEDY, use_tqdm=False)
        pair = CorePair(config)
        pair.start(kind, prompt, GREEDY)
        pair.run()
        outcome = pair.outcomes[kind]
        assert outcome.token_ids == expected.outputs[0].token_ids
        assert outcome.loaded is not None
        assert outcome.loaded.num_external_tokens == len(prompt)
        answers.append((outcome.token_ids, pair.prefill.load.num_prefilled_tokens))
        pair.close()
    assert answers[0][0] != answers[1][0]
    assert answers[1][1] == len(prompt), "it found the pages of quantised weights"
    assert answers[2][1] < len(prompt), "it did not find its own"


def test_penalties_and_logprobs_go_on_across_a_hand_over(checkpoint: Path, pair: CorePair) -> None:
    prompts = random_prompts(12, longest=200, vocab_size=1024, seed=6)
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=1024)
    answers = llm.generate(prompts, PENALISED, use_tqdm=False)
    for index, prompt in enumerate(prompts):
        pair.start(f"r{index}", prompt, PENALISED)
    pair.run()
    for prompt, outcome, answer in zip(prompts, pair.outcomes.values(), answers, strict=True):
        assert outcome.loaded is not None
        assert outcome.loaded.num_external_tokens == len(prompt) - 16 * outcome.num_local_blocks
        [expected] = answer.outputs
        assert outcome.token_ids == expected.token_ids
        assert expected.logprobs is not None
        assert answer.prompt_logprobs is not None
        found = [[one.token_id for one in position] for position in outcome.prompt_logprobs]
        assert found == [list(entries or ()) for entries in answer.prompt_logprobs]
        for tokens, entries in zip(outcome.logprobs, expected.logprobs, strict=True):
            assert [one.token_id for one in tokens] == list(entries)
            assert [one.logprob for one in tokens] == pytest.approx([one.logprob for one in entries.values()], abs=1e-4)


def test_blocks_move_while_later_chunks_are_still_computed(checkpoint: Path, tmp_path: Path) -> None:
    pair = CorePair(store_config(checkpoint, tmp_path, max_num_batched_tokens=64))
    pair.start("long", random_prompts(2, longest=1000, vocab_size=1024)[1], GREEDY)
    pair.run()
    assert pair.num_moves_before_first_token >= 3


def test_decode_fetches_only_what_it_lacks(pair: CorePair) -> None:
    shared = random_prompts(2, longest=160, vocab_size=1024)[1]
    pair.start("first", shared, GREEDY)
    pair.run()
    pair.start("second", [*shared, 5, 6, 7], GREEDY)
    pair.run()
    second = pair.outcomes["second"]
    assert second.num_local_blocks == 10
    assert second.loaded is not None
    assert second.loaded.num_external_tokens == 3


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_a_damaged_page_is_recomputed_and_changes_no_token(
    checkpoint: Path, pair: CorePair, tmp_path: Path, damage: str
) -> None:
    prompt = random_prompts(2, longest=200, vocab_size=1024, seed=9)[1]
    expected = aggregated(checkpoint, [prompt], GREEDY)[0]
    pair.start("warm", prompt, GREEDY)
    pair.run()
    pages = sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 4096)
    assert len(pages) == 200 // 16
    for page, other in zip(pages[3:6], pages[6:9], strict=True):
        content = page.read_bytes()
        if damage == "flip":
            page.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        elif damage == "truncate":
            page.write_bytes(content[:-100])
        elif damage == "swap":
            page.write_bytes(other.read_bytes())
        else:
            page.unlink()
    forget_all(pair.decode.scheduler.kv.pool)
    pair.start("again", prompt, GREEDY)
    pair.run()
    again = pair.outcomes["again"]
    assert again.token_ids == expected
    assert again.loaded is not None
    if damage in ("remove", "truncate"):
        assert again.loaded.num_recomputed_blocks == 0, "prefill sees what is missing or short, and writes it again"
    else:
        assert again.loaded.num_recomputed_blocks > 0
        assert pair.decode.load.num_recomputed_blocks > 0
    forget_all(pair.decode.scheduler.kv.pool)
    pair.start("healed", prompt, GREEDY)
    pair.run()
    healed = pair.outcomes["healed"]
    assert healed.token_ids == expected
    assert healed.loaded is not None
    assert healed.loaded.num_recomputed_blocks == 0


class _HangingStore(MemoryStore):
    """No read ends while it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.works = threading.Event()
        self.works.set()
        self.num_hanging = 0

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        self.num_hanging += not self.works.is_set()
        self.works.wait()
        return super().get_into(key, buffers, check)


def test_a_prompt_of_more_than_half_of_the_memory_is_computed_while_its_store_hangs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORES, "hanging", store := _HangingStore())
    connector = KVConnectorConfig(
        class_path="tests.kv_transfer.memory_store:NamedStoreConnector",
        options={"store": "hanging", "load_timeout_s": 0.1, "num_io_threads": 1},
    )
    core = EngineCore(
        EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=32, kv_connector=connector), lambda: None
    )
    store.works.clear()
    prompts = [[(7 * index) % 1000 for index in range(18 * 16)], [5] * 8, [6] * 8]  # the others are less than a block
    outcomes = {f"r{index}": Outcome() for index in range(len(prompts))}
    for name, prompt in zip(outcomes, prompts, strict=True):
        core.handle(AddRequest(EngineRequest(request_id=name, prompt_token_ids=prompt, params=GREEDY)))

    def all_finished() -> bool:
        for event in core.step():
            assert isinstance(event, TokensEvent)
            outcomes[event.request_id].take(event)
            outcomes[event.request_id].finished = event.finish_reason is not None
        return all(outcome.finished for outcome in outcomes.values())

    wait_until(all_finished)
    assert [outcome.token_ids for outcome in outcomes.values()] == aggregated(checkpoint, prompts, GREEDY)
    assert store.num_hanging == core.load.held_blocks == 1, "the page that is being read, and no other"
    # STEP the store works again
    store.works.set()
    wait_until(lambda: [core.step()] and core.load.held_blocks == 0)
    core.shutdown()
