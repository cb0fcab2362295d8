"""Three times the pools' capacity: the excess is rejected with a hint, the rest is served whole, and fairly.

How fast and how much is for `python -m benchmarks.overload`; what is asserted here holds on a busy machine too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.admission.overload import NUM_TOKENS, QUEUE_LIMIT_S, percentile, run, run_long_streams

OVERLOAD_S = 60
MAX_RSS_GROWTH = 50 << 20
BUSY_S = 2.0
"""What a busy machine may add to a wait."""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_three_times_the_capacity(model_folder: Path, tmp_path: Path) -> None:
    overload = await run(model_folder, tmp_path, peak_s=5, overload_s=OVERLOAD_S)
    print("\n" + "\n".join(f"{name}: {value}" for name, value in overload.summary().items()))
    peak, over = overload.peak, overload.over
    assert {one.code for one in [*peak.outcomes, *over.outcomes]} == {"OK", "RESOURCE_EXHAUSTED"}
    assert all(one.num_tokens == NUM_TOKENS for one in over.outcomes if one.code == "OK")
    assert len(over.refused) > len(over.outcomes) / 2, "the load was no overload"
    # Refused at once and not in the queue's own time, each with both hints.
    assert percentile(overload.refusals_s, 0.5) < 0.5
    assert all(one.pushback_ms is not None and one.pushback_ms >= 1000 for one in over.refused)
    assert all(one.retry_info_s == (one.pushback_ms or 0) / 1e3 for one in over.refused)
    # The rest is served, and no request waits longer than allowed.
    assert overload.goodput > 0.5
    assert overload.fair_part > 0.5
    assert max(overload.waits_s) <= QUEUE_LIMIT_S + BUSY_S
    assert max(overload.refusals_s) <= QUEUE_LIMIT_S + BUSY_S
    assert overload.rss[1] - overload.rss[0] <= MAX_RSS_GROWTH


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_long_streams_in_all_slots_leave_another_tenant_its_share(model_folder: Path, tmp_path: Path) -> None:
    outcome = await run_long_streams(model_folder, tmp_path, seconds=30.0)
    print("\n" + "\n".join(f"{name}: {value}" for name, value in outcome.summary().items()))
    assert {one.code for one in outcome.figures.outcomes} == {"OK", "RESOURCE_EXHAUSTED"}
    assert outcome.fair_part > 0.5
    assert percentile(outcome.refusals_s, 0.5) < 0.5
    assert outcome.num_cut == 0
