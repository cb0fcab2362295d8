"""`python -m engine.executor.process FD`: the process of one rank other than the core's.

    Start ─▶ model loaded ─▶ Ready ─▶ AllocateKV ─▶ (Step ─▶ Logits …) … ─▶ the pipe ends: exit

FD is this end of the pipe to the core's process, which ends with it, whatever killed it. A rank that waits for others
in the middle of a step notices it by its sockets to them, and one that hangs gets the kernel's death signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec

from engine.config import EngineConfig
from engine.errors import CapacityError, EngineError, may_pass, start_problem, to_install
from engine.machine import place_process, set_up_process, start_up_heap

_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a rank. Numbers of descriptors are those of its process."""

    config: EngineConfig
    rank: int
    peer_fds: dict[int, int]
    """Socket to every other tensor rank of its stage."""
    before_fd: int | None
    """Socket to the same tensor rank of the stage before."""
    after_fd: int | None
    slots_fd: int
    """Memory of the exchanges of all stages."""
    kv_fd: int
    groups_fd: int | None
    """The file in which the groups of torch.distributed meet; None: the ranks share memory."""
    parent_pid: int | None
    """None: the parent's thread may end before the parent."""


class Ready(msgspec.Struct, frozen=True):
    """The answer once the model is loaded and once its KV memory is allocated, or why it is not. Later: why the rank
    ends."""

    error: str | None = None
    may_pass: bool = False
    """Of a rank that could not load: whether another start may succeed."""


def main() -> None:
    """Serve until the core's process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the core ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    start = msgspec.msgpack.decode(pipe.recv_bytes(), type=Start)
    if start.parent_pid is not None:
        _die_with(start.parent_pid)
    set_up_process(start.config)
    with start_up_heap():
        try:
            place_process(start.config, start.rank)
            from engine.executor.executor import explained_out_of_memory
            from engine.executor.step import Message
            from engine.executor.worker import Worker
            from engine.ranks import RankLost

            worker = Worker(start)
        except (EngineError, ImportError, OSError) as error:
            _answer(pipe, Ready(start_problem(error, to_install()), may_pass(error)))
            return
    _answer(pipe, Ready())
    decoder = msgspec.msgpack.Decoder(Message)
    try:
        with explained_out_of_memory():
            worker.handle(decoder.decode(pipe.recv_bytes()))  # AllocateKV
            _answer(pipe, Ready())
            while True:
                worker.handle(decoder.decode(pipe.recv_bytes()))
    except CapacityError as error:
        _answer(pipe, Ready(str(error)))
    except (EOFError, ConnectionError, RankLost):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # finalising torch takes most of a second


def _answer(pipe: Connection, ready: Ready) -> None:
    with contextlib.suppress(ConnectionError):  # the core has ended: nothing reads the answer
        pipe.send_bytes(msgspec.msgpack.encode(ready))


def _die_with(parent_pid: int) -> None:
    """Requests SIGKILL from the kernel when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


if __name__ == "__main__":
    main()
