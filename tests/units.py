"""Units of work: tests that run in one worker of pytest-xdist, and the order in which workers take them.

The tests of a file are a unit, so that a module's fixtures are made once. So are those of a shared stack
(tests/system/stacks.py), whatever their files. Units that start whole stacks, units that wait and units that compute
run beside each other, so that both cores are busy all the time and no long unit comes last.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from functools import partial

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

FIRST = ("killable", "pair shared_storage", "demo")
"""Beginnings of the longest units."""
STACKS = (
    "pair",
    "tests/system/test_resize",
    "tight",
    "prefix store",
    "tests/system/",
    "tests/chart/end_to_end/",
    "tests/chart/test_end_to_end",
    "tests/chart/fake_kube/",
)
"""Beginnings of units that start whole stacks: they take long and need both cores."""
WAITING = (
    "tests/kv_transfer/nixl/",
    "tests/examples/",
    "tests/tandem/client/",
    "tests/tandem/local_stack/",
    "tests/serving/",
    "tests/router/",
    "tests/instance/",
)
"""Beginnings of units whose tests wait for most of their time, for a time-out or a retry."""
BEGUN = {FIRST: 0.0, STACKS: 0.4, WAITING: 0.9, ("",): 1.0}
"""By when the last unit of each group begins, as a share of the run: the longer they take, the earlier. The last group
has what no other has."""


def unit_of(nodeid: str) -> str:
    """The unit that a test belongs to: the shared stack in parentheses among its parameters, or its file."""
    file, _, test = nodeid.partition("::")
    stack = re.search(r"\((.+?)\)", test) if file.startswith("tests/system/") else None
    return stack[1] if stack else file


def in_order(units: Collection[str]) -> list[str]:
    """The units as workers take them."""
    begin: dict[str, float] = {}
    left = list(units)
    for group, share in BEGUN.items():
        members = sorted((unit for unit in left if unit.startswith(group)), key=partial(_rank, group))
        left = [unit for unit in left if unit not in members]
        begin |= {unit: share * number / len(members) for number, unit in enumerate(members)}
    return sorted(begin, key=begin.__getitem__)


def _rank(beginnings: Sequence[str], unit: str) -> int:
    return next(at for at, beginning in enumerate(beginnings) if unit.startswith(beginning))


class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Ends, whenever a worker crashes.

    xdist's own gives a worker a unit in which no test is left, or gives a single test to the worker that takes the
    place of the crashed one: both wait for ever for the next test. And it ends with an error of its own where it gives
    a unit to a worker that has just crashed.
    """

    assigned_work: dict[WorkerController, dict[str, dict[str, bool]]]
    """By worker and unit, whether each test has ended."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that has crashed the worker `node`, which does not run again; what is left goes to others."""
        left = {unit: tests for unit, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
        if not left:
            return None
        unit, tests = next(iter(left.items()))
        crashed = next(test for test, has_ended in tests.items() if not has_ended)
        tests[crashed] = True
        if all(tests.values()):
            del left[unit]
        self.workqueue.update(left)
        for other in self.nodes:
            if other in self.registered_collections:  # not one that still collects, after another crash
                self._reschedule(other)
        return crashed

    def _assign_work_unit(self, node: WorkerController) -> None:
        with contextlib.suppress(OSError):  # it has crashed, and `remove_node` follows
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """A worker begins a test when it knows the next one, or that there is none."""
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
