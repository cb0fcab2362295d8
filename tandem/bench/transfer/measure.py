"""Rounds of reading the same pages in every way: raw, digests off, digests on. The ways alternate, so that other load
on the machine affects them equally; what is compared is a ratio of medians.

    sources start (one for digests off, one for on) ─▶ per connection: warm-up rounds, measured rounds ─▶ figures
    round   offer ─▶ each way: all blocks, compared byte by byte ─▶ each way: one block alone, several times ─▶ clear

Throughput is from "these blocks are readable" to "this request may run", for all blocks at once. Latency is the same
for a request of one block while nothing else moves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.core.messages import TransferEvent
from kv_transfer.page.format import PageKey, PageNaming
from tandem.bench.serve.report import machine, versions
from tandem.bench.transfer.endpoint import (
    Shape,
    SourceEndpoint,
    TransferEndpoint,
    TransferFailed,
    as_bytes,
    make_request,
)
from tandem.bench.transfer.media import Medium, RawReader

AS_GIVEN = "connector"
"""The way of a connector whose options alone decide on digests."""
_OF_CONNECTOR = ("off", "on", AS_GIVEN)
_NUM_WARM_UP = 2
_NUM_SINGLES = 8
_SEED = 17
_LABEL_WIDTH = 30
LEGEND = """\
GB/s    all blocks at once, 10^9 bytes per second, median of the rounds; min-max in brackets
of raw  the raw reading's median time over the connector's, measured in the same rounds
p50 p99 one block alone, from "it is readable" to "its request may run"; p99 of fewer than 100 readings is the longest
save    until a reader could read"""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """One way of reading. Seconds; one entry for each round, or for each block read alone."""

    way: str
    """off or on for the connector's digests, or AS_GIVEN; else the name of a raw reader."""
    all_blocks_s: list[float] = field(default_factory=list)
    one_block_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    """Until a reader could read; empty for raw ways."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.all_blocks_s)

    def one_ms(self, quantile: float) -> float:
        """Latency of one block, milliseconds."""
        ordered = sorted(self.one_block_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Result:
    """One medium at one shape."""

    medium: str
    location: str
    shape: Shape
    figures: list[Figures]
    """The connector's first, then raw ones."""
    goals: dict[str, float]

    def gb_s(self, figures: Figures) -> float:
        """10^9 bytes per second."""
        return self.shape.num_bytes / figures.median_s / 1e9

    def save_gb_s(self, figures: Figures) -> float | None:
        return self.shape.num_bytes / statistics.median(figures.save_s) / 1e9 if figures.save_s else None

    def share(self, figures: Figures) -> float | None:
        """Of the first raw reader, by medians."""
        raw = next((one for one in self.figures if one.way not in _OF_CONNECTOR), None)
        return None if raw is None else raw.median_s / figures.median_s


@dataclass(frozen=True, slots=True)
class _Reader:
    """A way of reading what `source` offers."""

    name: str
    source: str
    read: Callable[[int, int, list[TransferEvent]], float]
    """Of run, number of blocks and events; returns seconds."""


