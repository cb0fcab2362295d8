"""One stack under one load while `tandem pools resize` resizes its pools: what its clients see at each size.

    phase 1 ─resize─▶ new instances start, removed ones drain ─complete─▶ phase 2 ─resize─▶ … ─▶ last phase ─▶ load ends

A request belongs to the phase in which it was sent; those sent while a resize was under way belong to none.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import click

from benchmarks.mixed_load import Mix, ProgressBar, measure
from tandem.bench.serve.endpoint import PlannedRequest, RequestRecord
from tandem.bench.serve.report import Objectives, summarise
from tandem.bench.serve.results import Point
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack

Size = tuple[int, int]
"""Prefill and decode instances."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds after the start of the load."""

    size: Size
    begin_s: float
    end_s: float

    @property
    def name(self) -> str:
        return named(self.size)


@dataclass(slots=True)
class Live:
    """The result of a run."""

    records: Sequence[RequestRecord]
    phases: list[Phase] = field(default_factory=list)
    resized_at_s: dict[float, str] = field(default_factory=dict)
    """The time and target of each resize."""

    def points(self, rate: float) -> dict[str, Point]:
        """The figures of each phase, by its size."""
        return {phase.name: self._point(phase, rate) for phase in self.phases}

    def _point(self, phase: Phase, rate: float) -> Point:
        records = [one for one in self.records if phase.begin_s <= one.sent_s < phase.end_s]
        return Point(rate, summarise(records), records)


def named(size: Size) -> str:
    """1P2D."""
    return f"{size[0]}P{size[1]}D"


def run(settings: StackSettings, mix: Mix, rate: float, sizes: Sequence[Size], vocab_size: int) -> Live:
    """Puts `mix`, whose duration is that of a phase, on a stack that has each of `sizes` in turn.

    Raises ClickException if a resize does not end within its phase.
    """
    num_prefill, num_decode = sizes[0]
    settings = replace(
        settings,
        num_prefill=num_prefill,
        num_decode=num_decode,
        max_prefill=max(size[0] for size in sizes),
        max_decode=max(size[1] for size in sizes),
    )
    whole = replace(mix, duration_s=mix.duration_s * len(sizes))
    stop = threading.Event()
    with LocalStack(settings) as stack:
        looking_after = threading.Thread(target=stack.serve, args=(stop, lambda event: None))
        looking_after.start()
        try:
            view = _Resizing(stack.admin_address, sizes, mix.duration_s)
            (point,) = measure(stack.address, whole, [rate], view, vocab_size=vocab_size, objectives=Objectives())
            return view.live(point)
        finally:
            stop.set()
            looking_after.join()


class _Resizing(ProgressBar):
    """Resizes when the measured load has begun, on a thread of its own."""

    def __init__(self, admin_address: str, sizes: Sequence[Size], phase_s: float) -> None:
        super().__init__("live resize")
        self._admin_address = admin_address
        self._sizes = sizes
        self._phase_s = phase_s
        self._live = Live(())
        self._problem = ""
        self._resizer = threading.Thread(target=self._resize_all)

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        super().begin(rate, requests)
        self._started_s = time.perf_counter()
        self._resizer.start()

    def live(self, point: Point) -> Live:
        """Everything, once the load has ended."""
        self._resizer.join()
        if self._problem:
            raise click.ClickException(self._problem)
        self._live.records = point.records
        return self._live

    def _resize_all(self) -> None:
        for index, size in enumerate(self._sizes):
            if index and not self._resize(size):
                return
            begin_s, end_s = self._now_s(), (index + 1) * self._phase_s
            self._live.phases.append(Phase(size, begin_s, end_s))
            time.sleep(max(0.0, end_s - begin_s))

    def _resize(self, size: Size) -> bool:
        self._live.resized_at_s[self._now_s()] = named(size)
        command = [sys.executable, "-m", "tandem.cli", "pools", "resize", "--admin", self._admin_address]
        command += [f"prefill={size[0]}", f"decode={size[1]}", "--timeout", str(self._phase_s)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            self._problem = f"resizing to {named(size)} failed or took longer than {self._phase_s:g} s:\n{done.stdout}"
        return not self._problem

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s
