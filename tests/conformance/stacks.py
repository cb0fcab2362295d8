"""Stacks with a connector under test, the places where a test can stop a request in them, and what must hold after it.

accepted ─▶ saving ─▶ first token      at the prefill instance
reserved ─▶ loading ─▶ loaded ─▶ decoding      at the decode instance
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from protos.tandem.v1 import instance_pb2
from tandem import Client, Completion
from tandem.stack_settings import StackSettings
from tests.conformance.stored_pages import StoredPages
from tests.conformance.subjects import Backing
from tests.faults.checker import assert_no_leak, assert_same_answer, busy, footprint
from tests.faults.reference import Reference
from tests.faults.rig import Failpoint, Rig
from tests.lively import BLOCK_SIZE, CHUNK
from tests.waiting import wait_until

NUM_BLOCKS = 512
PATIENT_LEASE_S = 30.0
"""Where nothing dies: whatever is free sooner was given back, and did not just run out."""
PATIENT = ("--peers-ping-timeout-ms", "20000")
"""On a busy machine a process waits for longer than what counts as dead in production."""
EAGER = ("--peers-max-backoff-ms", "200")
"""Where instances are started again: who follows them finds them soon."""
SHORT_LEASE_S = 2.0
"""Where somebody dies."""
SETTLE_S = 15.0
"""Far below the patient lease, and long enough for a machine with more to do."""

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "top_p": 0.95, "seed": 11}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 1000}
"""For requests that are not to end by themselves."""

STATES = {
    "accepted": ("prefill", "prefill.accepted"),
    "saving": ("prefill", "kv.save"),
    "first token": ("prefill", "prefill.first_token"),
    "reserved": ("decode", "decode.reserved"),
    "loading": ("decode", "kv.load"),
    "loaded": ("decode", "decode.loaded"),
    "decoding": ("decode", "decode.after_token"),
}
"""Where a request can be: role and failpoint."""
_FAILPOINTS = {
    role: ("engine.step", *(name for at, name in STATES.values() if at == role)) for role in ("prefill", "decode")
}


def settings(checkpoint: Path, backing: Backing, *, size: int = 1, lease_s: float, **fields: Any) -> StackSettings:
    """`size` instances in each pool, float32, every request handed over; patient where leases are long."""
    args = ("--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK_SIZE), *backing.instance_args)
    told: dict[str, Any] = {
        "num_prefill": size,
        "num_decode": size,
        "disaggregation": "always",
        "dtype": "float32",
        "num_blocks": NUM_BLOCKS,
        "lease_s": lease_s,
        "start_timeout_s": 120.0,
        "instance_args": (*args, *(PATIENT if lease_s >= PATIENT_LEASE_S else EAGER)),
    }
    return StackSettings(model=checkpoint, model_name="lively", **{**told, **fields, **backing.settings})


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack with the connector under test."""

    rig: Rig
    reference: Reference
    pages: StoredPages | None
    backing: Backing

    def ask(self, prompt: Sequence[int], sampling: dict[str, Any]) -> Completion:
        """One request from its beginning to its end."""
        with Client(self.rig.address, timeout_s=60.0) as client:
            return client.generate(list(prompt), **sampling)

    def assert_exact(self, completion: Completion, prompt: Sequence[int], sampling: dict[str, Any]) -> None:
        """The aggregated engine's answer, and a bill that adds up."""
        assert_same_answer(completion, self.reference.answer(prompt, **sampling))
        for choice in completion.choices:
            usage = choice.usage
            assert usage.prompt_tokens == len(prompt)
            assert usage.completion_tokens == len(choice.token_ids)

    def assert_moved(self, completion: Completion, num_local_tokens: int = 0) -> None:
        """All KV came from elsewhere but what the decode instance had."""
        usage = completion.usage
        assert usage.external_tokens == completion.prompt_tokens - num_local_tokens, self.rig.router_warnings()
        assert usage.recomputed_tokens == 0, self.rig.router_warnings()

    def warm_up(self) -> None:
        """Returns when KV moves, whoever is picked, and what is made at the first transfer is there."""
        num_moved = 0

        def moved() -> bool:
            nonlocal num_moved
            prompt = [secrets.randbelow(360) for _ in range(2 * BLOCK_SIZE + 3)]
            usage = self.ask(prompt, {**GREEDY, "max_tokens": 2}).usage
            num_moved = num_moved + 1 if usage.recomputed_tokens == 0 else 0
            return num_moved == 2 * len(self.rig.stack.instances)

        wait_until(moved, lambda: f"KV does not move: {self.rig.router_warnings()}", 2 * SETTLE_S)
        self.settled()
        self.wait_idle()

    def private(self) -> set[str]:
        """What the store has of single transfers, or unfinished."""
        return self.pages.private() if self.pages is not None else set()

    def num_announced(self, member: str) -> int:
        """How often the router has counted this instance in."""
        log = self.rig.stack.members["router"].spec.log_file.read_text()
        return log.count(f"is ready address={self.rig.stack.instances[member]}")

    def settled(self) -> dict[str, instance_pb2.WatchLoadResponse]:
        """Load reports that are no older than this call."""
        first = self.rig.loads()
        wait_until(lambda: _all_newer(first, self.rig.loads()), "instances do not report")
        return self.rig.loads()

    def wait_idle(
        self, members: Sequence[str] | None = None, within_s: float = SETTLE_S, *, but: Collection[str] = ()
    ) -> None:
        """Returns when none of the members, all by default, holds anything, `but` for what is named."""
        names = list(self.rig.stack.instances if members is None else members)
        held: dict[str, dict[str, int]] = {}

        def is_idle() -> bool:
            held.clear()
            held.update({name: amounts for name in names if (amounts := self.busy(name)).keys() - set(but)})
            return not held

        wait_until(is_idle, lambda: f"still held: {held}", within_s)

    def busy(self, member: str) -> dict[str, int]:
        """What an instance has that an idle one has not; to be silent for a while is to be busy."""
        try:
            return busy(self.rig.load(member))
        except grpc.RpcError:
            return {"silent": 1}

    def wait_clean(self, private_before: set[str], within_s: float = SETTLE_S) -> None:
        """Returns when the store has nothing of single transfers that it did not have before."""

        def left() -> list[str]:
            return sorted(self.private() - private_before)

        wait_until(lambda: not left(), lambda: f"left in the store: {left()}", within_s)

    @contextmanager
    def leaves_nothing(self) -> Iterator[None]:
        """Blocks, transfers, stored things, open files, threads and processes are after the block what they were."""
        self.wait_idle()
        before, private = footprint(self.rig), self.private()
        yield
        self.settled()  # a report of a moment ago may be from before the last request
        self.wait_idle()
        self.wait_clean(private)
        assert_no_leak(before, self.rig, SETTLE_S)

    @contextmanager
    def stopped_at(self, state: str) -> Iterator[Stop]:
        """Requests stop at `state`, at whichever instance, until the block ends."""
        role, name = STATES[state]
        with ExitStack() as armed:
            members = [member for member in self.rig.stack.instances if member.startswith(role)]
            yield Stop([armed.enter_context(self.rig.armed(member, name)) for member in members])