def measure(medium: Medium, shape: Shape, *, digests: Sequence[str], num_rounds: int, progress: Progress) -> Result:
    """`digests` are ways, off and on; a medium without digests has one, AS_GIVEN. Raises EngineError, StoreError or
    TransferFailed; leaves nothing behind in any case."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(medium.opened(shape))
        bench = _Bench(medium, shape, digests if medium.has_digests else [AS_GIVEN])
        stack.callback(bench.clear)  # after the end of the sources: an interrupted one may still be saving
        progress("starting the source processes")
        bench.start_sources(stack)
        per_connection = -(-num_rounds // medium.num_connections)
        for connection in range(medium.num_connections):
            with bench.readers() as readers:
                for index in range(-_NUM_WARM_UP, per_connection):
                    number = connection * per_connection + index + 1
                    total = per_connection * medium.num_connections
                    progress("warming up" if index < 0 else f"round {number} of {total}")
                    bench.measure_round(readers, index)
        return Result(medium.name, medium.location, shape, list(bench.figures.values()), medium.goals)


class _Bench:
    """One medium at one shape, while it is measured."""

    def __init__(self, medium: Medium, shape: Shape, digests: Sequence[str]) -> None:
        self._medium = medium
        self._shape = shape
        self._kv = shape.memory()
        self._expected = shape.content(_SEED)
        self._fingerprints = {name: hashlib.sha256(os.urandom(16)).digest() for name in digests}
        self._sources: dict[str, SourceEndpoint] = {}
        self._run = 0
        self._offers: dict[tuple[str, int], list[TransferEvent]] = {}
        self.figures = {name: Figures(name) for name in digests}

    def start_sources(self, stack: contextlib.ExitStack) -> None:
        for name, fingerprint in self._fingerprints.items():
            config, folder = self._medium.config(name == "on"), self._medium.folder
            source = SourceEndpoint(self._shape, config, fingerprint, seed=_SEED, folder=folder)
            stack.callback(source.close)
            self._sources[name] = source
        for source in self._sources.values():
            source.wait_ready()

    @contextlib.contextmanager
    def readers(self) -> Iterator[list[_Reader]]:
        with contextlib.ExitStack() as stack:
            readers = []
            for name, fingerprint in self._fingerprints.items():
                endpoint = TransferEndpoint(self._shape, self._medium.config(name == "on"), fingerprint, self._kv)
                stack.callback(endpoint.shutdown)
                readers.append(_Reader(name, name, endpoint.load))
            source = next(iter(self._fingerprints))
            for name, raw in self._medium.raw_readers(self._shape, self._kv, stack).items():
                readers.append(_Reader(name, source, partial(self._read_raw, raw, source)))
                self.figures.setdefault(name, Figures(name))
            yield readers

    def measure_round(self, readers: list[_Reader], index: int) -> None:
        """Offers, reads in every way, clears. The first way differs from round to round; below 0 it is a warm-up."""
        first = index % len(readers)
        readers = readers[first:] + readers[:first]
        figures = self.figures if index >= 0 else {name: Figures(name) for name in self.figures}
        try:
            self._offer(figures)
            for reader in readers:
                figures[reader.name].all_blocks_s.append(self._read(reader, self._shape.num_blocks))
            for _ in range(_NUM_SINGLES):
                for reader in readers:
                    figures[reader.name].one_block_s.append(self._read(reader, 1))
        finally:
            self.clear()

    def clear(self) -> None:
        if self._medium.keeps_pages and self._run:
            for source in self._fingerprints:
                self._medium.clear(self._keys(self._run, self._shape.num_blocks, source))

    def _offer(self, figures: Mapping[str, Figures]) -> None:
        """Memory is offered once, a store gets new pages every round."""
        if self._offers and not self._medium.keeps_pages:
            return
        self._run += 1
        num_blocks = self._shape.num_blocks
        for name, source in self._sources.items():
            self._offers[name, num_blocks], seconds = source.offer(self._run, num_blocks)
            if num_blocks > 1:  # else it is the same transfer, which can be offered once
                self._offers[name, 1], _ = source.offer(self._run, 1)
            if self._medium.keeps_pages:
                figures[name].save_s.append(seconds)

    def _read(self, reader: _Reader, num_blocks: int) -> float:
        memory = as_bytes(self._kv)[: num_blocks * self._shape.block_bytes]
        memory.zero_()
        seconds = reader.read(self._run, num_blocks, self._offers[reader.source, num_blocks])
        if not torch.equal(memory, self._expected[: len(memory)]):
            raise TransferFailed("the bytes read differ from the bytes offered")
        return seconds

    def _read_raw(self, raw: RawReader, source: str, run: int, num_blocks: int, events: list[TransferEvent]) -> float:
        return raw(self._keys(run, num_blocks, source), events)

    def _keys(self, run: int, num_blocks: int, source: str) -> list[PageKey]:
        fingerprint = self._fingerprints[source]
        naming = PageNaming.of(fingerprint, self._shape.layout, self._medium.key(source == "on"))
        request = make_request("", run, num_blocks, fingerprint)
        hashes = naming.block_hashes(request)
        return [naming.full_block(hashes, request.root_hash, index).key for index in range(num_blocks)]


def table(result: Result) -> list[str]:
    """A headline, then one line for each way of reading."""
    shape = result.shape
    lines = [
        f"{result.medium}, {shape.num_blocks} blocks of {shape.block_bytes / 1e6:.2f} MB, "
        f"{len(result.figures[0].all_blocks_s)} rounds" + (f", over {result.location}" if result.location else ""),
        f"  {'':{_LABEL_WIDTH}}{'GB/s':>6} {'(min-max)':>13} {'of raw':>7} {'goal':>6}"
        f" {'p50 ms':>8} {'p99 ms':>8} {'save':>6}",
    ]
    lines += [_table_line(result, figures) for figures in result.figures]
    return lines


def _table_line(result: Result, figures: Figures) -> str:
    label = f"digests {figures.way}" if figures.way in ("off", "on") else figures.way
    num_bytes = result.shape.num_bytes
    span = f"({num_bytes / max(figures.all_blocks_s) / 1e9:.2f}-{num_bytes / min(figures.all_blocks_s) / 1e9:.2f})"
    share, goal, save = result.share(figures), result.goals.get(figures.way), result.save_gb_s(figures)
    return (
        f"  {label:{_LABEL_WIDTH}}{result.gb_s(figures):6.2f} {span:>13} {_percent(share):>7} {_percent(goal):>6}"
        f" {figures.one_ms(0.5):8.2f} {figures.one_ms(0.99):8.2f} {'' if save is None else f'{save:.2f}':>6}"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def write_json(path: Path, results: Sequence[Result], *, is_partial: bool) -> None:
    """All figures, of each round too, the versions and the machine. Partial: results are missing."""
    content = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "partial": is_partial,
        "versions": versions(),
        "machine": machine(),
        "results": [_as_dict(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "connector": result.medium,
        "over": result.location,
        "num_blocks": result.shape.num_blocks,
        "block_bytes": result.shape.block_bytes,
        "ways": [
            {
                **asdict(figures),
                "gb_s": result.gb_s(figures),
                "share_of_raw": result.share(figures),
                "goal": result.goals.get(figures.way),
                "one_block_p50_ms": figures.one_ms(0.5),
                "one_block_p99_ms": figures.one_ms(0.99),
                "save_gb_s": result.save_gb_s(figures),
            }
            for figures in result.figures
        ],
    }
