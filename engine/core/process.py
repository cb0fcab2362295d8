"""`python -m engine.core.process ADDRESS`: an engine core in a separate process.

The configuration is one msgpack message on standard input, which stays open while the parent lives: its end tells the
core that the parent is dead, whatever killed it, and the core exits. The parent notices the core's death by waiting for
the process. Exit status 2: settings, model or installation are wrong, and the same start fails again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineError, start_problem, start_status, to_install
from engine.machine import place_process, set_up_process, start_up_heap


def main() -> None:
    """Run until `Shutdown` or the parent's death."""
    config, address = begin()
    _run(config, address)


def begin() -> tuple[EngineConfig, str]:
    """What every engine's process does first: return its configuration and the address of its parent's socket. From
    now on it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent shuts the core down
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address = sys.argv[1]
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=EngineConfig)
    threading.Thread(target=_exit_with_parent, args=(address,), daemon=True, name="parent-watch").start()
    set_up_process(config)
    return config, address


def _run(config: EngineConfig, address: str) -> None:
    with start_up_heap():
        try:
            place_process(config, config.parallelism.core_rank)  # before the rest imports torch, for its thread pools
            from engine.core.core import EngineCore
            from engine.core.loop import Mailbox, run_core
            from engine.ranks import RankLost

            mailbox = Mailbox(address)
            core = EngineCore(config, mailbox.wake)
        except (EngineError, ImportError, OSError) as error:  # a bug keeps its traceback, and has status 1
            sys.stderr.write(f"engine core: {start_problem(error, to_install())}\n")
            sys.exit(start_status(error))
    status = 1
    try:
        run_core(core, mailbox)
        status = 0
    except RankLost as error:
        sys.stderr.write(f"engine core: {error}\n")
    except BaseException:  # not to the interpreter: its end would wait for queued grammars
        traceback.print_exc()
    mailbox.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all I/O has ended; finalising torch takes most of a second, on a busy machine many


def _exit_with_parent(address: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
