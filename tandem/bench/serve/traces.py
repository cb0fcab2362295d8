"""Recorded traffic as a load: arrival times, prompt lengths and output lengths.

    file ─read_trace─▶ TraceRow … ─plan─▶ PlannedRequest …

Traces hold lengths and times, no text. Prompts of each row's length are generated: the same for the same seed, and
others for each run of a sweep. Two formats:

- Azure LLM inference, CSV: `TIMESTAMP,ContextTokens,GeneratedTokens` (https://github.com/Azure/AzurePublicDataset).
- Mooncake, one JSON object a line: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`: one for
  every 512 tokens of the prompt, the last one for the rest; equal ids are equal tokens after equal tokens
  (https://github.com/kvcache-ai/Mooncake, `FAST25-release`). Traces of this form with other blocks are read as well.

Either may be compressed (`.gz`).
"""

from __future__ import annotations

import gzip
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from tandem.bench.serve.endpoint import PlannedRequest

HASH_BLOCK_LEN = 512
"""Tokens that one hash id stands for in Mooncake's own traces."""
MAX_LEN = 1 << 24
"""Tokens of a prompt or an answer."""
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_EXAMPLE = "2023-11-16 18:15:46.6805900,374,44"
_MOONCAKE_EXAMPLE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}'

TooLong = Literal["cut", "skip"]
T = TypeVar("T")


class TraceError(ValueError):
    """An invalid trace. The message names the file, the line and the expected content."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    """After the first row of the trace."""
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    """One for each block of the prompt; empty if the trace has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceUse:
    """The replayed part of a trace, its speed, and limits on lengths.

    The order: the slice by recorded times, then `speed`, then `length_scale`, then the caps.
    """

    begin_s: float = 0.0
    """Time in the recording where the replay starts; earlier rows are omitted."""
    duration_s: float = math.inf
    """Of the recording."""
    speed: float = 1.0
    """2: twice as many requests per second as recorded."""
    length_scale: float = 1.0
    """Factor for every length, at least 1 token each; shared prefixes stay shared."""
    hash_block_len: int = HASH_BLOCK_LEN
    """Tokens that one hash id stands for, as recorded."""
    max_input_len: int | None = None
    max_output_len: int | None = None
    too_long: TooLong = "cut"
    """Whether a row above a cap is cut down to it, or skipped."""


