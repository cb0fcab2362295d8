"""A stack whose instances a test kills and freezes while streams run on them, and proof that it hit some."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from protos.tandem.v1 import pools_pb2, pools_pb2_grpc
from tandem.stack_settings import StackSettings
from tests.faults.rig import Rig
from tests.waiting import wait_until

STEP_S = 0.03
"""Every step of a decode instance takes at least as long, so that streams last and there is always one to hit."""
WAIT_S = 60.0
"""A hang guard, for a machine with more to do."""
PATIENT = ("--pools-beat-timeout-s", "20", "--pools-core-silence-timeout-s", "20")
"""For the router, where a death is a broken connection: silence is what a busy machine makes of the living."""
PREFILL_FAILPOINTS = ("prefill.accepted", "kv.save", "prefill.first_token", "engine.step")
DECODE_FAILPOINTS = ("kv.load", "engine.step")


class MortalStack:
    """A running rig, and what its router says of its instances."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._num_announced_before_death: dict[str, int] = {}

    @property
    def decode(self) -> list[str]:
        """Names of the decode instances."""
        return [name for name in self.rig.stack.instances if name.startswith("decode")]

    @property
    def prefill(self) -> list[str]:
        """Names of the prefill instances."""
        return [name for name in self.rig.stack.instances if name.startswith("prefill")]

    def is_up(self, member: str) -> bool:
        """Whether it runs and the router has counted it in."""
        num_before = self._num_announced_before_death.get(member, 0)
        return self.rig.stack.members[member].running and self.num_announced(member) > num_before

    def num_running(self, member: str) -> int:
        """Requests that the router has there now. The instance's own word may be older than its death."""
        with grpc.insecure_channel(self.rig.stack.admin_address) as channel:
            stub = pools_pb2_grpc.PoolsServiceStub(channel)
            listed = stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=WAIT_S, wait_for_ready=True).instances
        address = self.rig.stack.instances[member]
        return sum(instance.num_running_here for instance in listed if instance.address == address)

    def num_announced(self, member: str) -> int:
        """How often the router has counted this instance in."""
        return self._router_log().count(f"is ready address={self.rig.stack.instances[member]}")

    def num_broken(self, member: str) -> int:
        """Attempts that have failed at this instance, as the router tells."""
        return self._router_log().count(f"failed: {self.rig.stack.instances[member]}: ")

    def kill(self, member: str, *, hits: bool = True) -> int:
        """SIGKILL while streams run there, then a new start, not waited for. Returns how many attempts it broke;
        unless `hits` is False, none at all is a failure: then the test proves nothing."""
        before = self.num_broken(member)
        self.rig.kill(member)
        if hits:
            wait_until(lambda: self.num_broken(member) > before, f"killing {member} has hit nobody")
        time.sleep(0.2)  # the others that it hit
        num_hit = self.num_broken(member) - before
        self.restart(member)
        return num_hit

    def restart(self, member: str) -> None:
        """Starts a dead instance again; it is up when the router has counted it in once more."""
        self._num_announced_before_death[member] = self.num_announced(member)
        self.rig.stack.restart(member)

    def wait_up(self, *members: str) -> None:
        """Returns when the router has counted these in, or all."""
        for member in members or tuple(self.rig.stack.instances):
            wait_until(lambda member=member: self.is_up(member), f"{member} is not counted in")  # type: ignore[misc]

    def _router_log(self) -> str:
        return self.rig.stack.members["router"].spec.log_file.read_text()


@contextmanager
def mortal_stack(checkpoint: Path, *, num_prefill: int, num_decode: int, **fields: Any) -> Iterator[MortalStack]:
    """A stack, ready. Instances may be killed: only one that ends by itself is a failure."""
    settings: dict[str, Any] = {
        "disaggregation": "auto",
        "dtype": "float32",
        "num_blocks": 1024,
        "lease_s": 2.0,
        "start_timeout_s": 180.0,
        "instance_args": ("--max-num-batched-tokens", "64", "--block-size", "16", "--peers-ping-timeout-ms", "20000"),
    }
    told = StackSettings(
        model=checkpoint, model_name="lively", num_prefill=num_prefill, num_decode=num_decode, **{**settings, **fields}
    )
    rig = Rig(
        told,
        failpoints={
            **{f"prefill-{index}": PREFILL_FAILPOINTS for index in range(num_prefill)},
            **{f"decode-{index}": DECODE_FAILPOINTS for index in range(num_decode)},
        },
        faults={f"decode-{index}": f"engine.step=sleep:{STEP_S}" for index in range(num_decode)},
    )
    rig.start()
    try:
        stack = MortalStack(rig)
        stack.wait_up()
        yield stack
    finally:
        rig.stop()
