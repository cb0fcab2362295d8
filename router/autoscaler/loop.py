"""The autoscaler of one router: looks at both pools again and again, decides, and resizes if it is the one that leads.

    look ─▶ decide each pool ─▶ balance both ──leads──▶ resize ─▶ history begins anew
     ▲                              └──another router leads, or the owner of the instances does not answer──▶ hold
     └───────── interval_s, or longer each time while the owner does not answer ◀──────┘

Every router looks and decides, so that one that takes over the lead has its windows already; one resizes. The lead is
taken before each step and holds for lead_ttl_s from when it was asked for: a router that was held up longer than that
does not resize by what it decided before, and a resize that hangs is given up then. A step ends before the next begins,
so no two resizes overlap. Nothing that the owner of the instances does or does not do ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping

from protos.tandem.v1 import pools_pb2
from router.autoscaler.actuator import Actuator, ActuatorError
from router.autoscaler.balance import Both, balance
from router.autoscaler.decide import ScaleDecision, decide
from router.autoscaler.history import History
from router.autoscaler.observation import PoolObservation
from router.autoscaler.policy import AutoscalerSettings
from router.autoscaler.resizer import Change, Resizer
from router.autoscaler.status import Standing
from router.pools.instances import Role

_log = logging.getLogger(__name__)
_MAX_INTERVALS = 12
"""Between two tries while the owner of the instances does not answer."""

Look = Callable[[Mapping[Role, int]], Mapping[Role, PoolObservation]]
"""Both pools now, given how many instances each was told to have."""


class _Trouble:
    """One thing that the owner of the instances is asked for, and does not do. Mentioned once when it begins and once
    when it is over; in between it is tried less and less often."""

    def __init__(self, what: str, interval_s: float) -> None:
        self._what = what
        self._interval_s = interval_s
        self.intervals = 1
        self.until_s = float("-inf")
        self.why = ""

    def failed(self, why: str, now_s: float) -> None:
        if self.intervals == 1:
            _log.warning("autoscaler: %s: %s", self._what, why)
        self.why = why
        self.intervals = min(2 * self.intervals, _MAX_INTERVALS)
        self.until_s = now_s + self.intervals * self._interval_s

    def succeeded(self) -> None:
        if self.intervals > 1:
            _log.info("autoscaler: no longer: %s", self._what)
        self.intervals, self.until_s, self.why = 1, float("-inf"), ""


class _Pool:
    """What the loop remembers of one pool."""

    def __init__(self, standing: Standing, since_s: float) -> None:
        self.standing = standing
        self.looks: deque[PoolObservation] = deque()
        self.history = History(since_s)
        self._size: int | None = None
        self._last_change: Change | None = None

    def take(self, look: PoolObservation, last_change: Change | None, keep_s: float) -> None:
        """The newest look, and the last resize by this router. Whatever the size has become by others' doing counts
        as a change that begins everything anew."""
        by_operator = (
            last_change is not self._last_change and last_change is not None and last_change.cause == "operator"
        )
        by_another_router = None not in (self._size, look.size) and look.size != self._size
        if by_operator or by_another_router:
            self.history = self.history.after_another_s_change(look.at_s)
        self._size, self._last_change = look.size, last_change
        self.looks.append(look)
        while self.looks[0].at_s < look.at_s - keep_s:
            self.looks.popleft()

    def resized(self, decision: ScaleDecision, at_s: float) -> None:
        """`decision`, which changes the size, has been carried out."""
        assert decision.direction is not None, "what holds is not carried out"
        self.history = self.history.after(at_s, decision.direction)
        self._size = decision.new_size


class Autoscaler:
    """One per router, on its event loop. `holder` tells it apart from the autoscalers of other routers."""

    def __init__(
        self,
        resizer: Resizer,
        actuator: Actuator,
        look: Look,
        settings: AutoscalerSettings,
        *,
        holder: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock` is the one of the looks and of the resizer's changes."""
        self._resizer = resizer
        self._actuator = actuator
        self._look = look
        self._settings = settings
        self._holder = holder
        self._clock = clock
        self._sleep = sleep
        self._pools: dict[Role, _Pool] = {
            "prefill": _Pool(Standing(settings.prefill), clock()),
            "decode": _Pool(Standing(settings.decode), clock()),
        }
        self._lead_until_s = float("-inf")
        self._asking = _Trouble("the owner of the instances does not tell their numbers", settings.interval_s)
        self._resizing = _Trouble("the owner of the instances does not resize a pool", settings.interval_s)
        self.num_failures = 0
        """Times that the owner of the instances did not answer, or refused."""

    @property
    def now_s(self) -> float:
        """On its clock, seconds."""
        return self._clock()

    @property
    def leads(self) -> bool:
        """Whether this router is the one that resizes, now."""
        return self._clock() < self._lead_until_s

    def standing(self, role: Role) -> Standing:
        """What it thinks of that pool."""
        return self._pools[role].standing

    def status(self, role: Role) -> pools_pb2.AutoscalerStatus:
        """The same, as operators are told."""
        return self.standing(role).to_wire(self._clock())

    async def run(self) -> None:
        """Runs for ever; cancel it to stop."""
        while True:
            await self.step()
            await self._sleep(self._settings.interval_s * self._asking.intervals)

    async def step(self) -> None:
        """One look, and what follows from it. An owner that does not answer, or refuses, is what follows then."""
        try:
            sizes = await self._asked()
        except (ActuatorError, TimeoutError) as error:
            self._failed(self._asking, error)
            for pool in self._pools.values():
                pool.standing.failed(self._asking.why)
            return
        self._asking.succeeded()
        await self._carry_out(self._decided(self._look(sizes)))

    async def _asked(self) -> Mapping[Role, int]:
        """The sizes; and the lead is taken, if it can be. Raises ActuatorError, or TimeoutError after lead_ttl_s."""
        ttl_s = self._settings.lead_ttl_s
        async with asyncio.timeout(ttl_s):
            asked_s, self._lead_until_s = self._clock(), float("-inf")
            if await self._actuator.take_lead(self._holder, ttl_s):
                self._lead_until_s = asked_s + ttl_s
            return await self._resizer.sizes()

    def _decided(self, looks: Mapping[Role, PoolObservation]) -> tuple[ScaleDecision, ScaleDecision]:
        for role, pool in self._pools.items():
            pool.take(looks[role], self._resizer.last_change(role), self._keep_s)
        prefill, decode = (
            decide(pool.looks, pool.standing.policy, pool.history, self._settings.stale_s)
            for pool in self._pools.values()
        )
        num_ending = sum(look.num_ending for look in looks.values())
        both = balance(Both(prefill, decode, num_ending), self._settings)
        return both.prefill, both.decode

    async def _carry_out(self, decisions: Iterable[ScaleDecision]) -> None:
        """Resizes the pools one after the other."""
        leads = self.leads
        for decision in decisions:
            pool = self._pools[decision.role]
            if decision.direction is not None:
                decision = await self._resized(decision)
            if decision.direction is not None:
                pool.resized(decision, self._clock())
            pool.standing.took(decision, leads=leads)

    async def _resized(self, decision: ScaleDecision) -> ScaleDecision:
        """Carries `decision` out; returns it, held where that could not be."""
        left_s = self._lead_until_s - self._clock()
        if left_s <= 0:
            return decision.held("not_leading", "another router resizes")
        if self._clock() < self._resizing.until_s:
            return decision.held("no_answer", self._resizing.why)
        try:
            async with asyncio.timeout(left_s):
                sizes = {decision.role: decision.new_size}
                seen = {decision.role: decision.size}
                await self._resizer.resize(sizes, cause="autoscaler", reason=decision.reason, expected=seen)
        except (ActuatorError, TimeoutError) as error:
            self._failed(self._resizing, error)
            return decision.held("no_answer", self._resizing.why)
        self._resizing.succeeded()
        return decision

    @property
    def _keep_s(self) -> float:
        """How old a look may be and still matter."""
        longest_s = max(self._settings.prefill.scale_in_window_s, self._settings.decode.scale_in_window_s)
        return longest_s + self._settings.stale_s

    def _failed(self, trouble: _Trouble, error: ActuatorError | TimeoutError) -> None:
        self.num_failures += 1
        trouble.failed(str(error) or f"no answer within {self._settings.lead_ttl_s:g} s", self._clock())
