"""One core saves what it computes: in what order, until when, and what of it stays."""

from __future__ import annotations

import time

import pytest

from engine.core.messages import LeaseCommand, TransferEvent
from engine.scheduling.request import Request
from kv_transfer.page.format import HEADER_BYTES, PageKey, PageNaming
from kv_transfer.transfer.lease import LeaseTable
from kv_transfer.transfer.producer import PrefixProducer, Producer, SaveOp
from tests.kv_transfer.harness import (
    BLOCK_SIZE,
    FINGERPRINT,
    LAYOUT,
    LEASE_S,
    NUM_FULL,
    NUM_PAGES,
    PROMPT,
    BrokenStore,
    Core,
    GatedStore,
    pair,
    reader_of,
    writer_of,
)
from tests.kv_transfer.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_blocks_become_ready_while_later_chunks_are_computed(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    request, reader = writer_of(), reader_of()
    prefill.allocate(request)
    decode.reserve(reader)
    assert prefill.connector.num_transfers == 0
    for num_tokens in (6, 13, len(PROMPT)):
        # STEP a chunk is computed
        prefill.fill(request, -(-num_tokens // BLOCK_SIZE))
        prefill.progress(request, num_tokens)
        num_ready = num_tokens // BLOCK_SIZE
        prefill.wait(lambda: prefill.events[-1].num_ready_blocks == num_ready)  # noqa: B023
        assert len(store.values) == num_ready
        # STEP decode reads it before the next one
        decode.ready(reader, num_ready)
        decode.wait(lambda: decode.connector.counters.loaded.num_blocks == num_ready)  # noqa: B023
        assert decode.has(reader, num_ready * BLOCK_SIZE)
        assert not decode.loaded
    prefill.finish(request, "hand_over")
    prefill.wait(lambda: prefill.events[-1].num_tokens == len(PROMPT))
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_external_tokens) == (len(PROMPT), len(PROMPT))
    assert (result.num_recomputed_blocks, result.reason) == (0, None)
    assert decode.has(reader, len(PROMPT))
    ready = [event.num_ready_blocks for event in prefill.events]
    assert ready == sorted(ready)
    assert ready[0] == 0, "the offer itself is an event"


def test_blocks_of_a_finished_request_stay_until_their_saves_have_ended() -> None:
    store = GatedStore()
    prefill = Core(store)
    request = writer_of()
    prefill.allocate(request)
    prefill.fill(request)
    prefill.progress(request, len(PROMPT))
    assert prefill.finish(request, "hand_over")
    prefill.settle()
    assert prefill.freed == []
    store.gate.set()
    prefill.wait(lambda: prefill.freed == ["request"])
    assert prefill.events[-1].num_tokens == len(PROMPT)
    assert prefill.connector.num_transfers == 1, "the lease outlives the blocks"


def test_exact_multiple_of_the_block_size_has_no_tail(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prompt = PROMPT[: NUM_FULL * BLOCK_SIZE]
    request, reader = writer_of(prompt), reader_of(prompt)
    prefill.prefill(request)
    assert len(store.values) == NUM_FULL
    decode.reserve(reader)
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_recomputed_blocks) == (len(prompt), 0)
    assert decode.has(reader, len(prompt))


def test_prompt_shorter_than_a_block_is_all_tail(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of([7, 8]))
    reader = reader_of([7, 8])
    decode.reserve(reader)
    assert decode.complete(reader).num_verified_tokens == 2
    assert decode.has(reader, 2)


def test_full_blocks_are_written_once_and_tails_belong_to_their_transfer(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    for number in range(3):
        request = writer_of(request_id=f"r{number}", transfer_id=f"t{number}")
        prefill.prefill(request)
        prefill.wait(lambda: prefill.events[-1].num_tokens is not None)
    assert len(store.values) == NUM_FULL + 3
    assert prefill.connector.counters.saved.num_blocks == NUM_FULL + 3
    assert prefill.connector.counters.num_shared_blocks == 2 * NUM_FULL
    stranger = reader_of(transfer_id="t9")
    decode.reserve(stranger)
    result = decode.complete(stranger)
    assert (result.num_verified_tokens, result.num_recomputed_blocks) == (NUM_FULL * BLOCK_SIZE, 1)
    assert decode.connector.counters.loaded.failures == {"missing": 1}


def test_release_removes_the_tail_and_keeps_the_full_blocks(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    prefill.prefill(writer_of())
    assert len(store.values) == NUM_PAGES
    prefill.release()
    prefill.release()
    prefill.wait(lambda: len(store.values) == NUM_FULL)
    assert [event.ended for event in prefill.events].count("released") == 1
    assert prefill.connector.num_transfers == 0


def test_expired_lease_ends_the_transfer(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    request = writer_of()
    now = time.monotonic()
    prefill.connector._clock = lambda: now
    prefill.prefill(request)
    prefill.connector.handle(LeaseCommand("transfer", "attach", LEASE_S))
    assert prefill.connector.next_deadline_s() == pytest.approx(LEASE_S)
    now += LEASE_S - 0.01
    prefill.step()
    assert (prefill.ended, prefill.num_expired) == (None, 0)
    now += 0.02
    prefill.step()
    assert prefill.ended == "expired"
    assert prefill.num_expired == 1
    prefill.wait(lambda: len(store.values) == NUM_FULL)
    assert prefill.connector.next_deadline_s() is None


def test_release_before_the_offer_saves_nothing(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    prefill.release()
    request = writer_of()
    prefill.allocate(request)
    prefill.progress(request, len(PROMPT))
    assert not prefill.finish(request, "hand_over")
    prefill.settle()
    assert store.values == {}
    assert prefill.ended == "released"
    assert prefill.connector.num_transfers == 0


@pytest.mark.parametrize("reason", ["abort", "stop", "length", "error"])
def test_request_that_is_not_handed_over_fails_its_transfer(store: MemoryStore, reason: str) -> None:
    prefill, _ = pair(store)
    request = writer_of()
    prefill.allocate(request)
    prefill.progress(request, 6)
    held = prefill.finish(request, reason)  # type: ignore[arg-type]
    prefill.wait(lambda: prefill.freed == ["request"] or not held)
    assert prefill.ended == "failed"
    assert prefill.events[-1].reason == f"the request ended: {reason}"
    assert prefill.connector.num_transfers == 0


def test_request_that_ends_in_the_queue_notifies_its_reader(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    assert not prefill.finish(writer_of(), "abort")
    assert prefill.ended == "failed"


def test_two_requests_with_one_transfer_id_do_not_disturb_each_other(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    first, second = writer_of(request_id="first"), writer_of([1, 2, 3, 4, 5], request_id="second")
    prefill.prefill(first)
    prefill.allocate(second)
    prefill.progress(second, 5)
    assert not prefill.finish(second, "abort")
    assert prefill.ended is None
    assert prefill.connector.num_transfers == 1
    assert len(store.values) == NUM_PAGES


def test_abort_in_flight_frees_blocks_only_after_the_saves_have_ended() -> None:
    store = GatedStore()
    prefill = Core(store)
    request = writer_of()
    prefill.allocate(request)
    prefill.fill(request)
    prefill.progress(request, len(PROMPT))
    prefill.wait(lambda: store.num_entered == 2)  # both I/O threads are inside
    assert prefill.finish(request, "abort")
    prefill.settle()
    assert prefill.freed == []
    store.gate.set()
    prefill.wait(lambda: prefill.freed == ["request"])
    assert store.num_entered == 2, "what had not begun was dropped"


def test_saves_that_wait_behind_a_store_that_hangs_keep_no_blocks_of_an_aborted_request() -> None:
    store = GatedStore()
    prefill = Core(store, num_io_threads=1)
    requests = [writer_of(request_id=name, transfer_id=name) for name in ("begun", "queued")]
    for request in requests:
        prefill.allocate(request)
        prefill.fill(request)
        prefill.progress(request, len(PROMPT))
        prefill.wait(lambda: store.num_entered == 1)
    for request in requests:
        assert prefill.finish(request, "abort")
    assert prefill.freed == ["queued"]
    store.gate.set()
    prefill.wait(lambda: prefill.freed == ["queued", "begun"])
    assert store.num_entered == 1


@pytest.mark.parametrize("prefix_only", [False, True])
def test_saves_into_a_store_that_hangs_end_in_time_and_later_ones_at_once(prefix_only: bool) -> None:
    store, now = GatedStore(), [1000.0]
    prefill = Core(store, clock=lambda: now[0], load_timeout_s=10.0, breaker_failures=2, prefix_only=prefix_only)

    def hand_over(name: str) -> bool:
        """True: the connector keeps the blocks."""
        request = writer_of(request_id=name, transfer_id=name)
        prefill.allocate(request)
        prefill.progress(request, len(PROMPT))
        kept = prefill.finish(request, "hand_over")
        prefill.connector.handle(LeaseCommand(name, "attach", 60.0))
        return kept

    for name in ("begun", "queued", "third"):
        assert hand_over(name)
        prefill.wait(lambda: store.num_entered == 2)  # both I/O threads are inside, in saves of the first
    now[0] += 9.0
    prefill.step()
    assert not prefill.freed
    assert prefill.connector.next_deadline_s() == pytest.approx(1.0)
    # STEP no save has ended in time
    now[0] += 1.0
    prefill.step()
    assert prefill.freed == ["queued", "third"], "only what the threads are in is kept"
    ended = [(event.transfer_id, event.reason) for event in prefill.events if event.ended == "failed"]
    reason = "the store did not take KV within 10 s"
    assert ended == ([] if prefix_only else [(name, reason) for name in ("begun", "queued", "third")])
    hand_over("later")
    prefill.step()
    assert prefill.freed[-1] == "later"
    # STEP the store answers
    store.gate.set()
    prefill.wait(lambda: prefill.freed[-1] == "begun")
    hand_over("again")
    prefill.wait(lambda: len(store.values) >= NUM_FULL)


class _StuckInRemovals(GatedStore):
    put = MemoryStore.put

    def delete(self, key: PageKey) -> None:
        self.num_entered += 1
        assert self.gate.wait(60.0)
        super().delete(key)


def test_a_store_that_hangs_in_removals_holds_up_no_later_transfer() -> None:
    store, now = _StuckInRemovals(), [1000.0]
    prefill = Core(store, clock=lambda: now[0], load_timeout_s=10.0, breaker_failures=1)
    for name in ("a", "b"):
        prefill.prefill(writer_of(request_id=name, transfer_id=name))
        prefill.release(name)
    prefill.wait(lambda: store.num_entered == 2)  # both I/O threads are inside
    reasons = []
    for name in ("late", "later"):
        request = writer_of(request_id=name, transfer_id=name)
        prefill.allocate(request)
        prefill.progress(request, len(PROMPT))
        prefill.finish(request, "hand_over")
        prefill.connector.handle(LeaseCommand(name, "attach", 60.0))
        now[0] += 10.0 if name == "late" else 0.0
        prefill.step()
        prefill.step()
        reasons += [event.reason for event in prefill.events if event.transfer_id == name and event.ended]
        now[0] += 100.0
    assert reasons == ["the store did not take KV within 10 s", "store_down"]
    store.gate.set()
    prefill.wait(lambda: not any(key.scope for key in store.values))


def test_removals_do_not_pile_up_behind_a_store_that_hangs() -> None:
    """It may hang for days, and each prompt has a tail, which its transfer's end removes."""
    store, now = GatedStore(), [1000.0]
    prefill = Core(store, num_blocks=512, clock=lambda: now[0], load_timeout_s=10.0, breaker_failures=1)

    def hand_over(name: str) -> None:
        request = writer_of(request_id=name, transfer_id=name)
        prefill.allocate(request)
        prefill.progress(request, len(PROMPT))
        prefill.finish(request, "hand_over")

    hand_over("begun")
    prefill.connector.handle(LeaseCommand("begun", "attach", 60.0))
    prefill.wait(lambda: store.num_entered == 2)  # both I/O threads are inside
    now[0] += 10.0
    prefill.step()
    jobs = prefill.connector._threads._jobs
    num_before = jobs.qsize()
    later = [f"later-{number}" for number in range(20)]
    for name in later:
        hand_over(name)
        prefill.step()
    assert [event.transfer_id for event in prefill.events if event.ended] == ["begun", *later]
    assert jobs.qsize() == num_before
    # STEP the store answers
    store.gate.set()
    prefill.wait(lambda: prefill.freed[-1] == "begun")
    prefill.wait(lambda: not jobs.qsize() and not any(key.scope for key in store.values))


@pytest.mark.parametrize("prefix_only", [False, True])
def test_saves_that_wait_at_a_shutdown_are_not_begun(prefix_only: bool) -> None:
    store, request = GatedStore(), writer_of()
    prefill = Core(store, num_io_threads=1, shutdown_timeout_s=0.01, prefix_only=prefix_only)
    prefill.allocate(request)
    prefill.progress(request, len(PROMPT))
    assert prefill.finish(request, "hand_over")
    prefill.wait(lambda: store.num_entered == 1)
    prefill.shut_down_before(store.gate)
    assert store.num_entered == 1


def test_store_that_cannot_be_written_fails_the_transfer_and_not_the_request() -> None:
    store = BrokenStore()
    prefill = Core(store, breaker_failures=2, breaker_retry_s=60.0)
    for number in range(3):
        request = writer_of(request_id=f"r{number}", transfer_id=f"t{number}")
        prefill.allocate(request)
        prefill.progress(request, len(PROMPT))
        prefill.finish(request, "hand_over")
        prefill.wait(lambda: prefill.connector.num_transfers == 0)
    assert prefill.ended == "failed"
    failures = prefill.connector.counters.saved.failures
    assert failures["store_eio"] <= 3
    assert failures["store_down"] > 0
    assert store.num_calls <= 3, "a dead store is not used"


def test_counters_have_bytes_and_seconds(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    decode.complete(reader)
    num_bytes = NUM_PAGES * (HEADER_BYTES + LAYOUT.bytes_per_block)
    for counters in (prefill.connector.counters.saved, decode.connector.counters.loaded):
        assert (counters.num_bytes, counters.num_blocks) == (num_bytes, NUM_PAGES)
        assert counters.seconds > 0


def test_a_page_that_could_not_be_removed_at_once_is_removed_later(store: MemoryStore) -> None:
    class BusyStore(MemoryStore):
        num_refusals = 2

        def delete(self, key: PageKey) -> None:
            if self.num_refusals:
                self.num_refusals -= 1
                raise OSError(11, "busy")
            super().delete(key)

    busy = BusyStore()
    prefill = Core(busy)
    prefill.prefill(writer_of())
    assert len(busy.values) == NUM_PAGES
    prefill.release()
    prefill.wait(lambda: len(busy.values) == NUM_FULL)


def test_shutdown_gives_up_after_the_first_page_that_cannot_be_removed() -> None:
    class StuckStore(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.tried: list[PageKey] = []

        def delete(self, key: PageKey) -> None:
            self.tried.append(key)
            raise OSError(11, "busy")

    stuck = StuckStore()
    prefill = Core(stuck)
    for number in range(5):
        prefill.prefill(writer_of(request_id=f"r{number}", transfer_id=f"t{number}"))
    prefill.connector.shutdown()
    assert len(set(stuck.tried)) == 1, "a store that hangs must not hold up the end of an instance for each transfer"


# The producer without its connector


BLOCKS = list(range(NUM_PAGES))


def bare_producer() -> Producer:
    return Producer(PageNaming.of(FINGERPRINT, LAYOUT), LeaseTable())


def progressed(producer: Producer, request: Request, num_tokens: int, now: float = 0.0) -> list[SaveOp]:
    producer.request_progressed(request, BLOCKS, num_tokens, now)
    return producer.take_ops()


def handed_over(producer: Producer, request: Request) -> list[SaveOp]:
    request.finish_reason = "hand_over"
    producer.request_finished(request, BLOCKS, 0.0)
    return producer.take_ops()


def end_well(producer: Producer, ops: list[SaveOp]) -> None:
    for op in ops:
        producer.op_ended(op, None, 0.0)


def ends(producer: Producer) -> list[tuple[int, int]]:
    """Full blocks and tokens of the ends that were announced."""
    events = [event for event in producer.take_output().events if isinstance(event, TransferEvent)]
    return [(event.num_ready_blocks, event.num_tokens) for event in events if event.num_tokens]


def test_the_end_is_announced_once_the_tail_is_saved() -> None:
    producer, request = bare_producer(), writer_of()
    end_well(producer, progressed(producer, request, len(PROMPT)))
    [tail] = handed_over(producer, request)
    assert ends(producer) == []
    end_well(producer, [tail])
    assert ends(producer) == [(NUM_FULL, len(PROMPT))]


def test_the_end_is_announced_where_all_has_been_saved_before() -> None:
    prompt = PROMPT[: NUM_FULL * BLOCK_SIZE]
    producer, request = bare_producer(), writer_of(prompt)
    end_well(producer, progressed(producer, request, len(prompt)))
    assert ends(producer) == []
    assert handed_over(producer, request) == []
    assert ends(producer) == [(NUM_FULL, len(prompt))]


def test_a_prompt_that_is_computed_extends_its_offer_before_a_block_is_full() -> None:
    producer, request = bare_producer(), writer_of()
    progressed(producer, request, 0)
    progressed(producer, request, 1, now=0.8 * LEASE_S)
    producer.expire(1.6 * LEASE_S)
    assert progressed(producer, request, BLOCK_SIZE, now=1.6 * LEASE_S)


def test_no_block_of_the_output_is_saved() -> None:
    producer, request = bare_producer(), writer_of(PROMPT[: NUM_FULL * BLOCK_SIZE - 1])
    request.token_ids += [7, 7]
    assert len(progressed(producer, request, request.num_tokens)) == NUM_FULL - 1


def test_a_tail_whose_transfer_ends_while_it_is_saved_is_removed() -> None:
    producer, request = bare_producer(), writer_of()
    end_well(producer, progressed(producer, request, len(PROMPT)))
    [tail] = handed_over(producer, request)
    producer.handle_command(LeaseCommand("transfer", "release"), 0.0)
    assert producer.take_deletes() == [], "the save would bring it back"
    end_well(producer, [tail])
    assert producer.take_deletes() == [tail.name.key]
    assert producer.take_output().freed_request_ids == [request.request_id]


def test_blocks_whose_saves_have_not_begun_are_freed_with_the_transfer() -> None:
    producer, request = bare_producer(), writer_of()
    producer.request_progressed(request, BLOCKS, len(PROMPT), 0.0)
    request.finish_reason = "hand_over"
    assert producer.request_finished(request, BLOCKS, 0.0)
    producer.handle_command(LeaseCommand("transfer", "release"), 0.0)
    assert producer.take_output().freed_request_ids == [request.request_id]
    assert (producer.take_ops(), producer._by_transfer) == ([], {})


@pytest.mark.parametrize("is_late", [False, True])
def test_after_a_save_for_later_prompts_that_fails_or_is_late_the_request_saves_no_more(is_late: bool) -> None:
    producer, request = PrefixProducer(PageNaming.of(FINGERPRINT, LAYOUT), LeaseTable()), writer_of()
    first, second = progressed(producer, request, 2 * BLOCK_SIZE)
    if is_late:
        producer.give_up(first.owner, "late", 0.0)
    else:
        producer.op_ended(first, "store_eio", 0.0)
    assert second.is_cancelled
    assert progressed(producer, request, len(PROMPT)) == []