@dataclass(frozen=True, slots=True)
class Stop:
    """One failpoint, armed in every instance of a pool."""

    failpoints: Sequence[Failpoint]

    def wait(self) -> str:
        """The instance in which a request stands here, once there is one."""
        name = self.failpoints[0].name
        wait_until(lambda: any(failpoint.reached for failpoint in self.failpoints), f"nobody came to {name}")
        return next(failpoint.member for failpoint in self.failpoints if failpoint.reached)

    def release(self) -> None:
        """Before the block ends."""
        for failpoint in self.failpoints:
            failpoint.release()


@contextmanager
def running(
    checkpoint: Path,
    reference: Reference,
    backing: Backing,
    *,
    size: int = 1,
    lease_s: float = PATIENT_LEASE_S,
    faults: dict[str, str] | None = None,
    **fields: Any,
) -> Iterator[Stack]:
    """A stack, warm: each pool has served, and what is made at the first transfer is there."""
    told = settings(checkpoint, backing, size=size, lease_s=lease_s, **fields)
    members = {f"{role}-{index}": names for role, names in _FAILPOINTS.items() for index in range(size)}
    rig = Rig(told, failpoints={} if faults else members, faults=faults)
    rig.start()
    try:
        stack = Stack(rig, reference, backing.pages(rig) if backing.pages is not None else None, backing)
        stack.warm_up()
        yield stack
    finally:
        rig.stop()


def _all_newer(old: dict[str, instance_pb2.WatchLoadResponse], new: dict[str, instance_pb2.WatchLoadResponse]) -> bool:
    return all(new[name].sequence > old[name].sequence for name in old)
