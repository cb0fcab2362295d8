"""Settings of picking: how instances are scored, and when a request is split between the pools."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import field_validator

from router.picking.picker import WeightsShares
from router.picking.scorers import Scoring
from router.request.generation_request import Objectives
from serving.settings import Section, setting

_SHORTEST_S, _LONGEST_S = 1e-3, 3600.0
"""What instances accept."""


class DisaggregationSettings(Section):
    """When a request is split between the pools."""

    mode: Literal["always", "auto", "never"] = setting(
        "auto", "Split requests always, where it pays, or never.", flag="--disaggregation"
    )
    min_tokens: int = setting(
        64,
        "In auto without objectives: prompts with at most this many uncached tokens are not split; without "
        "measurements, longer ones are.",
        ge=0,
    )
    interruption_weight: float = setting(
        1.0,
        "In auto, where instances report no step costs (vLLM's): weight of a second's delay of one running stream "
        "against a second of time to first token.",
        ge=0,
    )
    expected_streams: float = setting(
        1.0,
        "In auto, where instances report no step costs: streams expected to begin at a decode instance while it "
        "prefills, besides those that run.",
        ge=0,
    )
    probe_s: float = setting(
        30.0,
        "In auto, where instances report no step costs: seconds without a split request after which one is split to "
        "measure the speeds again.",
        gt=0,
    )
    speed_smoothing: float = setting(
        0.2,
        "Weight of the newest measurement in a speed; 0: speeds are not measured, and min_tokens alone decides.",
        ge=0,
        le=1,
    )
    lease_s: float = setting(
        30.0, "Seconds that a prefill instance holds KV without a request of its reader.", gt=0, le=_LONGEST_S
    )
    reservation_s: float = setting(
        30.0,
        "Seconds that a request may wait for room at a decode instance, and then for KV and seed with blocks reserved.",
        gt=0,
        le=_LONGEST_S,
    )
    reserve_timeout_s: float = setting(
        10.0, "Seconds to wait for the reservation of a decode instance that reports no request without room.", gt=0
    )


class SloSettings(Section):
    """Objectives of every request. Instances bound their steps by them, and `auto` chooses by them."""

    ttft_ms: float | None = setting(
        None,
        "Objective: milliseconds from a request's arrival to its first token.",
        flag="--slo-ttft-ms",
        gt=0,
        le=1e3 * _LONGEST_S,
    )
    itl_ms: float | None = setting(
        None,
        "Objective: mean milliseconds between two tokens of a stream. In auto without one, three times a step of the "
        "streams is assumed.",
        flag="--slo-itl-ms",
        gt=0,
        le=1e3 * _LONGEST_S,
    )

    @property
    def ttft_s(self) -> float:
        """Infinite without an objective."""
        return math.inf if self.ttft_ms is None else self.ttft_ms / 1e3

    def objectives(self, waited_s: float, late_wait_s: float = math.inf, *, is_first: bool) -> Objectives:
        """What is left of them for a request that has waited so long, and may wait `late_wait_s` past its TTFT until a
        step begins its prompt. In the first attempt at least its TTFT is left for that, also where it has waited longer
        for an instance; after a failed one it may wait as long again."""
        itl_s = None if self.itl_ms is None else self.itl_ms / 1e3
        if self.ttft_ms is None:
            return Objectives(None, itl_s)
        ttft_s = max(self.ttft_s - waited_s, _SHORTEST_S)
        begin_s = ttft_s + late_wait_s
        if is_first:
            begin_s = max(self.ttft_s + late_wait_s - waited_s, self.ttft_s, _SHORTEST_S)
        return Objectives(ttft_s, itl_s, min(begin_s, _LONGEST_S))


class PickingSettings(Section):
    """Which instance of a pool a request goes to: the one with the lowest score."""

    decode_scorers: str = setting(
        "queue=1",
        "Scorers of the decode pool with their weights, as in queue=1,prefix=3; the lowest sum is picked. "
        "queue, waiting_tokens, kv_pressure, prefix, session, or module:Name.",
        flag="--decode-scorers",
    )
    prefill_scorers: str = setting("queue=1", "The same for the prefill pool.", flag="--prefill-scorers")
    domain_weight: float = setting(
        0.5,
        "Added to the score of a prefill instance in another network domain than the picked decode instance, where "
        "both report one; below 1 it only decides between equal queues. 0: domains are ignored.",
        ge=0,
    )
    weights_shares: str = setting(
        "",
        "While instances with several weights run: fractions of the new requests by the beginning of a weights' digest "
        "(`tandem pools --json`), as in 3f9a2c=0.95; other weights get the rest. Empty: by load alone.",
        flag="--weights-shares",
    )
    max_prefix_blocks: int = setting(
        100_000, "KV blocks whose instance is recorded, all instances together; 200 bytes each.", ge=1
    )
    max_sessions: int = setting(10_000, "Sessions whose instances are recorded.", ge=1)

    @field_validator("decode_scorers", "prefill_scorers")
    @classmethod
    def _are_known_scorers(cls, text: str) -> str:
        Scoring.parse(text)
        return text

    @field_validator("weights_shares")
    @classmethod
    def _are_shares(cls, text: str) -> str:
        WeightsShares.parse(text)
        return text
