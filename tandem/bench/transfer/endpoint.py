"""Both ends of a hand-over without an engine: KV memory and a connector, driven like the engine's step loop.

`TransferEndpoint` is one end; `SourceEndpoint` owns the process that holds the blocks:

    started ─"ready"─▶ idle ─{"run", "num_blocks"}─▶ offering ─{"events", "seconds"}─▶ idle ─end of input─▶ gone

The process answers in lines of JSON that start with `_MARK`, since libraries print to standard output as well. It ends
with its parent, however that ends. It has its own process group, so that Ctrl-C ends the parent, which then ends it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from engine.config import KVConnectorConfig
from engine.core.messages import EngineRequest, HoldKV, RemoteKV, TransferEvent
from engine.errors import EngineError
from engine.imports import child_environment
from engine.kv_connector import KVLoadResult, make_connector
from engine.kv_layout import KVLayout
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from kv_transfer.transfer.connector import progress_of
from serving.lifecycle import ParentBond

BLOCK_TOKENS = 16
BLOCK_BYTES_STEP = 2 * BLOCK_TOKENS * 2
"""A block's size is a multiple of this: keys and values of its tokens in bfloat16."""
_LEASE_S = 300.0
_TIMEOUT_S = 30.0
_MARK = "@tandem-bench "
_PROGRAM = """
from serving.lifecycle import bind_to_parent
bind_to_parent()  # before the imports below, which take seconds
from engine.machine import start_up_heap
with start_up_heap():
    from tandem.bench.transfer.endpoint import main
main()
"""


class TransferFailed(Exception):
    """Blocks did not arrive; the message is the connector's reason."""


@dataclass(frozen=True, slots=True)
class Shape:
    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def layout(self) -> KVLayout:
        """A layout whose page has that size."""
        return KVLayout(
            num_layers=1,
            num_kv_heads=1,
            head_dim=self.block_bytes // BLOCK_BYTES_STEP,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
        )

    def memory(self) -> torch.Tensor:
        """KV memory [num_blocks, *page_shape], touched, so that reading into it causes no page faults."""
        try:
            return torch.empty((self.num_blocks, *self.layout.page_shape), dtype=torch.bfloat16).zero_()
        except RuntimeError:
            size = f"{self.num_blocks} blocks of {self.block_bytes} bytes"
            raise TransferFailed(f"there is no memory for {size}, {self.num_bytes / 1e9:.1f} GB") from None

    def content(self, seed: int) -> torch.Tensor:
        """Random bytes [num_bytes], the same in every process."""
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, self.num_bytes, dtype=np.uint8))


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class _Faults(logging.Handler):
    """Keeps the exception of a store that a log line has: the reason that is counted names its class alone."""

    _LOG = logging.getLogger("kv_transfer.stores.page_io")

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._text: str | None = None
        self._LOG.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._text = described(record.exc_info[1])

    def explain(self, reason: str) -> str:
        return reason if self._text is None else f"{reason} ({self._text})"

    def close(self) -> None:
        self._LOG.removeHandler(self)
        super().close()


def as_bytes(kv: torch.Tensor) -> torch.Tensor:
    """The same memory, [num_bytes]."""
    return kv.view(-1).view(torch.uint8)


def make_request(
    name: str,
    run: int,
    num_blocks: int,
    fingerprint: bytes,
    *,
    hold: HoldKV | None = None,
    remote: RemoteKV | None = None,
) -> Request:
    """A request whose prompt fills `num_blocks`; runs share no blocks, and fewer blocks are a prefix of more."""
    spec = EngineRequest(
        request_id=name,
        prompt_token_ids=[run, *range(1, num_blocks * BLOCK_TOKENS)],
        params=SamplingParams(),
        hold_kv=hold,
        remote_kv=remote,
    )
    return Request.from_spec(spec, arrival=0, fingerprint=fingerprint.hex())


