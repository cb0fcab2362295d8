"""The shared stacks by name, the places where a test can stop a request in them, and what must hold after each test.

    accepted ─▶ saving ─▶ first token                  at the prefill instance
    reserved ─▶ loading ─▶ loaded ─▶ decoding          at the decode instance

A test takes a stack by a mark: `@on("nixl", "redis")` for the connectors' own pairs of instances, `@on_stack("demo")`
for one with a name. Stacks start once per session; all tests of one run in the same worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.tandem.v1 import instance_pb2
from tandem import Client, Completion
from tandem.demo import MODEL_DIR
from tandem.local_stack.settings import StackSettings
from tests.engine_under_test import BLOCK_SIZE, IS_VLLM, PATIENCE, engine_fields
from tests.lively import CHUNK, PATIENT_PEERS, PATIENT_POOLS
from tests.system.checker import assert_no_leak, assert_same_answer, busy, footprint
from tests.system.connectors import CONNECTORS, Backing
from tests.system.reference import Reference
from tests.system.rig import LOOK_TIMEOUT_S, Failpoint, Rig
from tests.system.stored_pages import StoredPages
from tests.waiting import wait_until

NUM_BLOCKS = 512
PATIENT_LEASE_S = 30.0
"""Where no instance dies: blocks that are free sooner were given back, and did not just expire."""
SHORT_LEASE_S = 2.0
"""Where instances die."""
SETTLE_S = 15.0
"""Far below the patient lease, and long enough for a busy machine."""
BEAT_TIMEOUT_S = 3.0 * PATIENCE
"""Where instances freeze: longer than the default, so that a stall of the machine is not taken for a frozen one."""
DECODE_STEP_S = 0.03
"""Of a killable stack: streams last long enough to be hit."""
DRAIN_ACCEPT_S, DRAIN_GRACE_S, DRAIN_MOVE_S = 0.1, 40.0, 39.8
"""Of a killable stack: a stream that runs 0.2 s after its instance has begun to refuse moves to another instance."""
DRAIN = ("--server-drain-accept-s", str(DRAIN_ACCEPT_S), "--server-drain-grace-s", str(DRAIN_GRACE_S))
BY_LENGTH = ("--disaggregation-speed-smoothing", "0")
"""In `auto`: prompts of more than 64 tokens are handed over, however fast the instances are."""

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "top_p": 0.95, "seed": 11}
NARROWED: dict[str, Any] = {**SEEDED, "top_p": 1.0, "top_k": 20, "min_p": 0.02, "temperature": 1.3}
REPETITIVE: dict[str, Any] = {**SEEDED, "allowed_token_ids": [40, 41, 42], "max_tokens": 60}
"""For outputs of which a killable stack drafts some tokens."""
DRAFTS = () if IS_VLLM else ("--num-speculative-tokens", "4")
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
STEPS = {"prefill step": ("prefill", "engine.step"), "decode step": ("decode", "engine.step")}
"""Where an engine can be that computes a request."""
_FAILPOINTS = {
    role: ("engine.step", *(name for at, name in STATES.values() if at == role)) for role in ("prefill", "decode")
}


Ranks = tuple[int, int]
"""Tensor and pipeline parallel size."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack with the connector under test."""

    rig: Rig
    reference: Reference
    pages: StoredPages | None
    backing: Backing

    def generate(self, prompt: Sequence[int], sampling: dict[str, Any]) -> Completion:
        """One request from its beginning to its end."""
        with Client(self.rig.address, timeout_s=60.0) as client:
            return client.generate(list(prompt), **sampling)

    def assert_exact(self, completion: Completion, prompt: Sequence[int], sampling: dict[str, Any]) -> None:
        """The completion is the aggregated engine's answer, and its usage counts the tokens that came."""
        assert_same_answer(completion, self.reference.answer(prompt, **sampling))
        for choice in completion.choices:
            assert choice.usage.prompt_tokens == len(prompt)
            assert choice.usage.completion_tokens == len(choice.token_ids)

    def assert_moved(self, completion: Completion, num_local_tokens: int = 0) -> None:
        """All KV was transferred, except for the tokens that the decode instance had."""
        usage = completion.usage
        assert usage.external_tokens == completion.prompt_tokens - num_local_tokens, self.rig.router_warnings()
        assert usage.recomputed_tokens == 0, self.rig.router_warnings()

    def warm_up(self) -> None:
        """Returns when KV moves between any pair of instances, and everything made at the first transfer exists."""
        num_moved = 0

        def moved() -> bool:
            nonlocal num_moved
            prompt = [secrets.randbelow(360) for _ in range(5 * BLOCK_SIZE + 3)]
            usage = self.generate(prompt, {**GREEDY, "max_tokens": 2}).usage
            num_moved = num_moved + 1 if usage.recomputed_tokens == 0 else 0
            return num_moved == 2 * len(self.rig.stack.instances)

        wait_until(moved, lambda: f"KV does not move: {self.rig.router_warnings()}", 2 * SETTLE_S)
        self.settled()
        self.wait_idle()

    def private(self) -> set[str]:
        """Pages in the store that belong to single transfers, or are unfinished."""
        return self.pages.private() if self.pages is not None else set()

    def settled(self) -> dict[str, instance_pb2.WatchLoadResponse]:
        """Load reports that are no older than this call."""
        return self.rig.new_loads()

    def wait_idle(
        self, names: Sequence[str] | None = None, within_s: float = SETTLE_S, *, but: Collection[str] = ()
    ) -> None:
        """Returns when none of the instances, all by default, holds anything `but` these amounts."""
        instances = list(self.rig.stack.instances if names is None else names)
        held: dict[str, dict[str, int]] = {}

        def is_idle() -> bool:
            held.clear()
            held.update({name: amounts for name in instances if (amounts := self.busy(name)).keys() - set(but)})
            return not held

        wait_until(is_idle, lambda: f"still held: {held}", within_s)

    def busy(self, name: str) -> dict[str, int]:
        """Everything that an idle instance has none of. An instance that does not answer counts as busy."""
        try:
            return busy(self.rig.load(name, LOOK_TIMEOUT_S))
        except grpc.RpcError:
            return {"silent": 1}

    def wait_clean(self, private_before: set[str], within_s: float = SETTLE_S) -> None:
        """Returns when the store has no page of a single transfer that it did not have before."""

        def left() -> list[str]:
            return sorted(self.private() - private_before)

        wait_until(lambda: not left(), lambda: f"left in the store: {left()}", within_s)

    @contextmanager
    def leaves_nothing(self) -> Iterator[None]:
        """After the block, blocks, transfers, stored pages, open files, threads and processes are what they were."""
        self.wait_idle()
        before, private = footprint(self.rig), self.private()
        yield
        self.settled()  # a report of a moment ago may be from before the last request
        self.wait_idle()
        self.wait_clean(private)
        assert_no_leak(before, self.rig, SETTLE_S)

    @contextmanager
    def stopped_at(self, state: str) -> Iterator[Stop]:
        """Requests stop at `state`, at any instance of its role, until the block ends."""
        role, name = {**STATES, **STEPS}[state]
        with ExitStack() as armed:
            names = [instance for instance in self.rig.stack.instances if instance.startswith(role)]
            yield Stop([armed.enter_context(self.rig.armed(instance, name)) for instance in names])


