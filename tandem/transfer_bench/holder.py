"""The lending process, and the object by which the reading one has it.

    started ─"ready"─▶ idle ─{"run", "num_blocks"}─▶ lends ─{"events", "seconds"}─▶ idle ─end of input─▶ gone

It speaks in lines of JSON that begin with `_MARK`, since libraries print to standard output as well. It ends with its
parent, however that ends, and has a process group of its own, so that Ctrl-C ends the parent alone, which then ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.messages import TransferEvent
from serving.lifetime import ParentBond
from tandem.transfer_bench.half import Half, Shape, TransferFailed, as_bytes

_MARK = "@tandem-bench "
_PROGRAM = """
from serving.lifetime import bind_to_parent
bind_to_parent()  # before the imports below, which take seconds
from tandem.transfer_bench.holder import main
main()
"""


class Holder:
    """Owns one lending process. `wait_ready` comes first; the process starts at once, so that several start together.

    Raises TransferFailed, with what the process said.
    """

    def __init__(
        self, shape: Shape, config: KVConnectorConfig, fingerprint: bytes, *, seed: int, folder: Path | None = None
    ) -> None:
        """`folder` is for what libraries put into temporary files: they have no time to remove any."""
        self._bond = ParentBond()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **self._bond.environment(), **({} if folder is None else {"TMPDIR": str(folder)})},
            pass_fds=self._bond.pass_fds,
            process_group=0,
        )
        connector = {"class_path": config.class_path, "options": config.options}
        sizes = {"num_blocks": shape.num_blocks, "block_bytes": shape.block_bytes}
        self._send({**connector, **sizes, "fingerprint": fingerprint.hex(), "seed": seed})

    def wait_ready(self) -> None:
        """Returns when its connector is there and its blocks are filled."""
        self._receive()

    def lend(self, run: int, num_blocks: int) -> tuple[list[TransferEvent], float]:
        """See Half.lend."""
        self._send({"run": run, "num_blocks": num_blocks})
        answer = self._receive()
        return msgspec.msgpack.decode(bytes.fromhex(answer["events"]), type=list[TransferEvent]), answer["seconds"]

    def close(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue
        self._bond.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TransferFailed("the lending process has ended") from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                if "failed" in answer:
                    raise TransferFailed(answer["failed"])
                return answer
        raise TransferFailed(f"the lending process has ended with status {self._process.wait()}")


def serve(commands: TextIO, answers: TextIO) -> None:
    """The process's life."""

    def answer(**fields: object) -> None:
        answers.write(_MARK + json.dumps(fields) + "\n")
        answers.flush()

    try:
        told = json.loads(commands.readline())
        shape = Shape(told["num_blocks"], told["block_bytes"])
        config = KVConnectorConfig(class_path=told["class_path"], options=told["options"])
        kv = shape.memory()
        as_bytes(kv).copy_(shape.content(told["seed"]))
        half = Half(shape, config, bytes.fromhex(told["fingerprint"]), kv)
        answer(ready=True)
        for line in commands:
            command = json.loads(line)
            events, seconds = half.lend(command["run"], command["num_blocks"])
            answer(events=msgspec.msgpack.encode(events).hex(), seconds=seconds)
    except (EngineError, TransferFailed) as error:
        answer(failed=str(error))
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {error}")


def main() -> None:
    """Until the input ends."""
    serve(sys.stdin, sys.stdout)
    os._exit(0)  # nobody waits for what libraries do at the end
