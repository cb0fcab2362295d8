"""The process of an instance: composition root of both roles. `run_instance` is all that a role's `__main__` calls."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from engine.errors import EngineError
from instance.config import InstanceSettings
from instance.front import Front, Role
from serving import logging as serving_logging
from serving.lifetime import (
    EXIT_CANNOT_START,
    EXIT_CUT_OFF,
    EXIT_FAILED,
    EXIT_STOPPED,
    StopSignals,
    allow_open_files,
    bind_to_parent,
    leave_in_memory,
    serve_until_stopped,
    stop_signals,
)
from serving.settings import SettingsError
from serving.trace_export import exported

_log = logging.getLogger(__name__)


def run_instance(settings: InstanceSettings, role: Role) -> int:
    """Serves until told to stop or the core dies; returns the exit status."""
    bind_to_parent()
    allow_open_files()
    serving_logging.configure(settings.log)
    try:
        with exported(settings.tracing, f"tandem-{role.name}"):
            return asyncio.run(_run(settings, role))
    except (EngineError, OSError, SettingsError) as error:
        _log.error("cannot start: %s", error)
        return EXIT_CANNOT_START


async def _run(settings: InstanceSettings, role: Role) -> int:
    if not (settings.model.folder / "config.json").is_file():
        raise SettingsError(f"model.folder: {settings.model.folder} has no config.json")
    with stop_signals() as signals:
        starting = asyncio.ensure_future(Front.start(settings, role, signals))
        stopped = asyncio.ensure_future(signals.drain.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return EXIT_STOPPED  # told to stop while the model was loading
            front = starting.result()
        finally:
            stopped.cancel()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        leave_in_memory()
        announce(front, settings.instance.ready_file)
        return await serve(front, signals)


async def serve(front: Front, signals: StopSignals) -> int:
    """Waits for the end of `front`, whichever comes first, and brings it about; returns the exit status."""
    stopped = asyncio.ensure_future(serve_until_stopped(front, signals))
    dead = asyncio.ensure_future(front.wait_dead())
    try:
        await asyncio.wait({stopped, dead}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return EXIT_STOPPED if stopped.result() else EXIT_CUT_OFF
        _log.error("the engine core is dead: %s", dead.result())
        await front.stop()
        return EXIT_FAILED
    finally:
        for task in (stopped, dead):
            task.cancel()
        await asyncio.gather(stopped, dead, return_exceptions=True)


def announce(front: Front, ready_file: Path | None) -> None:
    """One line on standard output, and the same in `ready_file`, which appears whole or not at all."""
    line = f"ready address={front.server.address} instance={front.instance_id}\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if ready_file is not None:
        temporary = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
        temporary.write_text(line)
        temporary.replace(ready_file)
