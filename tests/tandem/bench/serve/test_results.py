"""What is on the screen, and in the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.bench.serve.endpoint import INTERRUPTED, RequestRecord
from tandem.bench.serve.report import Objectives, summarise
from tandem.bench.serve.results import (
    Point,
    Results,
    format_rate,
    late_warning,
    machine,
    notes,
    page,
    sweep_table,
    versions,
    write_json,
)

OBJECTIVES = Objectives(ttft_ms=150, e2e_ms=1000)
GOOD = RequestRecord(0.0, 0.0, 10, 3, [0.1, 0.2, 0.2], 0.2, "length")
SLOW = RequestRecord(0.5, 0.5, 10, 2, [1.0, 2.0], 2.0, "length")
REFUSED = RequestRecord(1.0, 1.0, 10, 3, ended_s=1.0, error="HTTP 503: full", status="HTTP 503", refused=True)
CUT_OFF = RequestRecord(1.5, 1.5, 10, 3, ended_s=1.6, error="INTERRUPTED: x", status=INTERRUPTED)


def test_a_page_has_every_figure_and_notes() -> None:
    text = "\n".join(page(summarise([GOOD, SLOW, REFUSED, CUT_OFF], OBJECTIVES), OBJECTIVES))
    for part in (
        "2 ok, 0 failed, 1 refused, 1 unfinished in 2.0 s",
        "1.00 requests/s   2.5 output tokens/s   12.5 tokens/s with prompts",
        "0.50 requests/s: 33.3% met ttft ≤ 150 ms, e2e ≤ 1000 ms (ttft 33.3%, e2e 33.3%)",
        "kept its schedule: lag p99 0.00 ms",
        "33.3% of the gaps in ITL are 0",
        "1 x HTTP 503",
    ):
        assert part in text
    (ttft,) = [line for line in text.splitlines() if line.strip().startswith("TTFT ")]
    # 100 and 500: mean and median 300, p90 at rank 0.9
    assert ttft.split() == ["TTFT", "300.00", "300.00", "460.00", "480.00", "496.00", "500.00", "2"]


def test_one_request_has_no_rate() -> None:
    assert "(offered: -)" in "\n".join(page(summarise([GOOD]), Objectives()))
    assert "(offered: all at once)" in "\n".join(page(summarise([GOOD, GOOD]), Objectives()))


def test_the_page_has_the_share_of_cached_tokens_if_the_endpoint_reports_it() -> None:
    some = replace(GOOD, num_cached_tokens=8, num_stored_tokens=2)
    [line] = [line for line in page(summarise([some]), Objectives()) if line.startswith("  prompts ")]
    assert line == "  prompts     10 tokens: 80.0% cached (8, 2 of them from a store)"
    nothing = page(summarise([replace(GOOD, num_cached_tokens=0)]), Objectives())
    assert "  prompts     10 tokens: 0.0% cached (0)" in nothing
    assert not any("cached" in line for line in page(summarise([GOOD]), Objectives()))


def test_loads_that_were_late_share_one_warning() -> None:
    late = summarise([RequestRecord(0.0, 0.5, 10, 1, [0.6], 0.6, "length")], None, [0.2])
    (note, *_) = notes(late)
    assert "sent 500.0 ms late" in note
    assert "woke up 200.0 ms late" in note
    points = [Point(1.0, summarise([GOOD])), Point(2.0, late), Point(4.0, late)]
    (warning,) = late_warning(points)
    assert warning.startswith("WARNING: the load did not keep its schedule at 2/s, 4/s.")
    assert "WARNING" not in note
    assert late_warning(points[:1]) == []
    assert [line.split()[:2] for line in sweep_table(points)[2:]] == [["2/s", "late"], ["4/s", "late"]]


def test_notes_name_requests_that_were_held_packed_or_short() -> None:
    held = RequestRecord(0.0, 2.0, 10, 5, [2.1, 2.2], 2.2, "length", held_s=2.0, num_reported_tokens=4)
    text = "\n".join(notes(summarise([held])))
    assert "delayed by the concurrency limit: 1 of 1 requests, 2000 ms at the median" in text
    assert "do not say how many tokens they carry: 1 of 1" in text
    assert "another length than requested: 1 of 1" in text


def test_a_sweep_has_a_line_for_each_rate_and_goodput_only_with_objectives() -> None:
    with_goal = [Point(rate, summarise([GOOD, SLOW], OBJECTIVES)) for rate in (0.5, float("inf"))]
    head, *lines = sweep_table(with_goal)
    assert head.split()[-2:] == ["GOODPUT", "SLO"]
    assert [line.split()[0] for line in lines] == ["0.5/s", "all"]
    assert lines[0].split()[-2:] == ["0.50", "50.0%"]
    slow = RequestRecord(0.0, 0.0, 10, 3, [99.999, 99.9991, 200.0], 200.0, "length")
    widest = [Point(rate, summarise([slow] * 9999, OBJECTIVES)) for rate in (0.125, float("inf"))]
    assert max(map(len, sweep_table(widest))) <= 110
    without = [Point(2.5, summarise([slow] * 999)), Point(16.0, summarise([GOOD] * 99))]
    assert max(map(len, sweep_table(without))) <= 80
    assert "GOODPUT" not in sweep_table([Point(1.0, summarise([GOOD]))])[0]


def test_a_run_without_an_answer_or_a_gap_has_no_latency_in_a_sweep() -> None:
    one_token = RequestRecord(0.0, 0.0, 10, 1, [0.1], 0.1, "length")
    _, refused, short = sweep_table([Point(1.0, summarise([REFUSED])), Point(2.0, summarise([one_token]))])
    assert refused.split()[4:] == ["-"] * 6
    assert short.split()[4:] == ["100", "100", "-", "-", "100", "100"]


def test_rates_are_formatted() -> None:
    assert [format_rate(rate) for rate in (2.5, float("inf"), None)] == ["2.5/s", "all at once", "as in the trace"]


@pytest.mark.parametrize("with_records", [True, False])
def test_the_file_has_everything_and_is_strict_json(tmp_path: Path, with_records: bool) -> None:
    points = [Point(rate, summarise([GOOD, SLOW], OBJECTIVES), [GOOD, SLOW]) for rate in (float("inf"), None)]
    results = Results("there", "demo", {"seed": 7, "tokenizer": tmp_path}, points, "by ids", stopped_by="Ctrl-C")
    write_json(tmp_path / "r.json", results, with_records=with_records)
    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert (found["partial"], found["settings"]["seed"], found["counting"]) == (True, 7, "by ids")
    assert found["machine"]["cores"] == machine()["cores"]
    assert found["versions"] == versions()
    assert [point["rate"] for point in found["points"]] == ["inf", None]
    assert found["points"][0]["ttft"]["p50"] == pytest.approx(300)
    assert found["points"][0]["attainments"] == {"ttft": 0.5, "e2e": 0.5}
    if with_records:
        assert found["points"][0]["requests"][1]["token_s"] == [1.0, 2.0]
    else:
        assert "requests" not in found["points"][0]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_a_link_such_as_dev_stdout_is_written_through_and_not_replaced(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_json(link, Results("there", "demo", {}), with_records=False)
    assert link.is_symlink()
    assert json.loads(target.read_text())["model"] == "demo"


def test_a_file_that_was_there_stays_when_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "r.json", Results("there", "demo", {"x": float("nan")}), with_records=False)
    assert (tmp_path / "r.json").read_text() == "old"
