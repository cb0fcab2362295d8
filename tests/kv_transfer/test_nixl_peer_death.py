"""Real NIXL and a holder in a process of its own that is killed or frozen: the reader computes what it does not get,
serves on, and uses no page that a read may still write to."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core import EngineCore
from engine.messages import (
    AddRequest,
    EngineRequest,
    HoldKV,
    LeaseCommand,
    LoadedEvent,
    RemoteKV,
    Seed,
    TokensEvent,
)
from kv_transfer.nixl_connector import NixlConnector
from tests.builders import lively_checkpoint
from tests.kv_transfer.core_pair import nixl_config, num_classed_blocks, progress_of
from tests.kv_transfer.nixl_holder import HolderProcess
from tests.oracle import random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = random_prompts(2, longest=1500, vocab_size=1024, seed=4)[1]
NUM_BLOCKS = 94
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=512)
    (answer,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert len(set(answer.outputs[0].token_ids)) > 5
    return answer.outputs[0].token_ids


class Reader:
    """A decode core here, and whatever holders a test starts."""

    def __init__(self, checkpoint: Path, tmp_path: Path, **options: object) -> None:
        self._checkpoint, self._tmp_path = checkpoint, tmp_path
        self._options = {"ucx_tls": "tcp", "load_timeout_s": TIMEOUT_S, **options}
        self.core = EngineCore(nixl_config(checkpoint, tmp_path, self._options), wake=lambda: None)
        self.holders: list[HolderProcess] = []
        self.loaded: dict[str, LoadedEvent] = {}
        self.token_ids: dict[str, list[int]] = {}
        self.finished: set[str] = set()

    @property
    def connector(self) -> NixlConnector:
        assert isinstance(self.core._connector, NixlConnector)
        return self.core._connector

    def hold(self, holder: HolderProcess, name: str) -> None:
        """Have the prompt computed there, and reserve here."""
        fields = {"request_id": name, "prompt_token_ids": PROMPT, "params": GREEDY}
        holder.handle(AddRequest(EngineRequest(**fields, hold_kv=HoldKV(transfer_id=name, lease_s=60.0))))  # type: ignore[arg-type]
        remote = RemoteKV(transfer_id=name, reservation_s=60.0)
        self.core.handle(AddRequest(EngineRequest(**fields, remote_kv=remote)))  # type: ignore[arg-type]
        self.step()
        holder.wait(lambda: any(event.num_tokens for event in holder.transfers(name)))
        self.token_ids[name] = holder.first_token(name)
        self.core.handle(Seed(name, self.token_ids[name]))

    def read(self, holder: HolderProcess, name: str) -> None:
        """Tell this core all that the holder has said."""
        for event in holder.transfers(name):
            self.core.handle(progress_of(event))
        self.step()

    def start_holder(self) -> HolderProcess:
        config = nixl_config(self._checkpoint, self._tmp_path, {**self._options, "load_timeout_s": 10.0})
        self.holders.append(HolderProcess(config))
        return self.holders[-1]

    def step(self) -> None:
        for event in self.core.step():
            if isinstance(event, LoadedEvent):
                self.loaded[event.request_id] = event
            elif isinstance(event, TokensEvent):
                self.token_ids.setdefault(event.request_id, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    self.finished.add(event.request_id)
        assert num_classed_blocks(self.core.load) == self.core.info.num_blocks

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.step()
            time.sleep(0.001)

    def pages(self) -> torch.Tensor:
        """The KV memory as bytes, [num_blocks, bytes]."""
        kv = self.core._runner._kv_cache
        return kv.view(kv.shape[0], -1).view(torch.uint8)


@pytest.fixture
def make_reader(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(**options: object) -> Reader:
        made.append(Reader(checkpoint, tmp_path, **options))
        return made[-1]

    yield make
    for reader in made:
        for holder in reader.holders:
            holder.end()
        reader.run_until(lambda reader=reader: reader.core.load.held_blocks + reader.core.load.quarantined_blocks == 0)  # type: ignore[misc]
        reader.core.shutdown()
        load = reader.core.load
        assert (load.running_blocks, load.held_blocks, load.quarantined_blocks, load.num_loading) == (0, 0, 0, 0)


def check_serves_on(reader: Reader, expected: list[int]) -> None:
    """Another holder's pages come as ever."""
    reader.core.scheduler.kv.pool.forget_all()
    other = reader.start_holder()
    reader.hold(other, "next")
    reader.read(other, "next")
    reader.run_until(lambda: "next" in reader.finished)
    assert reader.loaded["next"].num_recomputed_blocks == 0, reader.loaded["next"].reason
    assert reader.token_ids["next"] == expected


