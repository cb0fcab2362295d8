"""How fast pages move through the nixl connector, next to a bare NIXL loop over the same pages in the same run.

    python -m benchmarks.nixl_transfer [--tls tcp] [--pages 64] [--rounds 9]

Two processes: one lends 64 pages of 1.8 MB, the other reads them: bare (one transfer of all pages, polled), through the
connector without digests, and with them. The ways take turns, so that a busy machine is busy for all; each round's
time is from "these pages are ready" to "this request may run". Medians, GB/s, and the share of the bare loop.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from engine.kv_connector import KVLoadResult
from engine.kv_layout import KVLayout
from engine.messages import EngineRequest, HoldKV, KVProgress, RemoteKV, TransferEvent
from engine.request import Request
from engine.sampling_params import SamplingParams
from kv_transfer.nixl_agent import NixlAgent, Region
from kv_transfer.nixl_connector import NixlConnector
from kv_transfer.nixl_metadata import TransferMetadata
from kv_transfer.nixl_ucx import UcxSettings
from kv_transfer.secret import ensure_secret

LAYOUT = KVLayout(num_layers=28, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
FINGERPRINT = bytes(32)


@dataclass
class Side:
    """KV memory and a connector, without an engine."""

    num_pages: int
    options: dict[str, object]
    woken: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.kv = torch.zeros((self.num_pages, *LAYOUT.page_shape), dtype=torch.bfloat16)
        self.connector = NixlConnector(wake=self.woken.set, **self.options)
        self.connector.register_kv_cache(self.kv, LAYOUT, FINGERPRINT)

    def request(self, name: str, **fields: object) -> Request:
        """A prompt that fills every block."""
        spec = EngineRequest(
            request_id=name,
            prompt_token_ids=list(range(self.num_pages * LAYOUT.block_size)),
            params=SamplingParams(),
            **fields,  # type: ignore[arg-type]
        )
        return Request.from_spec(spec, arrival=0, fingerprint=FINGERPRINT.hex())

    def lend(self) -> list[TransferEvent]:
        """One transfer with every block, complete."""
        self.kv.view(torch.int16).random_(-30000, 30000)
        request = self.request("lent", hold_kv=HoldKV(transfer_id="lent", lease_s=300.0))
        request.finish_reason = "hand_over"
        self.connector.request_finished(request, list(range(self.num_pages)))
        events: list[TransferEvent] = []
        while not any(event.num_tokens for event in events):
            self.woken.clear()
            self.connector.save_kv(self.connector.build_connector_meta())
            events += [event for event in self.connector.poll().events if isinstance(event, TransferEvent)]
            if not any(event.num_tokens for event in events):
                self.woken.wait(1.0)
        return events

    def load(self, name: str, events: list[TransferEvent]) -> float:
        """Read the transfer; returns seconds."""
        request = self.request(name, remote_kv=RemoteKV(transfer_id="lent", reservation_s=60.0))
        self.connector.update_state_after_alloc(request, list(range(self.num_pages)), 0)
        started = time.perf_counter()
        for event in events:
            self.connector.handle(
                KVProgress(
                    name,
                    event.num_ready_blocks,
                    digests=event.digests,
                    connector_metadata=event.connector_metadata,
                    num_tokens=event.num_tokens,
                )
            )
        loaded: list[KVLoadResult] = []
        while not loaded:
            self.woken.clear()
            self.connector.start_load_kv(self.connector.build_connector_meta())
            loaded = self.connector.poll().loaded
            if not loaded:
                self.woken.wait(1.0)
        duration_s = time.perf_counter() - started
        assert loaded[0].num_recomputed_blocks == 0, loaded[0].reason
        self.connector.request_finished(request, [])
        return duration_s


class BareLoop:
    """What the library does by itself."""

    def __init__(self, metadata: TransferMetadata, settings: UcxSettings) -> None:
        self._num_pages = len(metadata.block_ids)
        self._memory = torch.zeros(self._num_pages * metadata.page_bytes, dtype=torch.uint8)
        region = Region("DRAM", 0, self._memory.data_ptr(), metadata.page_bytes, self._num_pages)
        self._agent = NixlAgent("bare-loop", settings)
        self._agent.register(region)
        name = self._agent.add_peer(metadata.agent_metadata)
        self._ours, self._theirs = self._agent.prepare(region), self._agent.prepare(metadata.pages, name)
        self._block_ids = metadata.block_ids

    def read(self) -> float:
        """Read every page; returns seconds."""
        started = time.perf_counter()
        transfer = self._agent.read(self._ours, range(self._num_pages), self._theirs, self._block_ids)
        done = self._agent.post(transfer)
        while not done:
            time.sleep(1e-4)
            done = self._agent.is_done(transfer)
        duration_s = time.perf_counter() - started
        self._agent.release(transfer)
        return duration_s


def hold(num_pages: int, options: dict[str, object]) -> None:
    """The lending process: says once what it lends, and stays until its input ends."""
    events = Side(num_pages, options).lend()
    print("events", msgspec.msgpack.encode(events).hex(), flush=True)
    sys.stdin.read()
    os._exit(0)


def start_holder(num_pages: int, options: dict[str, object]) -> tuple[subprocess.Popen[str], list[TransferEvent]]:
    """A lending process and what it lends."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.nixl_transfer",
        "--hold",
        json.dumps(options),
        "--pages",
        str(num_pages),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("events "):
            return process, msgspec.msgpack.decode(bytes.fromhex(line.split()[1]), type=list[TransferEvent])
    raise RuntimeError("the lending process has ended")


def measure(num_pages: int, num_rounds: int, tls: str, folder: Path) -> None:
    """Print a table."""
    ensure_secret(folder / "secret")
    ways: dict[str, dict[str, object]] = {
        "digest off": {"ucx_tls": tls, "digest": False},
        "digest on": {"ucx_tls": tls, "kv_secret_file": str(folder / "secret")},
    }
    seconds: dict[str, list[float]] = {"bare loop": [], **{name: [] for name in ways}}
    holders, readers, lent = [], {}, {}
    try:
        for name, options in ways.items():
            holder, lent[name] = start_holder(num_pages, options)
            holders.append(holder)
            readers[name] = Side(num_pages, options)
        metadata = msgspec.msgpack.decode(lent["digest off"][0].connector_metadata[32:], type=TransferMetadata)
        bare = BareLoop(metadata, UcxSettings(tls=tls))
        for index in range(num_rounds + 2):
            times = {"bare loop": bare.read()}
            times |= {name: readers[name].load(f"r{index}", lent[name]) for name in ways}
            for name, duration_s in times.items():
                if index >= 2:  # the first connects and touches memory for the first time
                    seconds[name].append(duration_s)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
    num_bytes = num_pages * LAYOUT.bytes_per_block
    bare_s = statistics.median(seconds["bare loop"])
    print(f"{num_pages} pages of {LAYOUT.bytes_per_block} bytes, UCX_TLS={tls or 'unset'}, {num_rounds} rounds")
    for name, measured in seconds.items():
        median_s = statistics.median(measured)
        print(
            f"  {name:10}  {num_bytes / median_s / 1e9:6.2f} GB/s  {median_s * 1e3:7.1f} ms  {bare_s / median_s:5.0%}"
        )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tls", default="", help="transports that UCX may use, e.g. tcp; default: its choice")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold is not None:
        hold(arguments.pages, json.loads(arguments.hold))
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.pages, arguments.rounds, arguments.tls, Path(folder))


if __name__ == "__main__":
    main()
