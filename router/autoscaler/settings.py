"""Settings of the autoscaler: targets, limits and delays of each pool, and the limits of both together.

docs/autoscaling.md explains each of them. The pure functions of this package read a policy as it is.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from router.pools.instance_info import Role
from router.pools.settings import Targets
from serving.settings import MAX_TIME_S, Address, Section, setting

_MIN_STALE_INTERVALS = 2
MAX_SIZE = 64
"""Of a pool, automatically or by an operator."""


class PoolPolicy(Section):
    """One pool: the bounds of its size, the target load of one instance, and how fast the size may change."""

    min_size: int = setting(1, "Smallest size of the pool.", ge=1)
    max_size: int = setting(8, "Largest size of the pool; equal to min_size: the size is fixed.", le=MAX_SIZE)
    target_score: float = setting(
        0.75,
        "Load of an instance above which the pool grows: (4*waiting + running) / requests it can run at one time.",
        gt=0,
    )
    target_kv_use: float = setting(
        0.8, "Fraction of an instance's KV blocks in use above which the pool grows.", gt=0, le=1
    )
    target_queue_delay_s: float = setting(
        0.5, "Seconds that requests wait at the router for this pool above which it grows.", gt=0
    )
    target_waiting_s: float = setting(
        1.0,
        "Tokens waiting to be prefilled at an instance, in seconds at its measured speed, above which the pool grows.",
        gt=0,
    )
    scale_in_margin: float = setting(
        0.8, "Fraction of every target that the remaining instances may reach when the pool shrinks.", gt=0, le=0.95
    )
    scale_out_window_s: float = setting(
        3.0, "Seconds that an overload must last before the pool grows; its minimum counts.", ge=0
    )
    scale_in_window_s: float = setting(
        300.0,
        "Seconds that fewer instances must suffice before the pool shrinks; the maximum demand counts.",
        gt=0,
        le=86_400,
    )
    cool_down_s: float = setting(30.0, "Seconds between two changes of the size.", ge=0)
    urgent: float = setting(
        1.5, "Multiple of its target at which load lets a pool grow again soon after it has begun to shrink.", gt=1
    )
    warm_up_s: float = setting(
        15.0,
        "Seconds after this router has first seen an instance in which its load and the latencies of its requests are"
        " ignored.",
        ge=0,
    )
    min_ready_s: float = setting(
        0.0,
        "minReadySeconds of the pool's Deployment: for so much longer an autoscaler outside does not count an instance,"
        " which may be one that a rollout has added for a time.",
        ge=0,
    )
    start_timeout_s: float = setting(
        300.0, "Seconds after a change in which the pool waits for its instances before it grows again.", gt=0
    )

    @property
    def objective_s(self) -> float | None:
        """The latency objective of this pool in seconds; None: there is none."""
        return None

    @property
    def settled_s(self) -> float:
        """Seconds after this router has first seen an instance by which it is none that a rollout has added for a time,
        and is warm."""
        return self.min_ready_s + self.warm_up_s

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if self.max_size < self.min_size:
            raise ValueError(
                f"max_size = {self.max_size} is below min_size = {self.min_size}; set it to {self.min_size} or more"
            )
        if self.scale_out_window_s >= self.scale_in_window_s:
            raise ValueError(
                f"scale_out_window_s = {self.scale_out_window_s:g} must be below scale_in_window_s = "
                f"{self.scale_in_window_s:g}: a pool must grow sooner than it shrinks"
            )
        if self.warm_up_s >= self.start_timeout_s:
            raise ValueError(
                f"warm_up_s = {self.warm_up_s:g} must be below start_timeout_s = {self.start_timeout_s:g}: the "
                "pool waits for instances that warm up"
            )
        return self


class PrefillPolicy(PoolPolicy):
    """The prefill pool."""

    target_waiting_s: float = setting(
        0.5,
        "Tokens waiting to be prefilled at an instance, in seconds at its measured speed, above which the pool grows.",
        gt=0,
    )
    ttft_objective_s: float | None = setting(
        None, "Objective for the time to first token in seconds; none: there is none.", gt=0
    )

    @property
    def objective_s(self) -> float | None:
        return self.ttft_objective_s


class DecodePolicy(PoolPolicy):
    """The decode pool."""

    itl_objective_s: float | None = setting(
        None, "Objective for the time between two output tokens in seconds; none: there is none.", gt=0
    )

    @property
    def objective_s(self) -> float | None:
        return self.itl_objective_s


class AutoscalerSettings(Section):
    """Automatic resizing of the pools. docs/autoscaling.md says how."""

    enabled: bool = setting(False, "Resize the pools; requires an owner of the instances (pools.stack, or kubernetes).")
    interval_s: float = setting(5.0, "Seconds between two observations of the pools.", gt=0)
    stale_s: float = setting(
        12.0, "Seconds after which a load report is too old to decide by, and longest gap in a window.", gt=0
    )
    lead_ttl_s: float = setting(
        15.0,
        "Seconds for which one of several routers leads, that is, resizes; then another one may take over.",
        gt=0,
        le=3600,  # what the owner of a local stack grants
    )
    latency_window_s: float = setting(30.0, "Seconds for which a request's TTFT and ITL count.", gt=0)
    latency_quantile: float = setting(
        0.9, "Fraction of the requests (for ITL: of the tokens) that must meet the objective.", gt=0, le=1
    )
    min_samples: int = setting(10, "Requests within latency_window_s below which latencies are ignored.", ge=1)
    max_instances: int | None = setting(
        None,
        "Instances of both pools together, those that are still ending included; none: limited by max_size only.",
        ge=2,
    )
    min_ratio: float | None = setting(None, "Fewest prefill instances per decode instance; none: any.", gt=0)
    max_ratio: float | None = setting(None, "Most prefill instances per decode instance; none: any.", gt=0)
    prefill: PrefillPolicy = PrefillPolicy()
    decode: DecodePolicy = DecodePolicy()

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if self.stale_s < _MIN_STALE_INTERVALS * self.interval_s:
            raise ValueError(
                f"stale_s = {self.stale_s:g} must be at least {_MIN_STALE_INTERVALS} times interval_s = "
                f"{self.interval_s:g}: one failed observation must not stop it"
            )
        if self.lead_ttl_s <= self.interval_s:
            raise ValueError(
                f"lead_ttl_s = {self.lead_ttl_s:g} must be above interval_s = {self.interval_s:g}, after which the "
                "lead is renewed"
            )
        least = self.prefill.min_size + self.decode.min_size
        if self.max_instances is not None and self.max_instances < least:
            raise ValueError(
                f"max_instances = {self.max_instances} is below prefill.min_size + decode.min_size = {least}; set it "
                f"to {least} or more, or lower a min_size"
            )
        self._check_ratio()
        return self

    def _check_ratio(self) -> None:
        lowest, highest = self.ratios
        if lowest > highest:
            raise ValueError(f"min_ratio = {lowest:g} is above max_ratio = {highest:g}; swap them")
        start, end = self.prefill.min_size / self.decode.max_size, self.prefill.max_size / self.decode.min_size
        if highest < start or lowest > end:
            raise ValueError(
                f"min_ratio = {lowest:g} and max_ratio = {highest:g} allow no pair of sizes: the bounds of the pools "
                f"give ratios from {start:g} to {end:g}"
            )

    @property
    def policies(self) -> dict[Role, PoolPolicy]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def ratios(self) -> tuple[float, float]:
        """Least and most prefill instances per decode instance."""
        return self.min_ratio or 0.0, float("inf") if self.max_ratio is None else self.max_ratio


class SignalSettings(Section):
    """What several routers of the same pools know of each other, and what an autoscaler outside knows of the pools."""

    listen: Address | None = setting(
        None,
        "host:port on which the other routers ask for this one's queue and latencies, and KEDA for the sizes of the "
        "pools; none: not served. With TLS it requires a certificate, of tls.client_names if there are any.",
    )
    routers: Targets = setting(
        "",
        "That listener of all routers, this one included: host:port, dns:name:port, kubernetes:service:port; empty: "
        "this router knows no other one, and admission.num_routers counts them.",
    )
    router_name: str | None = setting(None, "DNS name in the routers' certificates; none: the host dialled.")
    interval_s: float = setting(2.0, "Seconds between two questions to each router.", gt=0, le=MAX_TIME_S)
    active_s: float = setting(
        60.0,
        "Seconds after the last request in which KEDA is answered that the pools are in use: longer than its "
        "pollingInterval.",
        gt=0,
    )
