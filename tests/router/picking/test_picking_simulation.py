"""The default score against round-robin and an omniscient one, over real lengths: p99 of the wait for a slot.

The table for docs/picking.md: `python -m tests.router.picking.picking_simulation`.
"""

from __future__ import annotations

import pytest

from tests.router.picking.picking_simulation import Lengths, Setup, compare, p99_s, table, trace, waits_s

SEEDS = range(3)
NUM_REQUESTS = 3000
"""Enough for the bounds to hold with every one of these seeds; the slow test runs the whole trace."""


def test_the_trace_is_the_one_that_its_readme_describes() -> None:
    assert len(trace()) == 19_366
    assert trace()[:2] == (Lengths(374, 44), Lengths(396, 109))


def test_no_request_waits_at_idle_instances_and_all_wait_at_overloaded_ones() -> None:
    calm = Setup(num_requests=500, load=0.1)
    assert max(waits_s(calm, "default", 0)) == pytest.approx(0, abs=1e-9)
    assert min(waits_s(Setup(num_requests=2000, load=2.0), "default", 0)[1000:]) > 1


def test_the_same_seed_gives_the_same_waits() -> None:
    setup = Setup(num_requests=500)
    assert waits_s(setup, "default", 3) == waits_s(setup, "default", 3) != waits_s(setup, "default", 4)


def test_the_default_score_halves_round_robins_wait_and_comes_close_to_omniscience() -> None:
    comparisons = [compare(Setup(num_requests=NUM_REQUESTS), seed) for seed in SEEDS]
    print(f"\n{table(comparisons)}")
    assert max(one.of_round_robin for one in comparisons) <= 0.5
    assert max(one.of_omniscient for one in comparisons) <= 1.3
    assert min(one.uncorrected_s / one.default_s for one in comparisons) >= 1.3, "the correction is what does it"


def test_rare_reports_cost_little() -> None:
    """Between two reports the router counts for itself."""
    rare, often = (p99_s(Setup(num_requests=NUM_REQUESTS, report_s=report_s), "default", 0) for report_s in (1.0, 0.2))
    assert rare <= 1.5 * often


@pytest.mark.slow
@pytest.mark.parametrize("num_routers", [1, 2, 3])
def test_the_whole_trace_by_several_routers_side_by_side(num_routers: int) -> None:
    """Each sees its own requests and all load reports. Only a single router meets the tight bounds."""
    comparisons = [compare(Setup(num_routers=num_routers, num_requests=19_000), seed) for seed in range(5)]
    print(f"\n{num_routers} router(s):\n{table(comparisons)}")
    assert max(one.of_round_robin for one in comparisons) <= (0.5 if num_routers == 1 else 0.75)
    assert max(one.of_omniscient for one in comparisons) <= (1.3 if num_routers == 1 else 2.0)
