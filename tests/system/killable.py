"""Kills and freezes instances of a stack while streams run on them, and proves that streams were hit."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc

from protos.tandem.v1 import pools_pb2, pools_pb2_grpc
from tandem.local_stack.settings import StackSettings
from tests.engine_under_test import BLOCK_SIZE, IS_VLLM, engine_fields
from tests.grpc_calls import blocking_stub
from tests.system.load import Load, Outcome
from tests.system.questions import Question
from tests.system.rig import Rig
from tests.waiting import wait_until

STEP_S = 0.03
"""Every step of a decode instance takes at least as long, so that streams last and there is always one to hit."""
WAIT_S = 60.0
"""A hang guard, for a busy machine."""
PATIENT = ("--pools-beat-timeout-s", "20", "--pools-core-silence-timeout-s", "20")
"""For the router, where a death is a broken connection: on a busy machine, live instances are silent for a while."""
GAP_S = 1.0
"""Between two kills, at the least."""
PREFILL_FAILPOINTS = ("prefill.accepted", "kv.save", "prefill.first_token", "engine.step")
DECODE_FAILPOINTS = ("kv.load", "engine.step")


class KillableStack:
    """A running rig, and what its router reports about its instances."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    @property
    def decode(self) -> list[str]:
        """Names of the decode instances."""
        return [name for name in self.rig.stack.instances if name.startswith("decode")]

    @property
    def prefill(self) -> list[str]:
        """Names of the prefill instances."""
        return [name for name in self.rig.stack.instances if name.startswith("prefill")]

    def num_running(self, name: str) -> int:
        """Requests that the router has there now. The instance's own report may be older than its death."""
        with grpc.insecure_channel(self.rig.stack.admin_address) as channel:
            stub = blocking_stub(pools_pb2_grpc.PoolsServiceStub, channel)
            listed = stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=WAIT_S, wait_for_ready=True).instances
        address = self.rig.stack.instances[name]
        return sum(instance.num_running_here for instance in listed if instance.address == address)

    def num_broken(self, name: str) -> int:
        """Attempts that have failed at this instance, by the router's log."""
        return self._router_log().count(f"failed: {self.rig.stack.instances[name]}: ")

    @property
    def num_ejections(self) -> int:
        """Of any instance, by the router's log."""
        return self._router_log().count(" is ejected for ")

    def kill(self, name: str, *, hits: bool = True) -> int:
        """SIGKILL while streams run there, then a new start, not waited for. Returns how many attempts it broke;
        unless `hits` is False, none at all is a failure: then the test proves nothing."""
        before = self.num_broken(name)
        self.rig.kill(name)
        if hits:
            wait_until(lambda: self.num_broken(name) > before, f"killing {name} has hit no stream")
        time.sleep(0.2)  # further attempts that it broke
        num_hit = self.num_broken(name) - before
        self.rig.stack.restart(name)
        return num_hit

    def drain(self, name: str) -> int:
        """SIGTERM while streams run there; when it has ended, a new start, not waited for. Returns how many
        streams it moved to other instances."""
        process, before = self.rig.stack.processes[name], self._num_moved()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not process.running, f"{name} does not end", WAIT_S)
        assert process.exit_status == 0, process.exit_text()
        self.rig.stack.restart(name)
        return self._num_moved() - before

    def _num_moved(self) -> int:
        return self._router_log().count("goes on elsewhere")

    def wait_up(self, *members: str) -> None:
        """Returns when these instances, or all, are up."""
        for name in members or tuple(self.rig.stack.instances):
            wait_until(lambda name=name: self.rig.is_ready(name), f"{name} is not up")  # type: ignore[misc]

    def _router_log(self) -> str:
        return self.rig.stack.processes["router"].spec.log_file.read_text()


@contextmanager
def killable_stack(
    checkpoint: Path, *, num_prefill: int, num_decode: int, step_s: float = STEP_S, **fields: Any
) -> Iterator[KillableStack]:
    """A stack of its own, a step of whose decode instances takes at least `step_s`. Instances may be killed; one that
    ends by itself is a failure."""
    settings: dict[str, Any] = {
        "disaggregation": "auto",
        "dtype": "float32",
        "num_blocks": 1024,
        "lease_s": 2.0,
        "start_timeout_s": 180.0,
        "instance_args": (
            "--max-num-batched-tokens",
            "64",
            "--block-size",
            str(BLOCK_SIZE),
            "--peers-ping-timeout-ms",
            "20000",
        ),
    }
    stack_settings = StackSettings(
        model=checkpoint,
        model_name="lively",
        num_prefill=num_prefill,
        num_decode=num_decode,
        **{**settings, **fields, **engine_fields()},
    )
    rig = Rig(
        stack_settings,
        failpoints={
            **{f"prefill-{index}": PREFILL_FAILPOINTS for index in range(num_prefill)},
            **{f"decode-{index}": DECODE_FAILPOINTS for index in range(num_decode)},
        },
        faults={f"decode-{index}": f"engine.step=sleep:{step_s}" for index in range(num_decode)},
    )
    rig.start()
    try:
        stack = KillableStack(rig)
        stack.wait_up()
        yield stack
    finally:
        rig.stop()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def cut_under_load(
    stack: KillableStack,
    questions: Sequence[Question],
    *,
    num_strikes: int,
    num_cut: int,
    num_clients: int,
    strike: Callable[[KillableStack, str], int] = KillableStack.kill,
) -> list[Outcome]:
    """Kills decode instances in turn, or strikes them otherwise, until so many strikes, so many cut streams, and
    some of every kind, are reached; returns the cut ones."""
    kinds = {question.kind for question in questions}
    with Load(stack.rig.address, questions, num_clients) as load:
        victims = itertools.cycle(stack.decode)
        struck_s: list[float] = []
        while len(struck_s) < num_strikes or load.num_cut < num_cut or load.kinds_cut != kinds:
            victim = next(victims)
            others = [name for name in stack.decode if name != victim]
            with load.paused() if IS_VLLM else nullcontext():  # vLLM's start would take minutes beside the load
                wait_until(lambda victim=victim: stack.rig.is_ready(victim), f"{victim} is not back")  # type: ignore[misc]
            wait_until(lambda others=others: any(map(stack.rig.is_ready, others)), "no other is up")  # type: ignore[misc]
            wait_until(lambda: load.bears_another_kill(struck_s), "answers do not end")
            wait_until(lambda victim=victim: stack.num_running(victim) > 0, f"nothing runs at {victim}")  # type: ignore[misc]
            struck_s.append(time.monotonic())
            assert strike(stack, victim) > 0
            time.sleep(GAP_S)
        outcomes = load.finish()
    for outcome in outcomes:
        outcome.assert_exact()
    cut = [outcome for outcome in outcomes if outcome.was_cut]
    stalls = [outcome.stall_s for outcome in cut]
    print(
        f"\n{len(struck_s)} strikes under {num_clients} clients: {len(outcomes)} streams, {len(cut)} cut; "
        f"stall p50 {percentile(stalls, 0.5):.2f} s, p95 {percentile(stalls, 0.95):.2f} s, max {max(stalls):.2f} s"
    )
    return cut
