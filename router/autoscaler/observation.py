"""What one look at one pool tells: values, checked, so that a decision need not doubt them.

    members, door, latencies ──observe──▶ PoolObservation ──problem──▶ decides nothing, and says why
                                                └──────────no problem──▶ signals.py, decide.py

Who is there falls into four: *warm* instances, by whose samples a pool grows; *others* that carry load and whose
samples say nothing yet or no more (still cold, draining, leaving); *silent* ones whose load is not known; and those
that are told to be there and are not, *pending*. What a peer tells may be nonsense: a number that is negative, not
finite, or more than there can be makes the whole look one that decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from router.autoscaler.policy import PoolPolicy
from router.pools.instances import InstanceView, LoadReport, Role
from router.pools.member import State

WAITING_WEIGHT = 4.0
"""A waiting request against a running one, as everywhere."""
_ENDING: frozenset[State] = frozenset({"draining", "leaving"})
_LOADED: frozenset[State] = _ENDING | {"ready"}


class Problem(NamedTuple):
    """Why a look decides nothing."""

    kind: Literal["missing", "stale", "nonsense"]
    words: str


class InstanceLook(NamedTuple):
    """One member of a pool as it was found."""

    name: str
    state: State
    up_s: float
    """Since its first report; infinite: longer than this router knows."""
    report_age_s: float
    view: InstanceView | None


class DoorLook(NamedTuple):
    """The router's queue for lack of one pool."""

    num_queued: int = 0
    delay_s: float | None = 0.0
    """How long whoever comes now would wait; None: somebody waits, and nothing has ended yet by which to know."""


EMPTY_DOOR = DoorLook()


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What one instance carries."""

    name: str
    num_waiting: int
    num_running: int
    """Those that load KV included."""
    score: float
    """4*waiting + running, as a part of the requests that it can run at one time."""
    waiting_s: float | None
    """Tokens that wait, by its speed; None: its speed is not known."""
    kv_use: float
    """Part of its blocks in use; 0 while it does not tell them. At a prefill instance without those held for readers:
    more instances would not free them."""
    is_held_up: bool = False
    """Whether its queue stands still because readers do not fetch what it holds. Then the queue is no load of its own,
    and is not counted above."""


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """One look. All but role, time and size mean something only where there is no problem."""

    role: Role
    at_s: float
    """On the clock of whoever looks, seconds."""
    size: int | None
    """Instances that the pool was last told to have; None: nobody says, and it cannot be resized."""
    warm: tuple[InstanceLoad, ...] = ()
    others: tuple[InstanceLoad, ...] = ()
    num_silent: int = 0
    num_ending: int = 0
    """Processes beyond `size` that are still there."""
    door: DoorLook = EMPTY_DOOR
    latency_s: float | None = None
    """TTFT (prefill) or ITL (decode) that `latency_quantile` of the recent requests kept; None: too few to tell."""
    problem: Problem | None = None

    @property
    def num_pending(self) -> int:
        """Instances that are to be there and do not carry load yet, or no more."""
        return max((self.size or 0) - len(self.warm), 0)

    @property
    def is_held_up(self) -> bool:
        """Whether the queue of a warm instance stands still for what it holds."""
        return any(load.is_held_up for load in self.warm)


class _Nonsense(Exception):
    """Something told a number that cannot be."""


def observe(
    role: Role,
    at_s: float,
    size: int | None,
    looks: Sequence[InstanceLook],
    door: DoorLook,
    latency_s: float | None,
    policy: PoolPolicy,
    stale_s: float,
) -> PoolObservation:
    """Makes one look of what was found. Pure; never raises: what is wrong becomes the observation's problem."""
    try:
        _check_numbers("the router's queue", num_queued=door.num_queued, delay_s=door.delay_s)
        _check_numbers("the router's latencies", latency_s=latency_s)
        speed = _speed_of(looks)
        warm = [look for look in looks if _is_warm(look, policy.warm_up_s)]
        others = [look for look in looks if look not in warm and look.view is not None and look.state in _LOADED]
        warm_loads = tuple(load_of(role, look, speed) for look in warm)
        other_loads = tuple(load_of(role, look, speed) for look in others)
    except _Nonsense as nonsense:
        return PoolObservation(role, at_s, size, problem=Problem("nonsense", str(nonsense)))
    silent = [look for look in looks if _is_silent(look, policy.start_timeout_s)]
    num_ready = sum(look.state == "ready" for look in looks)
    return PoolObservation(
        role=role,
        at_s=at_s,
        size=size,
        warm=warm_loads,
        others=other_loads,
        num_silent=len(silent),
        num_ending=sum(look.state in _ENDING for look in looks) + max(num_ready - (size or 0), 0),
        door=EMPTY_DOOR if any(load.is_held_up for load in warm_loads) else door,
        latency_s=latency_s,
        problem=_problem(looks, warm, silent, stale_s),
    )


