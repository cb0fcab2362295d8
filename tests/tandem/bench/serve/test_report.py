"""Every figure of a report, against arithmetic that is written out here, and percentiles against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.serve.endpoint import INTERRUPTED, RequestRecord
from tandem.bench.serve.report import Distribution, Objectives, summarise


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
