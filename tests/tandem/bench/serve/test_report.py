"""Every figure of a report, against arithmetic that is written out here, and percentiles against numpy's; what is on
the screen, and in the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.serve.endpoint import INTERRUPTED, RequestRecord
from tandem.bench.serve.report import (
    Distribution,
    Objectives,
    Point,
    Results,
    format_rate,
    late_warning,
    machine,
    notes,
    page,
    summarise,
    sweep_table,
    versions,
    write_json,
)


def record(sent_s: float, token_s: list[float], *, due_s: float | None = None, **fields: object) -> RequestRecord:
    """A request with a prompt of 10 tokens that got as many as it asked for."""
    due_s = sent_s if due_s is None else due_s
    ended_s = token_s[-1] if token_s else sent_s
    defaults: dict[str, object] = {"num_prompt_tokens": 10, "max_tokens": len(token_s), "ended_s": ended_s}
    return RequestRecord(due_s, sent_s, token_s=token_s, **{**defaults, **fields})  # type: ignore[arg-type]


RUN = [
    # sent 1.0: tokens after 200, 300, 500 ms: TTFT 200, gaps 100 and 200, TPOT (500 - 200) / 2 = 150, E2E 500
    record(1.0, [1.2, 1.3, 1.5]),
    # sent 2.0, due 1.99: tokens after 400, 450 ms, two at once: TTFT 400, gaps 50 and 0, TPOT 50 / 2 = 25, E2E 450
    record(2.0, [2.4, 2.45, 2.45], due_s=1.99),
    # sent 2.2: one token after 100 ms: TTFT 100, no gap, no TPOT, E2E 100
    record(2.2, [2.3]),
    # refused at once, failed after a token, and cut off by Ctrl-C
    record(2.5, [], ended_s=2.51, error="RESOURCE_EXHAUSTED: full", status="RESOURCE_EXHAUSTED", refused=True),
    record(3.0, [3.1], ended_s=5.0, error="INTERNAL: gone", status="INTERNAL", max_tokens=5),
    record(3.9, [4.0], ended_s=4.5, error="INTERRUPTED: stopped", status=INTERRUPTED, max_tokens=5),
]


def test_the_figures_equal_a_computation_by_hand() -> None:
    report = summarise(RUN, Objectives(ttft_ms=300, e2e_ms=500), [0.001, 0.003])

    assert (report.num_requests, report.num_succeeded, report.num_failed) == (6, 3, 1)
    assert (report.num_refused, report.num_unfinished) == (1, 1)
    assert report.failures == {"RESOURCE_EXHAUSTED": 1, "INTERNAL": 1}
    assert set(report.errors) == {"RESOURCE_EXHAUSTED", "INTERNAL"}
    # from the first sending, 1.0, to the last end, 5.0
    assert report.duration_s == pytest.approx(4.0)
    # due at 1.0, 1.99, 2.2, 2.5, 3.0, 3.9: five gaps in 2.9 s
    assert report.offered_per_s == pytest.approx(5 / 2.9)
    assert report.requests_per_s == pytest.approx(3 / 4)
    # 3 + 3 + 1 output tokens, 30 of prompts
    assert report.output_tokens_per_s == pytest.approx(7 / 4)
    assert report.total_tokens_per_s == pytest.approx(37 / 4)
    # 2.0-2.45 and 2.2-2.3 overlap, no third one does; 3.0-5.0 and 3.9-4.5 do too
    assert report.max_in_flight == 2
    assert report.mean_in_flight == pytest.approx((0.5 + 0.45 + 0.1 + 0.01 + 2.0 + 0.6) / 4)

    # TTFT 100, 200, 400: ranks 0, 1, 2; p90 is at rank 1.8, p95 at 1.9, p99 at 1.98
    assert (report.ttft.count, report.ttft.mean) == (3, pytest.approx(700 / 3))
    assert (report.ttft.p50, report.ttft.p90) == (pytest.approx(200), pytest.approx(200 + 0.8 * 200))
    assert (report.ttft.p95, report.ttft.p99) == (pytest.approx(200 + 0.9 * 200), pytest.approx(200 + 0.98 * 200))
    assert report.ttft.max == pytest.approx(400)
    # ITL pooled: 0, 50, 100, 200; p50 at rank 1.5
    assert (report.itl.count, report.itl.mean, report.itl.p50) == (4, pytest.approx(87.5), pytest.approx(75))
    assert report.num_shared_moments == 1
    # TPOT 25 and 150; E2E 100, 450, 500
    assert (report.tpot.count, report.tpot.p50) == (2, pytest.approx(87.5))
    assert (report.e2e.count, report.e2e.p50, report.e2e.max) == (3, pytest.approx(450), pytest.approx(500))

    # TTFT at most 300: the first and the third; E2E at most 500: all three (the first just so); of 5 that were finished
    assert report.attainments == {"ttft": pytest.approx(2 / 5), "e2e": pytest.approx(3 / 5)}
    assert report.attainment == pytest.approx(2 / 5)
    assert report.goodput_per_s == pytest.approx(2 / 4)
    # one request of six was 10 ms late
    assert (report.lag.count, report.lag.max) == (6, pytest.approx(10))
    assert (report.loop_lag.mean, report.loop_lag.max) == (pytest.approx(2), pytest.approx(3))


def test_a_single_token_meets_any_objective_for_the_time_per_token() -> None:
    report = summarise(RUN[:3], Objectives(tpot_ms=100))
    assert report.attainment == pytest.approx(2 / 3)  # 150 misses it, 25 and none at all do not


def test_no_figure_is_of_requests_that_the_load_cut_off() -> None:
    only = summarise(RUN[5:], Objectives(ttft_ms=1e6))
    assert (only.num_unfinished, only.num_failed, only.num_succeeded, only.attainment) == (1, 0, 0, 0.0)
    assert only.failures == {}


def test_messages_that_differ_in_the_request_id_alone_are_one() -> None:
    gone = "UNAVAILABLE: no decode instance is available (request id {})"
    errors = [*map(gone.format, "abc"), "UNAVAILABLE: connection refused", "UNAVAILABLE: connection refused"]
    report = summarise([record(1.0, [], error=error, status="UNAVAILABLE") for error in errors])
    assert report.failures == {"UNAVAILABLE": 5}
    assert report.errors == {"UNAVAILABLE": "no decode instance is available (request id c)"}


def test_of_no_requests_everything_is_nothing() -> None:
    report = summarise([], Objectives(ttft_ms=1))
    assert report.requests_per_s == report.attainment == report.duration_s == report.ttft.p99 == 0
    assert report.kept_schedule


def test_without_objectives_there_is_no_goodput() -> None:
    report = summarise(RUN)
    assert report.goodput_per_s is None
    assert report.attainment is None


def test_the_servers_count_holds_where_messages_do_not_say_how_many_they_carry() -> None:
    # 5 tokens in 3 messages after 100, 200, 500 ms: TPOT (500 - 100) / 4 = 100; gaps between messages 100 and 300
    report = summarise([record(0.0, [0.1, 0.2, 0.5], num_reported_tokens=5, max_tokens=5)])
    assert (report.num_reported, report.num_short, report.num_output_tokens) == (1, 0, 5)
    assert report.tpot.p50 == pytest.approx(100)
    assert (report.itl.count, report.itl.max) == (2, pytest.approx(300))


def test_fewer_tokens_than_requested_are_counted() -> None:
    assert summarise([record(0.0, [0.1, 0.2], max_tokens=3), record(0.0, [0.1])]).num_short == 1


def test_the_cached_share_is_of_the_prompts_whose_answers_report_it() -> None:
    # 8 + 5 of two prompts of 10, 2 of the 8 from a store; one that reports nothing, one that failed
    known = [record(0.0, [0.1], num_cached_tokens=8, num_stored_tokens=2), record(0.0, [0.1], num_cached_tokens=5)]
    other = [record(0.0, [0.1]), record(0.0, [], error="INTERNAL: gone", status="INTERNAL", num_cached_tokens=9)]
    report = summarise([*known, *other])
    assert (report.num_cached_tokens, report.num_stored_tokens) == (13, 2)
    assert report.cached_share == pytest.approx(13 / 20)
    unknown = summarise(other)
    assert (unknown.num_cached_tokens, unknown.cached_share) == (None, None)


@pytest.mark.parametrize(("lags", "loop_lags", "kept"), [(0.0, 0.0, True), (0.02, 0.0, False), (0.0, 0.02, False)])
def test_a_load_that_is_late_has_not_kept_its_schedule(lags: float, loop_lags: float, kept: bool) -> None:
    run = [record(1.0, [1.1], due_s=1.0 - lags) for _ in range(10)]
    assert summarise(run, None, [loop_lags] * 10).kept_schedule is kept


def test_what_the_limit_on_concurrency_held_back_is_not_late() -> None:
    report = summarise([record(2.0, [2.1], due_s=1.0, held_s=1.0)])
    assert report.lag.max == pytest.approx(0)
    assert (report.held.count, report.held.max) == (1, pytest.approx(1000))


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@given(VALUES)
def test_a_distribution_is_numpys(values: list[float]) -> None:
    ours, ms = Distribution.of(values), np.array(values) * 1e3
    assert (ours.count, ours.max) == (len(values), pytest.approx(ms.max()))
    assert ours.mean == pytest.approx(ms.mean(), rel=1e-9, abs=1e-9)
    assert [ours.p50, ours.p90, ours.p95, ours.p99] == pytest.approx(
        np.percentile(ms, [50, 90, 95, 99]), rel=1e-9, abs=1e-9
    )
    for percentile in (ours.p50, ours.p99):
        assert ms.min() * (1 - 1e-12) <= percentile <= ms.max() * (1 + 1e-12)


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