def load_of(role: Role, look: InstanceLook, speed_per_s: float | None) -> InstanceLoad:
    """What `look` shows, where tokens of an instance of unknown speed go by `speed_per_s`. Its view is told."""
    view = look.view
    assert view is not None, "asked for instances alone that have reported"
    load, info = view.load, view.info
    _check_report(look.name, view)
    num_running = load.num_running + load.num_loading
    held_up = role == "prefill" and load.num_waiting > 0 and num_running == 0 and load.held_blocks > 0
    num_waiting = 0 if held_up else load.num_waiting
    num_tokens = 0 if held_up else load.num_waiting_tokens
    speed_per_s = view.pace.prefill_per_s or speed_per_s
    waiting_s = 0.0 if num_tokens == 0 else num_tokens / speed_per_s if speed_per_s else None
    _check_numbers(look.name, waiting_s=waiting_s)
    used_blocks = info.num_blocks - load.free_blocks - load.cached_blocks
    return InstanceLoad(
        name=look.name,
        num_waiting=num_waiting,
        num_running=num_running,
        score=(WAITING_WEIGHT * num_waiting + num_running) / info.max_num_seqs,
        waiting_s=waiting_s,
        kv_use=(used_blocks - (load.held_blocks if role == "prefill" else 0)) / max(info.num_blocks, 1),
        is_held_up=held_up,
    )


def _is_warm(look: InstanceLook, warm_up_s: float) -> bool:
    is_picked = look.state == "ready" and look.view is not None and look.view.out is None
    return is_picked and look.up_s >= warm_up_s


def _is_silent(look: InstanceLook, forgotten_s: float) -> bool:
    """Whether it had load a short while ago and does not tell what became of it."""
    if look.view is None or look.state not in ("lost", "wedged"):
        return False
    return max(look.report_age_s, look.view.load.core_silence_s) < forgotten_s


def _speed_of(looks: Iterable[InstanceLook]) -> float | None:
    """The mean prefill speed of those that have one, tokens per second."""
    speeds = [look.view.pace.prefill_per_s for look in looks if look.view is not None]
    known = [speed for speed in speeds if speed is not None]
    for speed in known:
        _check_numbers("the measured prefill speed", tokens_per_s=speed)
    return sum(known) / len(known) if known else None


def _problem(
    looks: Sequence[InstanceLook], warm: Sequence[InstanceLook], silent: Sequence[InstanceLook], stale_s: float
) -> Problem | None:
    if old := [look for look in warm if not look.report_age_s <= stale_s]:
        oldest = max(old, key=lambda look: look.report_age_s)
        return Problem("stale", f"{oldest.name} reported {oldest.report_age_s:.1f} s ago, {stale_s:g} s are too long")
    if not warm:
        many = f"none of {len(looks)} instances" if looks else "no instance"
        return Problem("missing", f"{many} is warm and reports" + (f"; {len(silent)} fell silent" if silent else ""))
    return None


def _check_report(name: str, view: InstanceView) -> None:
    load, info = view.load, view.info
    _check_numbers(name, **dict(_amounts(load)), step_s=load.step_s, core_silence_s=load.core_silence_s)
    if info.max_num_seqs <= 0:
        raise _Nonsense(f"{name} tells max_num_seqs = {info.max_num_seqs}, without which its load cannot be judged")
    num_told = load.free_blocks + load.cached_blocks + load.held_blocks + load.quarantined_blocks
    if num_told > info.num_blocks:
        raise _Nonsense(f"{name} tells of {num_told} blocks and has {info.num_blocks}")


def _amounts(load: LoadReport) -> Iterator[tuple[str, int]]:
    for what in (
        *("num_waiting", "num_running", "num_loading", "num_waiting_tokens"),
        *("free_blocks", "cached_blocks", "held_blocks", "quarantined_blocks"),
    ):
        yield what, getattr(load, what)


def _check_numbers(whose: str, **amounts: float | None) -> None:
    for what, amount in amounts.items():
        if amount is not None and not (math.isfinite(amount) and amount >= 0):
            raise _Nonsense(f"{whose}: {what} = {amount:g}, which cannot be")
