"""Rounds of reading the same pages in every way there is: raw, digests off, digests on; in turns, so that a busy
machine is busy for all of them. What is compared is a ratio of medians.

    holders start (one for digests off, one for on) ─▶ per life: connect, rounds to warm up, rounds ─▶ figures
    round   lend ─▶ each way: all blocks, compared byte by byte ─▶ each way: one block alone, some times ─▶ clear

Throughput is from "these blocks are ready" to "this request may run", for all blocks at once. Latency is the same for a
request of one block while nothing else moves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from engine.messages import TransferEvent
from kv_transfer.page_naming import PageNaming
from kv_transfer.store import PageKey
from tandem.transfer_bench.half import Half, Shape, TransferFailed, as_bytes, make_request, prompt
from tandem.transfer_bench.holder import Holder
from tandem.transfer_bench.media import Medium
from tandem.transfer_bench.raw import Raw

NUM_WARM_UP = 2
_NUM_SINGLES = 8
_SEED = 17
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """One way of reading. Seconds; one entry for each round, or for each block read alone."""

    way: str
    """off or on for the connector's digests, else a raw ceiling's name."""
    all_s: list[float] = field(default_factory=list)
    one_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    """Until a reader could read; empty for raw ways."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.all_s)

    def one_ms(self, quantile: float) -> float:
        """Latency of one block, milliseconds."""
        ordered = sorted(self.one_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Result:
    """One medium at one shape."""

    medium: str
    where: str
    shape: Shape
    figures: list[Figures]
    """The connector's first, then raw ceilings."""
    goals: dict[str, float]

    @property
    def raws(self) -> list[Figures]:
        return [figures for figures in self.figures if figures.way not in ("off", "on")]

    def gb_s(self, figures: Figures) -> float:
        """10^9 bytes each second."""
        return self.shape.num_bytes / figures.median_s / 1e9

    def save_gb_s(self, figures: Figures) -> float | None:
        return self.shape.num_bytes / statistics.median(figures.save_s) / 1e9 if figures.save_s else None

    def share(self, figures: Figures) -> float | None:
        """Of the first raw ceiling, by medians."""
        return self.raws[0].median_s / figures.median_s if self.raws else None


@dataclass(frozen=True, slots=True)
class _Way:
    """A way of reading: what `lender` lends, by `read(run, num_blocks, events)`."""

    name: str
    lender: str
    read: Callable[[int, int, list[TransferEvent]], float]


def measure(medium: Medium, shape: Shape, *, digests: Sequence[str], num_rounds: int, say: Say) -> Result:
    """Raises EngineError, StoreError or TransferFailed; leaves nothing behind in any case."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(medium.opened(shape))
        bench = _Bench(medium, shape, digests)
        stack.callback(bench.clear)  # after the holders' end: one that is interrupted may be saving still
        say("starting the lending processes")
        bench.start_holders(stack)
        per_life = -(-num_rounds // medium.num_lives)
        for life in range(medium.num_lives):
            with bench.ways() as ways:
                for index in range(NUM_WARM_UP + per_life):
                    done = life * per_life + max(0, index - NUM_WARM_UP)
                    say(f"round {done + 1} of {per_life * medium.num_lives}" if index >= NUM_WARM_UP else "warming up")
                    bench.round(ways, index, keep=index >= NUM_WARM_UP)
        return Result(medium.name, medium.where, shape, list(bench.figures.values()), medium.goals)


class _Bench:
    """One medium at one shape, while it is measured."""

    def __init__(self, medium: Medium, shape: Shape, digests: Sequence[str]) -> None:
        self._medium = medium
        self._shape = shape
        self._kv = shape.memory()
        self._expected = shape.content(_SEED)
        self._fingerprints = {name: hashlib.sha256(os.urandom(16)).digest() for name in digests}
        self._holders: dict[str, Holder] = {}
        self._run = 0
        self._lent: dict[tuple[str, int], list[TransferEvent]] = {}
        self.figures = {name: Figures(name) for name in digests}

    def start_holders(self, stack: contextlib.ExitStack) -> None:
        for name, fingerprint in self._fingerprints.items():
            config, folder = self._medium.config(name == "on"), self._medium.folder
            holder = Holder(self._shape, config, fingerprint, seed=_SEED, folder=folder)
            stack.callback(holder.close)
            self._holders[name] = holder
        for holder in self._holders.values():
            holder.wait_ready()

    @contextlib.contextmanager
    def ways(self) -> Iterator[list[_Way]]:
        """The reading ends, connected."""
        with contextlib.ExitStack() as stack:
            ways = []
            for name, fingerprint in self._fingerprints.items():
                half = Half(self._shape, self._medium.config(name == "on"), fingerprint, self._kv)
                stack.callback(half.shutdown)
                ways.append(_Way(name, name, half.load))
            for raw in self._medium.raws(self._shape, self._kv):
                stack.callback(raw.close)
                lender = next(iter(self._fingerprints))
                ways.append(_Way(raw.name, lender, self._raw_read(raw, lender)))
                self.figures.setdefault(raw.name, Figures(raw.name))
            yield ways

    def round(self, ways: list[_Way], index: int, *, keep: bool) -> None:
        """Lend, read in every way, clear. The ways take turns at being first."""
        ways = ways[index % len(ways) :] + ways[: index % len(ways)]
        try:
            save_s = self._lend()
            all_s = {way.name: self._read(way, self._shape.num_blocks) for way in ways}
            one_s: dict[str, list[float]] = {way.name: [] for way in ways}
            for _ in range(_NUM_SINGLES):
                for way in ways:
                    one_s[way.name].append(self._read(way, 1))
        finally:
            self.clear()
        if keep:
            for name, figures in self.figures.items():
                figures.all_s.append(all_s[name])
                figures.one_s.extend(one_s[name])
                figures.save_s.extend(save_s.get(name, []))

    def _lend(self) -> dict[str, list[float]]:
        """Memory is lent once; a store gets pages of this round. Seconds that saving took, by holder."""
        if self._lent and not self._medium.keeps_pages:
            return {}
        self._run += 1
        save_s = {}
        for name, holder in self._holders.items():
            self._lent[name, self._shape.num_blocks], seconds = holder.lend(self._run, self._shape.num_blocks)
            self._lent[name, 1], _ = holder.lend(self._run, 1)
            save_s[name] = [seconds] if self._medium.keeps_pages else []
        return save_s

    def _read(self, way: _Way, num_blocks: int) -> float:
        memory = as_bytes(self._kv)[: num_blocks * self._shape.block_bytes]
        memory.zero_()
        seconds = way.read(self._run, num_blocks, self._lent[way.lender, num_blocks])
        if not torch.equal(memory, self._expected[: len(memory)]):
            raise TransferFailed("what was read is not what was lent")
        return seconds

    def _raw_read(self, raw: Raw, lender: str) -> Callable[[int, int, list[TransferEvent]], float]:
        def read(run: int, num_blocks: int, events: list[TransferEvent]) -> float:
            return raw.read(self._keys(run, num_blocks, self._fingerprints[lender]), events)

        return read

    def clear(self) -> None:
        """Remove the pages of the round."""
        if self._medium.keeps_pages and self._run:
            for fingerprint in self._fingerprints.values():
                self._medium.clear(self._keys(self._run, self._shape.num_blocks, fingerprint))

    def _keys(self, run: int, num_blocks: int, fingerprint: bytes) -> list[PageKey]:
        naming = PageNaming.of(fingerprint, self._shape.layout)
        request = make_request("", prompt(run, num_blocks), fingerprint)
        hashes = naming.block_hashes(request)
        return [naming.full_block(hashes, request.root_hash, index).key for index in range(num_blocks)]
