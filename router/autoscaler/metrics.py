"""What the autoscaler tells Prometheus. The names stand in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from router.autoscaler.loop import Autoscaler
from router.pools.instances import Role


def collected(autoscaler: Autoscaler | None) -> Iterator[Metric]:
    """Every family; without an autoscaler they have no samples."""
    by_role = ["role"]
    sizes = GaugeMetricFamily(
        "tandem_router_autoscaler_size", "Instances that a pool was last told to have.", labels=by_role
    )
    desired = GaugeMetricFamily(
        "tandem_router_autoscaler_desired_size", "What it would have now if it might change at once.", labels=by_role
    )
    age = GaugeMetricFamily(
        "tandem_router_autoscaler_decision_age_seconds", "Since the last look that was decided on.", labels=by_role
    )
    leads = GaugeMetricFamily("tandem_router_autoscaler_leads", "1: this router resizes; 0: another one, or nobody.")
    holds = CounterMetricFamily(
        "tandem_router_autoscaler_holds", "Decisions that left a size as it is.", labels=["role", "reason"]
    )
    changes = CounterMetricFamily(
        "tandem_router_autoscaler_changes", "Resizes by this autoscaler.", labels=["role", "direction"]
    )
    failures = CounterMetricFamily(
        "tandem_router_autoscaler_failures", "Times that the owner of the instances did not answer, or refused."
    )
    if autoscaler is not None:
        leads.add_metric([], autoscaler.leads)
        failures.add_metric([], autoscaler.num_failures)
        for role in get_args(Role):
            standing = autoscaler.standing(role)
            for direction, number in dict(standing.changes).items():
                changes.add_metric([role, direction], number)
            for reason, number in dict(standing.holds).items():
                holds.add_metric([role, reason], number)
            if (decision := standing.decision) is not None:
                sizes.add_metric([role], decision.new_size)
                desired.add_metric([role], decision.desired)
                age.add_metric([role], autoscaler.now_s - decision.at_s)
    yield from (sizes, desired, age, leads, holds, changes, failures)