@dataclass(frozen=True, slots=True)
class Stop:
    """One failpoint, armed in every instance of a pool."""

    failpoints: Sequence[Failpoint]

    def wait(self) -> str:
        """The instance in which a request is stopped here, once there is one."""
        name = self.failpoints[0].name
        wait_until(lambda: any(failpoint.reached for failpoint in self.failpoints), f"no request reached {name}")
        return next(failpoint.member for failpoint in self.failpoints if failpoint.reached)

    def release(self) -> None:
        """Before the block ends."""
        for failpoint in self.failpoints:
            failpoint.release()


@dataclass(frozen=True, slots=True)
class Model:
    """The checkpoint that a stack serves, the oracle of its answers, and a folder for what the stack needs."""

    checkpoint: Path
    reference: Reference
    folder: Path


@contextmanager
def started(
    model: Model,
    connector: str = "shared_storage",
    *,
    size: int = 1,
    failpoints: bool = True,
    faults: dict[str, str] | None = None,
    ranks: Mapping[str, Ranks] | None = None,
    instance_args: tuple[str, ...] = (),
    router_args: tuple[str, ...] = (),
    env: Mapping[str, Mapping[str, str]] | None = None,
    **fields: Any,
) -> Iterator[Stack]:
    """A stack of `size` instances per role, float32, every request handed over unless `fields` say otherwise; warm.
    `ranks` by instance where there are several; `env` of the router, or of all processes as "*"."""
    with CONNECTORS[connector](model.folder) as backing:
        defaults: dict[str, Any] = {
            "model_name": "lively",
            "num_prefill": size,
            "num_decode": size,
            "disaggregation": "always",
            "dtype": "float32",
            "num_blocks": NUM_BLOCKS,
            "lease_s": PATIENT_LEASE_S,
            "start_timeout_s": 120.0,
            "pin": False,  # several stacks share the machine's cores
            "threads": 1,
        }
        args = ("--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK_SIZE))
        settings = StackSettings(
            model=model.checkpoint,
            instance_args=(*args, *backing.instance_args, *instance_args),
            router_args=router_args,
            **{**defaults, **backing.settings, **fields, **engine_fields()},
        )
        names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(size)]
        rig = Rig(
            settings,
            failpoints={name: _FAILPOINTS[name.partition("-")[0]] for name in names} if failpoints else {},
            faults=faults,
            env={**(env or {}), **{name: {**backing.env, **_sizes((ranks or {}).get(name, (1, 1)))} for name in names}},
        )
        rig.start()
        try:
            stack = Stack(rig, model.reference, backing.pages(rig) if backing.pages is not None else None, backing)
            stack.warm_up()
            yield stack
        finally:
            rig.stop()


