"""`python -m engine.core_process ADDRESS`: an engine core in a process of its own.

The configuration comes as one msgpack message on standard input, which then stays open for as long as the front lives:
its end is how the core notices the front's death, whatever killed it, and ends too. The front notices the core's death
by waiting for it.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineError


def main() -> None:
    """Run until told to shut down or the front is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address = sys.argv[1]
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=EngineConfig)
    threading.Thread(target=_end_with_front, args=(address,), daemon=True, name="front-watch").start()
    _run(config, address)


def _run(config: EngineConfig, address: str) -> None:
    if config.process_setup:
        module_name, _, function_name = config.process_setup.partition(":")
        getattr(importlib.import_module(module_name), function_name)(**config.process_setup_options)
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    from engine.threads import set_num_threads  # torch comes with it: after the pinning, so that its pools see it

    set_num_threads(config.num_threads)
    from engine.core import EngineCore
    from engine.core_loop import ZmqMailbox, run_core

    mailbox = ZmqMailbox(address)
    try:
        core = EngineCore(config, mailbox.wake)
    except (EngineError, OSError) as error:
        sys.exit(f"engine core: {error}")  # what a person can mend; anything else is ours and shows where
    gc.collect()
    gc.freeze()  # torch and the model stay: the garbage collector would look through them while a step waits
    run_core(core, mailbox)
    mailbox.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all I/O has ended. To take torch apart costs most of a second of work, on a busy machine many seconds


def _end_with_front(address: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
