"""Recorded traffic as a load: who came when, with how long a prompt, and how long the answer was.

    file ─read_trace─▶ TraceRow … ─plan─▶ PlannedRequest …

Traces hold lengths and times, no text, so prompts are made up: of each row's length, equal in every run. Two formats:

- Azure LLM inference, CSV: `TIMESTAMP,ContextTokens,GeneratedTokens` (https://github.com/Azure/AzurePublicDataset).
- Mooncake, one JSON object a line: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`, one for
  every 512 tokens of the prompt, the last of them shared by the rest; equal ids are equal tokens after equal tokens
  (https://github.com/kvcache-ai/Mooncake, `FAST25-release`).

Either may be compressed (`.gz`).
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tandem.serve_bench.records import PlannedRequest

HASH_BLOCK_LEN = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
FIRST_TOKEN_ID = 3
"""Made-up prompts begin here: the ids below are special in most vocabularies."""
_MAX_LEN = 1 << 24
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_EXAMPLE = "2023-11-16 18:15:46.6805900,374,44"
_MOONCAKE_EXAMPLE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}'

TooLong = Literal["cut", "skip"]


class TraceError(ValueError):
    """A trace that cannot be read. The message names the file, the line and what was expected there."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request as it was recorded."""

    at_s: float
    """After the first row of the trace."""
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    """One for each 512 tokens of the prompt; empty where the trace does not say what prompts share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceUse:
    """Which part of a trace is sent, how fast, and how long its requests may be.

    The order: the slice by recorded times, then `speed`, then `length_scale`, then the caps.
    """

    begin_s: float = 0.0
    """Rows before this moment of the recording are left out; it becomes the start of the run."""
    duration_s: float = math.inf
    """Of the recording."""
    speed: float = 1.0
    """2: twice as many requests a second as recorded."""
    length_scale: float = 1.0
    """Every length is multiplied by this, and is at least 1; shared prefixes stay shared."""
    max_input_len: int | None = None
    max_output_len: int | None = None
    too_long: TooLong = "cut"
    """What becomes of a row above a cap: cut down to it, or skipped."""

    def __post_init__(self) -> None:
        for name in ("speed", "length_scale", "duration_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.begin_s < math.inf:
            raise ValueError(f"begin_s is {self.begin_s}; it must be 0 or more")
        for name in ("max_input_len", "max_output_len"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(slots=True)
class TracePlan:
    """What came of a trace."""

    num_rows: int
    """In the whole trace."""
    requests: list[PlannedRequest] = field(default_factory=list)
    num_outside: int = 0
    """Rows outside the slice."""
    num_cut: int = 0
    num_skipped: int = 0

    def __str__(self) -> str:
        """One line for people: nothing that was left out or changed is left unsaid."""
        parts = [f"{len(self.requests)} of {self.num_rows} rows"]
        for count, what in (
            (self.num_outside, "outside the slice"),
            (self.num_cut, "cut to the cap"),
            (self.num_skipped, "skipped as too long"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return ", ".join(parts)


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceRow]:
    """The rows of an Azure CSV or a Mooncake JSONL, which its first line tells apart, in order of time.

    Raises TraceError; OSError if the file cannot be opened.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            lines = _Lines(path, file)
            rows = list(_mooncake(lines, first) if first.lstrip().startswith("{") else _azure(lines, first))
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is damaged, or is no text: {error}") from None
    if not rows:
        raise TraceError(f"{path} has no rows")
    begin_s = min(row.at_s for row in rows)
    shifted = (TraceRow(row.at_s - begin_s, row.input_len, row.output_len, row.hash_ids) for row in rows)
    return sorted(shifted, key=lambda row: row.at_s)


def plan(rows: Iterable[TraceRow], use: TraceUse, *, vocab_size: int, seed: int = 0) -> TracePlan:
    """The load that `use` makes of `rows`, with made-up prompts of ids from 3 to `vocab_size` - 1.

    Rows without hash ids get a prompt of their own, from `seed` and their place in the trace, so that slices and caps
    change no other row's prompt. Equal hash ids give equal tokens, whatever the row.
    """
    if vocab_size <= FIRST_TOKEN_ID:
        raise ValueError(f"vocab_size is {vocab_size}; prompts are made of ids from {FIRST_TOKEN_ID} on")
    planned = TracePlan(0)
    block_len = math.ceil(HASH_BLOCK_LEN * use.length_scale)
    prompts = _Prompts(vocab_size, seed, block_len)
    for index, row in enumerate(rows):
        planned.num_rows += 1
        if not use.begin_s <= row.at_s < use.begin_s + use.duration_s:
            planned.num_outside += 1
            continue
        lengths = [max(1, round(use.length_scale * length)) for length in (row.input_len, row.output_len)]
        caps = (use.max_input_len, use.max_output_len)
        capped = [min(length, cap or length) for length, cap in zip(lengths, caps, strict=True)]
        if capped != lengths and use.too_long == "skip":
            planned.num_skipped += 1
            continue
        planned.num_cut += capped != lengths
        prompt = prompts.shared(row.hash_ids, capped[0]) if row.hash_ids else prompts.own(index, capped[0])
        planned.requests.append(PlannedRequest((row.at_s - use.begin_s) / use.speed, prompt, capped[1]))
    return planned


