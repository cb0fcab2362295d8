"""Two real engine cores and real NIXL, in one process: tokens after a hand-over are the aggregated engine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import SamplingParams
from engine.core.messages import LeaseCommand, TransferEvent
from kv_transfer.nixl.connector import NixlConnector
from kv_transfer.nixl.transfers import TransferMetadata
from tests.kv_transfer.core_pair import CorePair, aggregated, nixl_config
from tests.oracle import random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, max_tokens=16, ignore_eos=True, seed=11)


@pytest.fixture
def pair(checkpoint: Path, tmp_path: Path) -> Iterator[CorePair]:
    pair = CorePair(nixl_config(checkpoint, tmp_path))
    yield pair
    pair.close()


def check_all_moved(pair: CorePair, prompts: list[list[int]]) -> None:
    for prompt, outcome in zip(prompts, pair.outcomes.values(), strict=True):
        assert outcome.loaded is not None
        assert outcome.loaded.num_recomputed_blocks == 0, outcome.loaded.reason
        assert outcome.loaded.num_external_tokens == len(prompt) - 16 * outcome.num_local_blocks
    assert pair.decode.load.num_prefilled_tokens == 0, "decode computed prompt tokens"


def check_reads_are_counted(pair: CorePair) -> None:
    [totals] = pair.decode.load.kv_totals
    reads = totals.reads
    assert reads is not None
    num_reads = sum(reads.by_seconds)
    assert 0 < num_reads <= totals.loaded.num_blocks
    assert [sum(each) for each in (reads.by_post_seconds, reads.by_bytes, reads.by_descriptors)] == [num_reads] * 3
    assert (reads.num_descriptors, reads.num_bytes) == (totals.loaded.num_blocks, totals.loaded.num_bytes)
    assert 0 < reads.post_seconds <= reads.seconds
    assert reads.num_failed == 0


@pytest.mark.parametrize("digest", [True, False], ids=["digest", "no-digest"])
def test_tokens_after_a_hand_over_are_the_aggregated_engines(checkpoint: Path, tmp_path: Path, digest: bool) -> None:
    params = GREEDY if digest else SEEDED
    pair = CorePair(nixl_config(checkpoint, tmp_path, options={"digest": digest}))
    prompts = [*random_prompts(8, longest=300, vocab_size=1024, seed=5), [7] * 16, [8] * 64]
    for index, prompt in enumerate(prompts):
        pair.start(f"r{index}", prompt, params)
    pair.run()
    tokens = [outcome.token_ids for outcome in pair.outcomes.values()]
    assert tokens == aggregated(checkpoint, prompts, params)
    assert len({token for row in tokens for token in row}) > 20, "a model that says one thing proves nothing"
    check_all_moved(pair, prompts)
    check_reads_are_counted(pair)
    pair.close()


def test_pages_come_over_tcp_as_well(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pair = CorePair(nixl_config(checkpoint, tmp_path, options={"ucx_tls": "tcp"}))
    prompts = random_prompts(3, longest=200, vocab_size=1024, seed=6)
    for index, prompt in enumerate(prompts):
        pair.start(f"r{index}", prompt, GREEDY)
    pair.run()
    assert [outcome.token_ids for outcome in pair.outcomes.values()] == aggregated(checkpoint, prompts, GREEDY)
    check_all_moved(pair, prompts)
    (named,) = [record.message for record in caplog.records if "come over UCX" in record.message]
    assert "tcp/lo" in named
    assert "cma" not in named
    pair.close()


def test_blocks_move_while_later_chunks_are_still_computed(checkpoint: Path, tmp_path: Path) -> None:
    pair = CorePair(nixl_config(checkpoint, tmp_path, max_num_batched_tokens=64))
    pair.start("long", random_prompts(2, longest=900, vocab_size=1024)[1], GREEDY)
    pair.run()
    assert pair.num_moves_before_first_token >= 3
    pair.close()


def test_decode_fetches_only_what_it_lacks(pair: CorePair) -> None:
    shared = random_prompts(2, longest=160, vocab_size=1024)[1]
    pair.start("first", shared, GREEDY)
    pair.run()
    moved_before = connector_of(pair).counters.loaded.num_blocks
    pair.start("second", [*shared, 5, 6, 7], GREEDY)
    pair.run()
    second = pair.outcomes["second"]
    assert second.num_local_blocks == 10
    assert second.loaded is not None
    assert second.loaded.num_external_tokens == 3
    assert connector_of(pair).counters.loaded.num_blocks == moved_before + 1


def test_a_page_that_changed_after_its_digest_is_recomputed(checkpoint: Path, pair: CorePair) -> None:
    prompt = random_prompts(2, longest=200, vocab_size=1024, seed=9)[1]
    expected = aggregated(checkpoint, [prompt], GREEDY)[0]
    pair.hold_back = True
    pair.start("hit", prompt, GREEDY)
    pair.run_until(lambda: any(event.num_tokens for event in pair.held_back))
    # STEP the producer's fifth page changes, after its digest was announced and before it is read
    executor: Any = pair.prefill._executor
    kv = executor._kv_cache
    block_id = metadata_of(pair.held_back[0]).block_ids[4]
    kv[block_id].view(-1)[17] += 1.0
    pair.let_go()
    pair.run()
    hit = pair.outcomes["hit"]
    assert hit.token_ids == expected
    assert hit.loaded is not None
    assert hit.loaded.num_recomputed_blocks == 9
    assert connector_of(pair).counters.loaded.failures["page_digest"] >= 1


@pytest.mark.parametrize("digest", [True, False], ids=["digest", "no-digest"])
def test_pages_read_after_their_lease_has_ended_count_for_nothing(
    checkpoint: Path, tmp_path: Path, digest: bool
) -> None:
    pair = CorePair(nixl_config(checkpoint, tmp_path, options={"digest": digest}))
    prompt = random_prompts(2, longest=200, vocab_size=1024, seed=9)[1]
    pair.hold_back = True
    pair.start("late", prompt, GREEDY)
    pair.run_until(lambda: any(event.num_tokens for event in pair.held_back))
    pair.prefill.handle(LeaseCommand("late", "release"))
    pair.run_until(lambda: pair.prefill.load.held_blocks == 0)
    pair.let_go()
    pair.run()
    late = pair.outcomes["late"]
    assert late.token_ids == aggregated(checkpoint, [prompt], GREEDY)[0]
    assert late.loaded is not None
    assert late.loaded.num_external_tokens == 0
    assert connector_of(pair).counters.loaded.failures["lease_ended"] >= 1
    reads = pair.decode.load.kv_totals[0].reads
    assert reads is not None
    assert reads.num_failed >= 1
    pair.close()


def test_blocks_stay_until_the_lease_ends(pair: CorePair) -> None:
    prompt = random_prompts(2, longest=200, vocab_size=1024, seed=9)[1]
    pair.hold_back = True
    pair.start("kept", prompt, GREEDY)
    pair.run_until(lambda: any(event.num_tokens for event in pair.held_back))
    assert pair.prefill.load.held_blocks == 13
    pair.let_go()
    pair.run()
    assert pair.prefill.load.held_blocks == 0


def metadata_of(event: TransferEvent) -> TransferMetadata:
    """What a transfer's metadata says, unchecked."""
    return msgspec.msgpack.decode(event.connector_metadata[32:], type=TransferMetadata)


def connector_of(pair: CorePair) -> NixlConnector:
    connector = pair.decode._connector
    assert isinstance(connector, NixlConnector)
    return connector
