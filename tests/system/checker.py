"""Checks after every fault: the right tokens, and nothing left behind.

Answers are compared with the reference token by token. Leaks are looked for wherever a request can leave something: KV
blocks by class, transfers, files of the store, open files, threads and child processes of every member.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from protos.tandem.v1 import instance_pb2
from tandem.client.completion import Completion
from tests.engine_under_test import PATIENCE
from tests.files_below import files_below
from tests.system.reference import Answer
from tests.system.rig import Rig

IDLE_WITHIN_S = 15.0
"""Far below a lease, and long enough for a busy machine."""
_SLACK = 5


def assert_same_answer(completion: Completion, answer: Answer) -> None:
    """Ids, text and reason of the first choice are the reference's. Order and continuity the client has checked."""
    got, expected = completion.token_ids, answer.token_ids
    if got != expected:
        differing = [index for index, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]]
        where = differing[0] if differing else min(len(got), len(expected))
        raise AssertionError(
            f"token {where} differs: got {got[where : where + 5]} of {len(got)}, "
            f"expected {expected[where : where + 5]} of {len(expected)}"
        )
    assert completion.finish_reason == answer.finish_reason
    if answer.text is not None:
        assert completion.choices[0].text == answer.text


def assert_usage(completion: Completion) -> None:
    """The usage agrees with what was delivered."""
    for choice in completion.choices:
        assert choice.usage.prompt_tokens == completion.prompt_tokens
        assert choice.usage.completion_tokens == len(choice.token_ids)
        usage = choice.usage
        assert usage.stored_tokens <= usage.cached_tokens <= usage.prompt_tokens  # where it was prefilled
        assert usage.external_tokens + usage.recomputed_tokens <= usage.prompt_tokens  # where it was decoded


def busy(report: instance_pb2.WatchLoadResponse) -> dict[str, int]:
    """Everything in a load report that an idle instance has none of."""
    amounts = {
        "waiting": report.num_waiting,
        "running": report.num_running,
        "loading": report.num_loading,
        "transfers": report.num_transfers,
        "running blocks": report.blocks.running,
        "held blocks": report.blocks.held,
        "quarantined blocks": report.blocks.quarantined,
        # In a step a core reports nothing, and its last report is older than the step's requests.
        "seconds of the core's silence": int(report.core_silence_s),
    }
    return {name: amount for name, amount in amounts.items() if amount}


def wait_idle(rig: Rig, within_s: float = IDLE_WITHIN_S) -> float:
    """Returns how long it took until no instance held anything; raises AssertionError with what is still held."""
    started_s = time.monotonic()
    while True:
        begun_s = time.monotonic() - started_s  # the reports may take a while
        held = {name: amounts for name, report in rig.loads().items() if (amounts := busy(report))}
        if not held:
            return time.monotonic() - started_s
        assert begun_s < within_s * PATIENCE, f"after {begun_s:.1f} s still held: {held}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that a rig occupies."""

    usable_blocks: Mapping[str, int]
    """Free and cached blocks of every instance: all of them when it is idle."""
    processes: Mapping[int, tuple[int, int]]
    """Process id → (open files, threads), of every member and its descendants."""
    private_files: frozenset[str]
    """Files in the store that belong to one transfer, or are unfinished."""


def footprint(rig: Rig) -> Footprint:
    """Resources that `rig` occupies now."""
    return Footprint(
        {name: report.blocks.free + report.blocks.cached for name, report in rig.loads().items()},
        _processes(rig),
        frozenset(private_files(rig.store_folder)),
    )


def assert_no_leak(before: Footprint, rig: Rig, within_s: float = IDLE_WITHIN_S) -> None:
    """`rig` is idle again and occupies what it did `before`, except for a few files and threads of caches."""
    deadline_s = time.monotonic() + within_s * PATIENCE
    wait_idle(rig, within_s)
    after = footprint(rig)
    while after.usable_blocks != before.usable_blocks and time.monotonic() < deadline_s:
        after = footprint(rig)  # a step may have hidden a request from the reports before
    assert after.usable_blocks == before.usable_blocks
    assert after.private_files <= before.private_files, "files of single transfers, or unfinished ones, are left"
    assert after.processes.keys() == before.processes.keys(), "processes have come or gone"
    for pid, (num_files, num_threads) in after.processes.items():
        files_before, threads_before = before.processes[pid]
        assert num_files <= files_before + _SLACK, f"process {pid}: {files_before} open files became {num_files}"
        assert num_threads <= threads_before + _SLACK, f"process {pid}: {threads_before} threads became {num_threads}"


def private_files(store: Path) -> list[str]:
    """Paths, relative to the store, of files that only one transfer or one writer may use."""
    paths = [path.relative_to(store) for path in files_below(store)]
    return [
        str(path) for path in paths if "transfers" in path.parts or ".tmp" in path.name or path.name.startswith(".")
    ]


def _processes(rig: Rig) -> dict[int, tuple[int, int]]:
    found = {}
    for member in rig.stack.processes.values():
        if not member.running:
            continue
        server = psutil.Process(member.pid)
        for process in (server, *server.children(recursive=True)):
            found[process.pid] = (process.num_fds(), process.num_threads())
    return found
