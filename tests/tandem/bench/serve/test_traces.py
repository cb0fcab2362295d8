"""Traces: two formats read as recorded, damage named by its line, equal hash ids as equal prefixes."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.serve.traces import (
    HASH_BLOCK_LEN,
    TraceError,
    TraceRow,
    TraceUse,
    check_lengths,
    count,
    plan,
    read_trace,
)

DATA = Path(__file__).parents[3] / "data"
AZURE = DATA / "azure_llm_2023_conv_300.csv"
MOONCAKE = DATA / "mooncake_synthetic_200.jsonl.gz"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
IDS = range(3, 512)


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def mooncake_line(**fields: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]} | fields) + "\n"


def reference_tokens(code: str) -> str:
    """What `code` prints in a process whose clocks changed in the night of 2023-11-05, and with other hashes."""
    return subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path; from tandem.bench.serve.traces import *; {code}"],
        env={**os.environ, "TZ": "America/New_York", "PYTHONHASHSEED": "7"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout


# Reading


def test_azure_rows_are_read_as_recorded() -> None:
    rows = read_trace(AZURE)
    assert len(rows) == 300
    assert [(row.input_len, row.output_len) for row in rows[:3]] == [(374, 44), (396, 109), (879, 55)]
    assert rows[0].at_s == 0
    assert rows[1].at_s == pytest.approx(50.995169 - 46.680590, abs=1e-6)
    assert all(row.hash_ids == () for row in rows)


def test_mooncake_rows_are_read_as_recorded() -> None:
    rows = read_trace(MOONCAKE)
    with gzip.open(MOONCAKE, "rt") as file:
        recorded = [json.loads(line) for line in file]
    assert len(rows) == len(recorded) == 200
    for row, line in zip(rows, recorded, strict=True):
        assert (row.input_len, row.output_len) == (line["input_length"], line["output_length"])
        assert row.hash_ids == tuple(line["hash_ids"])
        assert row.at_s == pytest.approx((line["timestamp"] - recorded[0]["timestamp"]) / 1000)


def test_a_compressed_file_has_the_rows_of_the_plain_one(tmp_path: Path) -> None:
    compressed = tmp_path / "trace.csv.gz"
    compressed.write_bytes(gzip.compress(AZURE.read_bytes()))
    assert read_trace(compressed) == read_trace(AZURE)


def test_times_with_a_zone_and_in_any_order_are_sorted(tmp_path: Path) -> None:
    lines = "2024-05-10 00:00:02.5+00:00,20,2\n2024-05-10 02:00:00+02:00,10,1\n2024-05-10 00:00:01,15,1\n"
    rows = read_trace(written(tmp_path, HEADER + lines))
    assert [(row.at_s, row.input_len) for row in rows] == [(0.0, 10), (1.0, 15), (2.5, 20)]


def test_times_without_a_zone_do_not_depend_on_the_machines(tmp_path: Path) -> None:
    trace = written(tmp_path, HEADER + "2023-11-05 00:30:00,1,1\n2023-11-05 02:30:00,1,1\n")
    assert reference_tokens(f"print([row.at_s for row in read_trace(Path({str(trace)!r}))])") == "[0.0, 7200.0]\n"


def test_blocks_of_another_length_are_shared_as_recorded(tmp_path: Path) -> None:
    ids = ([1, 2, 3], [1, 2, 4])
    text = "".join(mooncake_line(input_length=40, hash_ids=hash_ids) for hash_ids in ids)
    path = written(tmp_path, text, "trace.jsonl")
    with pytest.raises(TraceError, match=r"one for each 512 tokens, .* --hash-block-len is the length"):
        read_trace(path)
    first, second = plan(read_trace(path, 16), TraceUse(hash_block_len=16), IDS)
    assert first.prompt_token_ids[:32] == second.prompt_token_ids[:32]
    assert first.prompt_token_ids[32:] != second.prompt_token_ids[32:]
    assert len(first.prompt_token_ids) == 40


# Damage


@pytest.mark.parametrize(
    "line",
    [
        "2023-11-16 18:15:46,374",
        "yesterday,374,44",
        "2023-11-16 18:15:46,many,44",
        "2023-11-16 18:15:46,374,4.5",
        "9999999-11-16 18:15:46,374,4",
    ],
)
def test_a_bad_azure_row_is_named_by_its_line_and_what_was_expected(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, HEADER + "2023-11-16 18:15:46,1,1\n\n" + line + "\n")
    with pytest.raises(TraceError, match=r"trace\.csv, line 4: .* is not a row; expected for example 2023-11-16 18:15"):
        read_trace(path)


@pytest.mark.parametrize("value", ["0", "-7", "99999999999"])
def test_a_length_that_cannot_be_is_refused(tmp_path: Path, value: str) -> None:
    path = written(tmp_path, f"{HEADER}2023-11-16 18:15:46,{value},44\n")
    with pytest.raises(TraceError, match=rf"line 2: ContextTokens is {value}; expected a number of tokens from 1"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{\n", "not a row"),
        (mooncake_line(timestamp="soon"), "not a row .*timestamp"),
        (mooncake_line(input_length=1.5), "not a row .*input_length"),
        ('{"timestamp": 0, "input_length": 5}\n', "not a row .*output_length"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 5}\n', "not a row"),
        ("[" * 100_000 + "\n", "not a row"),
        (mooncake_line(output_length=0), "output_length is 0; expected a number of tokens from 1"),
        (mooncake_line(hash_ids=[5]), "1 hash_ids for 600 tokens; expected 2 of them"),
        (mooncake_line(hash_ids=[5, -1]), "2 hash_ids for 600 tokens; expected 2 of them, .* from 0 to"),
    ],
)
def test_a_bad_mooncake_row_is_named_by_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path, mooncake_line() + line, "trace.jsonl")
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 2: {problem}"):
        read_trace(path)


def test_another_kind_of_file_is_answered_with_the_expected_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1: no column ContextTokens, .* expected the header TIMESTAMP,Cont"):
        read_trace(written(tmp_path, "TIMESTAMP,tokens,GeneratedTokens\n"))
    with pytest.raises(TraceError, match="has no rows"):
        read_trace(written(tmp_path, HEADER))


def test_a_cut_or_foreign_file_is_an_error_of_the_trace(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(MOONCAKE.read_bytes()[:-200])
    foreign = tmp_path / "picture.csv"
    foreign.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    for path in (cut, foreign):
        with pytest.raises(TraceError, match="is damaged, or is not text"):
            read_trace(path)
    plain_named_gz = tmp_path / "plain.csv.gz"
    plain_named_gz.write_bytes(AZURE.read_bytes())
    with pytest.raises(TraceError, match="is damaged"):
        read_trace(plain_named_gz)


# Planning


def test_slice_and_speed_keep_the_recorded_order_and_gaps() -> None:
    rows = read_trace(AZURE)
    use = TraceUse(begin_s=10, duration_s=30, speed=4)
    whole, part = list(plan(rows, TraceUse(), IDS)), list(plan(rows, use, IDS))
    wanted = [row for row in rows if 10 <= row.at_s < 40]
    assert 0 < len(wanted) < len(rows)
    assert [request.at_s for request in part] == pytest.approx([(row.at_s - 10) / 4 for row in wanted])
    assert count(rows, use).num_outside == len(rows) - len(wanted)
    prompts = {request.prompt_token_ids for request in whole}
    assert all(request.prompt_token_ids in prompts for request in part), "a slice changes no prompt"


def test_the_first_requests_are_the_same_alone_and_all_rows_are_counted() -> None:
    rows = read_trace(AZURE)
    assert list(itertools.islice(plan(rows, TraceUse(), IDS), 3)) == list(plan(rows, TraceUse(), IDS))[:3]
    assert str(count(rows, TraceUse())) == "300 of 300 rows"


@pytest.mark.parametrize("too_long", ["cut", "skip"])
def test_rows_above_a_cap_are_cut_or_skipped_and_counted(too_long: Any) -> None:
    rows = read_trace(AZURE)
    num_above = sum(row.input_len > 500 or row.output_len > 60 for row in rows)
    use = TraceUse(max_input_len=500, max_output_len=60, too_long=too_long)
    planned, counts = list(plan(rows, use, IDS)), count(rows, use)
    assert 0 < num_above < len(rows)
    assert all(len(one.prompt_token_ids) <= 500 and one.max_tokens <= 60 for one in planned)
    if too_long == "cut":
        assert (counts.num_cut, counts.num_skipped, len(planned)) == (num_above, 0, 300)
        assert str(counts) == f"300 of 300 rows, {num_above} cut to the cap"
    else:
        assert (counts.num_cut, counts.num_skipped, len(planned)) == (0, num_above, 300 - num_above)
        assert str(counts) == f"{300 - num_above} of 300 rows, {num_above} skipped as too long"


@pytest.mark.parametrize("scale", [1e6, 1e308])
@pytest.mark.parametrize("lengths", [(300, 1), (1, 300)])
def test_a_row_that_is_too_long_once_it_is_scaled_is_rejected(lengths: tuple[int, int], scale: float) -> None:
    rows, use = [TraceRow(0.0, *lengths)], TraceUse(length_scale=scale)
    with pytest.raises(ValueError, match=r"--length-scale 1e\+\d+ makes more than 16777216 tokens of the "):
        check_lengths(rows, use)
    capped = TraceUse(length_scale=scale, max_input_len=50, max_output_len=60)
    check_lengths(rows, capped)
    assert count(rows, capped).num_cut == 1


@pytest.mark.parametrize("use", [{"length_scale": 1e308}, {"hash_block_len": 1 << 60}])
def test_of_a_long_block_only_the_tokens_that_a_prompt_has_are_made(use: dict[str, Any]) -> None:
    rows = [TraceRow(0.0, length, 1, (7,)) for length in (20, 40, 30)]
    prompts = [one.prompt_token_ids for one in plan(rows, TraceUse(max_input_len=40, max_output_len=1, **use), IDS)]
    longest = max(prompts, key=len)
    assert len(longest) == 40
    assert all(longest[: len(prompt)] == prompt for prompt in prompts)


def test_prompts_are_the_same_in_every_process() -> None:
    rows = [TraceRow(0.0, 5, 1), TraceRow(1.0, 700, 1, (7, 9))]
    here = list(plan(rows, TraceUse(), IDS))
    assert reference_tokens(f"print(list(plan({rows}, TraceUse(), {IDS})))") == f"{here}\n"


def shared_prefix_len(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@given(
    ids=st.tuples(*[st.lists(st.integers(0, 3), min_size=1, max_size=4)] * 2),
    rest=st.tuples(*[st.integers(1, HASH_BLOCK_LEN)] * 2),
    scale=st.floats(0.02, 1.5),
    cap=st.none() | st.integers(1, 1500),
)
def test_prompts_share_exactly_the_prefix_that_their_hash_ids_share(
    ids: tuple[list[int], list[int]], rest: tuple[int, int], scale: float, cap: int | None
) -> None:
    rows = [
        TraceRow(0.0, HASH_BLOCK_LEN * (len(some) - 1) + more, 1, tuple(some))
        for some, more in zip(ids, rest, strict=True)
    ]
    use = TraceUse(length_scale=scale, max_input_len=cap)
    first, second = (one.prompt_token_ids for one in plan(rows, use, range(3, 1 << 40)))
    for row, prompt in zip(rows, (first, second), strict=True):
        wanted = max(1, round(row.input_len * scale))
        assert len(prompt) == min(wanted, cap or wanted)
    block_len = -(-HASH_BLOCK_LEN * scale // 1)
    num_shared_blocks = shared_prefix_len(rows[0].hash_ids, rows[1].hash_ids)
    assert shared_prefix_len(first, second) == min(num_shared_blocks * block_len, len(first), len(second))


@given(st.sets(st.integers(0, 1 << 20), min_size=1), st.integers(0, 1 << 70))
def test_prompts_have_only_the_given_ids(ids: set[int], seed: int) -> None:
    rows = [TraceRow(0.0, 40, 1), TraceRow(0.0, 40, 1, (9,))]
    for request in plan(rows, TraceUse(), sorted(ids), seed=seed):
        assert ids.issuperset(request.prompt_token_ids)