class _Prompts:
    """Made-up token ids, the same in every process and version: Philox counters keyed by what the tokens stand for."""

    def __init__(self, vocab_size: int, seed: int, block_len: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed % (1 << 63)
        self._block_len = block_len
        self._blocks: dict[int, tuple[int, ...]] = {}

    def own(self, index: int, num_tokens: int) -> tuple[int, ...]:
        return self._ids(2 * index, num_tokens)

    def shared(self, hash_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        ids: list[int] = []
        for hash_id in hash_ids[: math.ceil(num_tokens / self._block_len)]:
            if hash_id not in self._blocks:
                self._blocks[hash_id] = self._ids(2 * hash_id + 1, self._block_len)
            ids += self._blocks[hash_id]
        return tuple(ids[:num_tokens])

    def _ids(self, what: int, num_tokens: int) -> tuple[int, ...]:
        words = np.random.Philox(key=[what, self._seed]).random_raw(num_tokens)
        num_ids = np.uint64(self._vocab_size - FIRST_TOKEN_ID)
        return tuple((words % num_ids + np.uint64(FIRST_TOKEN_ID)).tolist())


class _Lines:
    """The lines after the first, counted, so that an error can say where it is."""

    def __init__(self, path: Path, file: Iterable[str]) -> None:
        self._path = path
        self._file = file
        self.number = 1

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.number += 1
            yield line

    def error(self, problem: str, expected: str) -> TraceError:
        return TraceError(f"{self._path}, line {self.number}: {problem}; expected {expected}")

    def length(self, value: int, name: str) -> int:
        if not 1 <= value <= _MAX_LEN:
            raise self.error(f"{name} is {value}", f"a number of tokens from 1 to {_MAX_LEN}")
        return value


def _azure(lines: _Lines, header: str) -> Iterator[TraceRow]:
    names = header.strip().split(",")
    missing = [name for name in _AZURE_COLUMNS if name not in names]
    if missing:
        problem = f"no column {', '.join(missing)}, and no JSON object either"
        raise lines.error(problem, f"the header {','.join(_AZURE_COLUMNS)}, or {_MOONCAKE_EXAMPLE}")
    columns = [names.index(name) for name in _AZURE_COLUMNS]
    for line in lines:
        if not line.strip():
            continue
        cells = line.strip().split(",")
        try:
            when, context, generated = (cells[column] for column in columns)
            at_s, input_len, output_len = _moment_s(when), int(context), int(generated)
        except (IndexError, ValueError, OverflowError):
            raise lines.error(f"{line.strip()[:80]!r} is no row", f"for example {_AZURE_EXAMPLE}") from None
        yield TraceRow(at_s, lines.length(input_len, "ContextTokens"), lines.length(output_len, "GeneratedTokens"))


def _moment_s(text: str) -> float:
    """Seconds since the epoch. A time without a zone is UTC, or the hour in which clocks change would count twice."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _mooncake(lines: _Lines, first: str) -> Iterator[TraceRow]:
    yield _mooncake_row(lines, first)
    for line in lines:
        if line.strip():
            yield _mooncake_row(lines, line)


def _mooncake_row(lines: _Lines, line: str) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=_MooncakeRow)
    except (msgspec.DecodeError, RecursionError) as error:
        raise lines.error(f"no row ({error})", f"for example {_MOONCAKE_EXAMPLE}") from None
    input_len, output_len = (
        lines.length(row.input_length, "input_length"),
        lines.length(row.output_length, "output_length"),
    )
    num_ids = math.ceil(input_len / HASH_BLOCK_LEN)
    if row.hash_ids and (len(row.hash_ids) != num_ids or not 0 <= min(row.hash_ids) <= max(row.hash_ids) < 1 << 62):
        problem = f"{len(row.hash_ids)} hash_ids for {input_len} tokens"
        raise lines.error(problem, f"{num_ids} of them, one for each {HASH_BLOCK_LEN} tokens, from 0 to 2^62 - 1")
    return TraceRow(row.timestamp / 1e3, input_len, output_len, tuple(row.hash_ids))
