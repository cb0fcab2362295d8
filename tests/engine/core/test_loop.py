"""The loop of an engine core, at its mailbox."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core.core import EngineCore, StepTimeEstimator
from engine.core.loop import HEARTBEAT_S, Mailbox, run_core
from engine.core.messages import AddRequest, Command, CoreMessage, EngineInfo, EngineRequest, Outputs, Shutdown
from engine.sampling.params import SamplingParams
from tests.builders import lively_checkpoint


@contextmanager
def running(
    model: Path, socket: Path, token_s: float
) -> Iterator[tuple[Callable[[Command], None], Callable[[], CoreMessage]]]:
    """`send` and `receive` of a core whose steps are predicted to take `token_s` per token."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.set(zmq.LINGER, 0)
        peer.set(zmq.RCVTIMEO, 60_000)
        peer.bind(f"ipc://{socket}")
        mailbox = Mailbox(f"ipc://{socket}")
        core = EngineCore(EngineConfig(model=str(model), dtype="float32", num_blocks=16), mailbox.wake)
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