class TransferEndpoint:
    """Raises EngineError if the connector cannot be created, TransferFailed if blocks do not arrive."""

    def __init__(self, shape: Shape, config: KVConnectorConfig, fingerprint: bytes, kv: torch.Tensor) -> None:
        self._fingerprint = fingerprint
        self._woken = threading.Event()
        self._connector = make_connector(config, self._woken.set)
        self._connector.register_kv_cache(kv, shape.layout, fingerprint)
        self._faults = _Faults()

    def offer(self, run: int, num_blocks: int) -> tuple[list[TransferEvent], float]:
        """Offers the first blocks; returns the events for the reader, and the seconds until all are readable."""
        transfer_id = f"{run}-{num_blocks}"
        hold = HoldKV(transfer_id=transfer_id, lease_s=_LEASE_S)
        request = make_request(transfer_id, run, num_blocks, self._fingerprint, hold=hold)
        request.finish_reason = "hand_over"
        started_s = time.perf_counter()
        self._connector.request_finished(request, list(range(num_blocks)))
        events: list[TransferEvent] = []
        while not any(event.num_tokens for event in events):
            self._woken.clear()
            self._connector.start_io()
            new = [event for event in self._connector.poll().events if isinstance(event, TransferEvent)]
            events += [event for event in new if event.transfer_id == transfer_id]
            for event in events:
                if event.ended is not None:
                    raise TransferFailed(self._faults.explain(event.reason or event.ended))
            if not new:
                self._wait(started_s)
        return events, time.perf_counter() - started_s

    def load(self, run: int, num_blocks: int, events: list[TransferEvent]) -> float:
        """Reads offered blocks into the first ones; returns the seconds until the request may run."""
        name = f"{run}-{num_blocks}"
        remote = RemoteKV(transfer_id=name, reservation_s=_LEASE_S)
        request = make_request(name, run, num_blocks, self._fingerprint, remote=remote)
        self._connector.update_state_after_alloc(request, list(range(num_blocks)), 0)
        started_s = time.perf_counter()
        for event in events:
            self._connector.handle(progress_of(event, name))
        loaded: list[KVLoadResult] = []
        while not loaded:
            self._woken.clear()
            self._connector.start_io()
            loaded = self._connector.poll().loaded
            if not loaded:
                self._wait(started_s)
        duration_s = time.perf_counter() - started_s
        self._connector.request_finished(request, [])
        if loaded[0].num_recomputed_blocks:
            raise TransferFailed(self._faults.explain(loaded[0].reason or "the blocks were missing"))
        return duration_s

    def shutdown(self) -> None:
        self._faults.close()
        self._connector.shutdown()

    def _wait(self, started_s: float) -> None:
        if time.perf_counter() - started_s > _TIMEOUT_S:
            raise TransferFailed("timeout")
        self._woken.wait(0.5)


class SourceEndpoint:
    """Owns the process that offers blocks. It starts at once, so that several start together; `wait_ready` comes first.

    Raises TransferFailed with the process's error.
    """

    def __init__(
        self, shape: Shape, config: KVConnectorConfig, fingerprint: bytes, *, seed: int, folder: Path | None = None
    ) -> None:
        """`folder` is for temporary files of libraries, which do not get to remove them."""
        self._bond = ParentBond()
        own = {} if folder is None else {"TMPDIR": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **self._bond.environment(), **child_environment(), **own},
            pass_fds=self._bond.pass_fds,
            process_group=0,
        )
        connector = {"class_path": config.class_path, "options": config.options}
        sizes = {"num_blocks": shape.num_blocks, "block_bytes": shape.block_bytes}
        try:
            self._write({**connector, **sizes, "fingerprint": fingerprint.hex(), "seed": seed})
        except TransferFailed:
            self.close()
            raise

    def wait_ready(self) -> None:
        """Waits until its connector exists and its blocks are filled."""
        self._read_answer()

    def offer(self, run: int, num_blocks: int) -> tuple[list[TransferEvent], float]:
        self._write({"run": run, "num_blocks": num_blocks})
        answer = self._read_answer()
        return msgspec.msgpack.decode(bytes.fromhex(answer["events"]), type=list[TransferEvent]), answer["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes
        self._bond.close()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TransferFailed("the source process has ended") from None

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                if "failed" in answer:
                    raise TransferFailed(answer["failed"])
                return answer
        raise TransferFailed(f"the source process has ended with status {self._process.wait()}")


def main() -> None:
    """The source process, until the end of its input."""

    def answer(**fields: object) -> None:
        print(_MARK + json.dumps(fields), flush=True)

    try:
        setup = json.loads(sys.stdin.readline())
        shape = Shape(setup["num_blocks"], setup["block_bytes"])
        config = KVConnectorConfig(class_path=setup["class_path"], options=setup["options"])
        kv = shape.memory()
        as_bytes(kv).copy_(shape.content(setup["seed"]))
        endpoint = TransferEndpoint(shape, config, bytes.fromhex(setup["fingerprint"]), kv)
        answer(ready=True)
        for line in sys.stdin:
            command = json.loads(line)
            events, seconds = endpoint.offer(command["run"], command["num_blocks"])
            answer(events=msgspec.msgpack.encode(events).hex(), seconds=seconds)
    except (EngineError, TransferFailed) as error:
        answer(failed=str(error))
    except Exception as error:
        answer(failed=described(error))
    os._exit(0)  # skips the slow exit handlers of libraries
