"""The loop of an engine core, at its mailbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core.core import EngineCore, StepTimeEstimator
from engine.core.loop import HEARTBEAT_S, Mailbox, run_core
from engine.core.messages import (
    AddRequest,
    Command,
    CoreMessage,
    EngineInfo,
    EngineRequest,
    Outputs,
    Shutdown,
    TokensEvent,
    TransferEvent,
)
from engine.sampling.params import SamplingParams
from tests.builders import lively_checkpoint


class CoreWithTransfers(EngineCore):
    """During each step, which takes 10 ms, its connector makes progress."""

    is_computing = False

    def begin_step(self) -> bool:
        self.is_computing = super().begin_step()
        return self.is_computing

    def compute(self) -> None:
        super().compute()
        time.sleep(0.01)

    def poll_connector(self) -> None:
        super().poll_connector()
        if self.is_computing:
            self._events.append(TransferEvent("t1", 1))

    def finish_step(self) -> None:
        self.is_computing = False
        super().finish_step()


@contextmanager
def running(
    model: Path, socket: Path, token_s: float, kind: type[EngineCore] = EngineCore, **config: Any
) -> Iterator[tuple[Callable[[Command], None], Callable[[], CoreMessage]]]:
    """`send` and `receive` of a core whose steps are predicted to take `token_s` per token."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.set(zmq.LINGER, 0)
        peer.set(zmq.RCVTIMEO, 60_000)
        peer.bind(f"ipc://{socket}")
        mailbox = Mailbox(f"ipc://{socket}")
        core = kind(EngineConfig(model=str(model), dtype="float32", **{"num_blocks": 16, **config}), mailbox.wake)
        core.step_time = StepTimeEstimator(token_s)
        loop = threading.Thread(target=run_core, args=(core, mailbox), daemon=True)
        loop.start()

        def send(command: Command) -> None:
            peer.send(msgspec.msgpack.encode(command))

        try:
            yield send, lambda: msgspec.msgpack.decode(peer.recv(), type=CoreMessage)
        finally:
            send(Shutdown())
            loop.join()
            mailbox.close()


def test_a_long_step_is_announced_before_it_is_computed(tmp_path: Path, short_folder: Path) -> None:
    model = lively_checkpoint(tmp_path / "model", "llama")
    prompt = list(range(64))
    with running(model, short_folder / "core", token_s=HEARTBEAT_S) as (send, receive):
        assert isinstance(receive(), EngineInfo)
        assert isinstance(receive(), Outputs), "it is idle, and has just reported"
        send(AddRequest(EngineRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1))))
        while isinstance(message := receive(), Outputs) and not message.load.step_s:
            assert not message.events
    assert isinstance(message, Outputs)
    assert message.load.step_s == len(prompt) * HEARTBEAT_S
    assert message.events == [], "the step has ended"


def test_a_core_reports_between_short_steps_whatever_moves_during_them(tmp_path: Path, short_folder: Path) -> None:
    model = lively_checkpoint(tmp_path / "model", "llama")
    prompt = list(range(64))
    reports: list[Outputs] = []
    with running(model, short_folder / "core", 0.001, CoreWithTransfers, max_num_batched_tokens=1) as (send, receive):
        assert isinstance(receive(), EngineInfo)
        send(AddRequest(EngineRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1))))
        while not (reports and any(isinstance(event, TokensEvent) for event in reports[-1].events)):
            message = receive()
            assert isinstance(message, Outputs)
            reports.append(message)
    during_the_prompt = [report for report in reports[:-1] if report.load.num_prefilled_tokens > 0]
    assert any(report.answered for report in during_the_prompt), "the core looks hung while it computes a prompt"
