"""The shared-storage connector with a stopwatch: writes when chunks were computed and pages arrived.

Given to an instance like any third-party connector: `--kv-connector
benchmarks.recording_connector:RecordingConnector`. Each line of the record is JSON: {"at": CLOCK_MONOTONIC seconds,
"what": "computed" | "loaded", "request": id, "count": n}. All processes of a machine have the same
clock, so that lines of different instances are comparable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.scheduling.request import Request
from kv_transfer.stores.files import SharedStorageConnector
from kv_transfer.transfer.connector import OpResult
from kv_transfer.transfer.loader import LoadOp


class RecordingConnector(SharedStorageConnector):
    """Appends to `record_file`."""

    def __init__(self, *, wake: Callable[[], None], record_file: str, **options: Any) -> None:
        super().__init__(wake=wake, **options)
        self._record = open(record_file, "a", buffering=1)  # noqa: SIM115 - open as long as the connector

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._note("computed", request.spec.hold_kv.transfer_id if request.spec.hold_kv else "", num_computed_tokens)
        super().request_progressed(request, block_ids, num_computed_tokens)

    def _apply(self, end: OpResult, now: float) -> None:
        if isinstance(end.op, LoadOp) and end.failure is None:
            self._note("loaded", end.op.owner.transfer_id, end.op.block_index)
        super()._apply(end, now)

    def _note(self, what: str, transfer_id: str, count: int) -> None:
        line = {"at": time.monotonic(), "what": what, "transfer": transfer_id, "count": count}
        self._record.write(json.dumps(line) + "\n")