def _sizes(ranks: Ranks) -> dict[str, str]:
    names = ("TANDEM_ENGINE__TENSOR_PARALLEL_SIZE", "TANDEM_ENGINE__PIPELINE_PARALLEL_SIZE")
    return {name: str(size) for name, size in zip(names, ranks, strict=True)}


def pair(model: Model, connector: str) -> AbstractContextManager[Stack]:
    """One prefill and one decode instance in which no instance dies; over NIXL, two stages hand over to one."""
    debug = ("--log-level", "debug") if connector == "redis" else ()
    ranks = {"prefill-0": (1, 2)} if connector == "nixl" else None
    return started(model, connector, ranks=ranks, instance_args=PATIENT_PEERS, router_args=(*PATIENT_POOLS, *debug))


def two_pairs(model: Model, connector: str) -> AbstractContextManager[Stack]:
    return started(model, connector, size=2, instance_args=PATIENT_PEERS, router_args=PATIENT_POOLS)


def killable(model: Model, connector: str) -> AbstractContextManager[Stack]:
    """Two prefill and two decode instances that may be killed, frozen and drained; long prompts are handed over."""
    beats = ("--pools-beat-timeout-s", str(BEAT_TIMEOUT_S), "--pools-core-silence-timeout-s", str(BEAT_TIMEOUT_S))
    return started(
        model,
        connector,
        size=2,
        disaggregation="auto",
        lease_s=SHORT_LEASE_S,
        # Instances that start again are found soon by their peers.
        instance_args=("--peers-max-backoff-ms", "200", "--server-drain-move-s", str(DRAIN_MOVE_S), *DRAIN, *DRAFTS),
        router_args=(*BY_LENGTH, *beats, *DRAIN),
        faults={f"decode-{index}": f"engine.step=sleep:{DECODE_STEP_S}" for index in range(2)},
    )


def tight(model: Model) -> AbstractContextManager[Stack]:
    """A decode pool with room for one long request, slow enough that it outlasts another one's reservation. It writes
    the spans of all requests to a file."""
    spans = {"TANDEM_TRACING__FILE": str(model.folder / "spans.jsonl"), "OTEL_BSP_SCHEDULE_DELAY": "100"}
    return started(
        model,
        num_blocks=128,
        instance_args=PATIENT_PEERS,
        # The instance is to reject, not the router before it.
        router_args=(
            *("--disaggregation-reservation-s", "3", "--disaggregation-reserve-timeout-s", "2"),
            *("--admission-block-fraction", "100", *PATIENT_POOLS),
        ),
        failpoints=False,
        faults={"decode-0": "engine.step=sleep:0.02"},
        env={"*": spans, "router": {"TANDEM_LOG__FORMAT": "json"}},
    )


def prefix_store(model: Model) -> AbstractContextManager[Stack]:
    """Two prefill instances that share a Redis; NIXL hands over."""
    return started(
        model, "nixl,redis", num_prefill=2, instance_args=PATIENT_PEERS, router_args=PATIENT_POOLS, failpoints=False
    )


def demo(model: Model) -> AbstractContextManager[Stack]:
    """The demo model, with an HTTP port."""
    # Fifty prompts on two cores may wait in the queue for longer than a client would.
    return started(
        Model(MODEL_DIR, Reference(MODEL_DIR, num_blocks=512), model.folder),
        model_name="demo",
        num_blocks=4096,
        http_port=0,
        instance_args=PATIENT_PEERS,
        router_args=("--admission-queue-timeout-s", "60", *PATIENT_POOLS),
        failpoints=False,
    )


STACKS: dict[str, Callable[[Model], AbstractContextManager[Stack]]] = {
    "tight": tight,
    "prefix store": prefix_store,
    "demo": demo,
}
"""Stacks that are not one of a connector."""
KINDS: dict[str, Callable[[Model, str], AbstractContextManager[Stack]]] = {
    "pair": pair,
    "two pairs": two_pairs,
    "killable": killable,
}
"""Stacks of a connector."""


def start(name: str, model: Model) -> AbstractContextManager[Stack]:
    """The stack of this name: one of STACKS, or `kind connector`."""
    if name in STACKS:
        return STACKS[name](model)
    kind, _, connector = name.rpartition(" ")
    return KINDS[kind](model, connector)


def on_stack(name: str) -> pytest.MarkDecorator:
    """Runs a test, or a module, on one stack."""
    return pytest.mark.parametrize("shared_stack", [_param(name)], indirect=True)


def on(*by_default: str, kind: str = "pair", names: Sequence[str] = tuple(CONNECTORS)) -> pytest.MarkDecorator:
    """Runs a test, or a module, on a stack of each connector: by default on these, on the others if slow tests run."""
    assert set(by_default) <= set(CONNECTORS)
    params = [_param(f"{kind} {name}", is_slow=name not in by_default) for name in names]
    return pytest.mark.parametrize("shared_stack", params, indirect=True)


def _param(name: str, *, is_slow: bool = False) -> Any:
    """Its id, in parentheses, makes all tests of the stack one unit of work (tests/units.py)."""
    return pytest.param(name, marks=pytest.mark.slow if is_slow else (), id=f"({name})")