@dataclass(slots=True)
class TraceCounts:
    """How many rows of a trace are requests, and what became of the others."""

    num_rows: int = 0
    """In the whole trace."""
    num_planned: int = 0
    """Rows that are requests."""
    num_outside: int = 0
    """Rows outside the slice."""
    num_cut: int = 0
    num_skipped: int = 0

    def __str__(self) -> str:
        others = {
            "outside the slice": self.num_outside,
            "cut to the cap": self.num_cut,
            "skipped as too long": self.num_skipped,
        }
        counts = [f"{self.num_planned} of {self.num_rows} rows"]
        return ", ".join(counts + [f"{count} {what}" for what, count in others.items() if count])


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, hash_block_len: int = HASH_BLOCK_LEN) -> list[TraceRow]:
    """The rows of an Azure CSV or a Mooncake JSONL, by its first line, in order of time.

    Raises TraceError; OSError if the file cannot be opened.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            lines: Iterable[tuple[int, str]] = enumerate(file, 2)
            if first.lstrip().startswith("{"):
                parse: Callable[[str], TraceRow] = partial(_mooncake_row, block_len=hash_block_len)
                lines = itertools.chain([(1, first)], lines)
            else:
                parse = _located(path, 1, _azure_parser, first)
            rows = [_located(path, number, parse, line) for number, line in lines if line.strip()]
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is damaged, or is not text: {error}") from None
    if not rows:
        raise TraceError(f"{path} has no rows")
    rows.sort(key=lambda row: row.at_s)
    return [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]


def count(rows: Iterable[TraceRow], use: TraceUse) -> TraceCounts:
    """What `plan` makes of `rows`, without the prompts, which take time and memory."""
    counts = TraceCounts()
    for _ in _used(rows, use, counts):
        pass
    return counts


def check_lengths(rows: Iterable[TraceRow], use: TraceUse) -> None:
    """Raises ValueError for a request that is longer than a row may be."""
    for _, row, *lengths in _used(rows, use, TraceCounts()):
        if max(lengths) > MAX_LEN:
            raise ValueError(
                f"--length-scale {use.length_scale:g} makes more than {MAX_LEN} tokens of the {row.input_len} in and "
                f"{row.output_len} out of a row: lower it, or give --max-prompt-len and --max-output-len"
            )


def plan(rows: Iterable[TraceRow], use: TraceUse, ids: Sequence[int], *, seed: int = 0) -> Iterator[PlannedRequest]:
    """The requests that `use` makes of `rows`, with generated prompts of token ids in `ids`.

    Rows without hash ids get a unique prompt, from `seed` and their index in the trace, so that slices and caps change
    no other row's prompt. Equal hash ids give equal tokens, whatever the row.
    """
    prompts = _Prompts(ids, seed, block_len=math.ceil(min(use.hash_block_len * use.length_scale, MAX_LEN)))
    for index, row, input_len, output_len in _used(rows, use, TraceCounts()):
        prompt = prompts.shared(row.hash_ids, input_len) if row.hash_ids else prompts.unique(index, input_len)
        yield PlannedRequest((row.at_s - use.begin_s) / use.speed, prompt, output_len)


def _used(rows: Iterable[TraceRow], use: TraceUse, counts: TraceCounts) -> Iterator[tuple[int, TraceRow, int, int]]:
    """Index, row, input and output length of each request. Counts the rows in `counts`."""
    for index, row in enumerate(rows):
        counts.num_rows += 1
        if not use.begin_s <= row.at_s < use.begin_s + use.duration_s:
            counts.num_outside += 1
            continue
        scaled = [min(use.length_scale * length, MAX_LEN + 1) for length in (row.input_len, row.output_len)]
        lengths = [max(1, round(length)) for length in scaled]
        caps = (use.max_input_len, use.max_output_len)
        capped = [min(length, cap or length) for length, cap in zip(lengths, caps, strict=True)]
        if capped != lengths and use.too_long == "skip":
            counts.num_skipped += 1
            continue
        counts.num_cut += capped != lengths
        counts.num_planned += 1
        yield index, row, capped[0], capped[1]


class _Prompts:
    """Generated token ids, equal in every process and version: Philox counters keyed by row or hash id."""

    def __init__(self, ids: Sequence[int], seed: int, block_len: int) -> None:
        self._ids = ids
        self._seed = seed % (1 << 63)
        self._block_len = block_len
        self._blocks: dict[int, tuple[int, ...]] = {}

    def unique(self, index: int, num_tokens: int) -> tuple[int, ...]:
        return self._draw(2 * index, num_tokens)

    def shared(self, hash_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        ids: list[int] = []
        for hash_id in hash_ids[: math.ceil(num_tokens / self._block_len)]:
            length = min(self._block_len, num_tokens - len(ids))
            if len(self._blocks.get(hash_id, ())) < length:  # fewer are the first ones of more
                self._blocks[hash_id] = self._draw(2 * hash_id + 1, length)
            ids += self._blocks[hash_id][:length]
        return tuple(ids)

    def _draw(self, key: int, num_tokens: int) -> tuple[int, ...]:
        values = np.random.Philox(key=[key, self._seed]).random_raw(num_tokens)
        return tuple(self._ids[place] for place in (values % np.uint64(len(self._ids))).tolist())


def _located(path: Path, number: int, parse: Callable[[str], T], line: str) -> T:
    """What `parse` makes of the line. Its ValueError says what is wrong and what is expected."""
    try:
        return parse(line)
    except ValueError as error:
        raise TraceError(f"{path}, line {number}: {error}") from None


def _azure_parser(header: str) -> Callable[[str], TraceRow]:
    names = header.strip().split(",")
    missing = [name for name in _AZURE_COLUMNS if name not in names]
    if missing:
        expected = f"the header {','.join(_AZURE_COLUMNS)}, or {_MOONCAKE_EXAMPLE}"
        raise ValueError(f"no column {', '.join(missing)}, and not a JSON object; expected {expected}")
    columns = [names.index(name) for name in _AZURE_COLUMNS]

    def parse(line: str) -> TraceRow:
        cells = line.strip().split(",")
        try:
            when, context, generated = (cells[column] for column in columns)
            at_s, input_len, output_len = _time_s(when), int(context), int(generated)
        except (IndexError, ValueError, OverflowError):
            problem = f"{line.strip()[:80]!r} is not a row"
            raise ValueError(f"{problem}; expected for example {_AZURE_EXAMPLE}") from None
        return TraceRow(at_s, _length(input_len, "ContextTokens"), _length(output_len, "GeneratedTokens"))

    return parse


def _time_s(text: str) -> float:
    """Seconds since the epoch. A time without a zone is UTC, or the hour of a clock change would count twice."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _mooncake_row(line: str, *, block_len: int) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=_MooncakeRow)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a row ({error}); expected for example {_MOONCAKE_EXAMPLE}") from None
    input_len, output_len = _length(row.input_length, "input_length"), _length(row.output_length, "output_length")
    num_ids = math.ceil(input_len / block_len)
    if row.hash_ids and (len(row.hash_ids) != num_ids or not 0 <= min(row.hash_ids) <= max(row.hash_ids) < 1 << 62):
        problem = f"{len(row.hash_ids)} hash_ids for {input_len} tokens"
        expected = f"{num_ids} of them, one for each {block_len} tokens, from 0 to 2^62 - 1"
        raise ValueError(f"{problem}; expected {expected}; --hash-block-len is the length of the trace's blocks")
    return TraceRow(row.timestamp / 1e3, input_len, output_len, tuple(row.hash_ids))


def _length(value: int, name: str) -> int:
    if not 1 <= value <= MAX_LEN:
        raise ValueError(f"{name} is {value}; expected a number of tokens from 1 to {MAX_LEN}")
    return value