@pytest.mark.parametrize("ucx_tls", ["", "tcp"], ids=["cma", "tcp"])
def test_a_holder_killed_before_the_read_costs_a_recomputation(
    make_reader: Callable[..., Reader], expected: list[int], ucx_tls: str
) -> None:
    reader = make_reader(ucx_tls=ucx_tls)
    holder = reader.start_holder()
    reader.hold(holder, "lost")
    holder.end()
    started = time.monotonic()
    reader.read(holder, "lost")
    reader.run_until(lambda: "lost" in reader.loaded)
    assert time.monotonic() - started < TIMEOUT_S
    assert reader.loaded["lost"].num_external_tokens == 0
    reader.run_until(lambda: "lost" in reader.finished)
    assert reader.token_ids["lost"] == expected
    assert sum(reader.connector.counters.load_failures.values()) > 0
    check_serves_on(reader, expected)


def test_a_holder_killed_in_mid_read_costs_a_recomputation(
    make_reader: Callable[..., Reader], expected: list[int]
) -> None:
    reader = make_reader()
    holder = reader.start_holder()
    reader.hold(holder, "lost")
    holder.signal(signal.SIGSTOP)
    reader.read(holder, "lost")
    time.sleep(0.3)
    reader.step()
    assert "lost" not in reader.loaded, "the read has ended before the holder"
    holder.end()
    reader.run_until(lambda: "lost" in reader.finished)
    assert reader.token_ids["lost"] == expected
    assert reader.connector.counters.load_failures["nixl_remotedisconnect"] > 0
    assert reader.connector.num_rebuilt == 0
    check_serves_on(reader, expected)


def test_pages_of_a_frozen_holder_are_quarantined_until_their_read_has_ended(
    make_reader: Callable[..., Reader], expected: list[int]
) -> None:
    reader = make_reader(max_quarantined_fraction=0.5)
    holder = reader.start_holder()
    reader.hold(holder, "frozen")
    holder.signal(signal.SIGSTOP)
    started = time.monotonic()
    reader.read(holder, "frozen")
    # STEP the deadline comes, the request is computed in other blocks
    reader.run_until(lambda: "frozen" in reader.loaded)
    assert TIMEOUT_S <= time.monotonic() - started < 2 * TIMEOUT_S
    assert reader.core.load.quarantined_blocks == NUM_BLOCKS
    reader.run_until(lambda: "frozen" in reader.finished)
    assert reader.token_ids["frozen"] == expected
    assert reader.core.load.quarantined_blocks == NUM_BLOCKS
    # STEP everything that may be used gets a canary, then the holder wakes
    pages = reader.pages()
    reader.core.scheduler.kv.pool.forget_all()
    quarantined = sorted(reader.connector._quarantine.block_ids)
    others = torch.ones(len(pages), dtype=torch.bool)
    others[quarantined] = False
    pages[others] = 0xA5
    before = pages[quarantined].clone()
    holder.signal(signal.SIGCONT)
    reader.run_until(lambda: reader.core.load.quarantined_blocks + reader.core.load.held_blocks == 0)
    assert holder.alive
    assert bool((pages[others] == 0xA5).all()), "a foreign byte in a page in use"
    assert not torch.equal(pages[quarantined], before), "the read did go on after it was given up: it proves something"
    # STEP once free, nothing is written there any more
    pages[:] = 0xA5
    time.sleep(0.7)
    assert bool((pages == 0xA5).all()), "a late write to a freed page"
    assert reader.connector.num_rebuilt == 0


def test_above_the_cap_the_agent_is_rebuilt_and_its_peers_live(
    make_reader: Callable[..., Reader], expected: list[int]
) -> None:
    reader = make_reader(max_quarantined_fraction=0.1)
    holder = reader.start_holder()
    reader.hold(holder, "frozen")
    holder.signal(signal.SIGSTOP)
    reader.read(holder, "frozen")
    reader.run_until(lambda: "frozen" in reader.loaded)
    reader.run_until(lambda: "frozen" in reader.finished and not reader.core.load.quarantined_blocks)
    assert reader.connector.num_rebuilt == 1
    assert reader.token_ids["frozen"] == expected
    pages = reader.pages()
    reader.core.scheduler.kv.pool.forget_all()
    pages[:] = 0xA5
    holder.signal(signal.SIGCONT)
    time.sleep(0.7)
    assert bool((pages == 0xA5).all()), "a destroyed agent has written"
    # STEP the holder that was frozen lends again
    holder.handle(LeaseCommand("frozen", "release"))
    reader.hold(holder, "again")
    reader.read(holder, "again")
    reader.run_until(lambda: "again" in reader.finished)
    assert holder.alive
    assert reader.loaded["again"].num_recomputed_blocks == 0, reader.loaded["again"].reason
    assert reader.token_ids["again"] == expected


def test_an_aborted_request_keeps_its_blocks_until_its_read_has_ended(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader(max_quarantined_fraction=0.5)
    holder = reader.start_holder()
    reader.hold(holder, "aborted")
    holder.signal(signal.SIGSTOP)
    reader.read(holder, "aborted")
    reader.core.scheduler.abort("aborted")
    reader.step()
    assert reader.core.load.quarantined_blocks == NUM_BLOCKS
    holder.signal(signal.SIGCONT)
    reader.run_until(lambda: not reader.core.load.quarantined_blocks + reader.core.load.held_blocks)
    assert holder.alive
