"""The process of an instance: composition root of both roles. A role's `__main__` calls `run_instance`."""

from __future__ import annotations

import asyncio
import logging

from engine.errors import EngineError
from instance.config import InstanceSettings
from instance.server import InstanceServer, Role
from serving import logging as serving_logging
from serving.lifecycle import (
    EXIT_CANNOT_START,
    EXIT_CUT_OFF,
    EXIT_FAILED,
    EXIT_STOPPED,
    StopSignals,
    announce_ready,
    bind_to_parent,
    freeze_heap,
    raise_open_files_limit,
    serve_until_stopped,
    stop_signals,
)
from serving.settings import SettingsError
from serving.tracing import exporting_spans

_log = logging.getLogger(__name__)


def run_instance(settings: InstanceSettings, role: Role) -> int:
    """Serves until a stop signal or the core's death; returns the exit status."""
    bind_to_parent()
    raise_open_files_limit()
    serving_logging.configure(settings.log)
    try:
        with exporting_spans(settings.tracing, f"tandem-{role.name}"):
            return asyncio.run(_run(settings, role))
    except (EngineError, OSError, SettingsError) as error:
        _log.error("cannot start: %s", error)
        return EXIT_CANNOT_START


async def _run(settings: InstanceSettings, role: Role) -> int:
    if not (settings.model.folder / "config.json").is_file():
        raise SettingsError(f"model.folder: {settings.model.folder} has no config.json")
    with stop_signals() as signals:
        starting = asyncio.ensure_future(InstanceServer.start(settings, role, signals))
        stopped = asyncio.ensure_future(signals.drain.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return EXIT_STOPPED  # stopped while the model was loading
            server = starting.result()
        finally:
            stopped.cancel()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        freeze_heap()
        line = f"ready address={server.address} instance={server.instance_id}\n"
        announce_ready(line, settings.instance.ready_file)
        return await serve(server, signals)


async def serve(server: InstanceServer, signals: StopSignals) -> int:
    """Waits for a stop signal or the core's death, stops the server and returns the exit status."""
    stopped = asyncio.ensure_future(serve_until_stopped(server, signals))
    dead = asyncio.ensure_future(server.wait_dead())
    try:
        await asyncio.wait({stopped, dead}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return EXIT_STOPPED if stopped.result() else EXIT_CUT_OFF
        _log.error("the engine core is dead: %s", dead.result())
        await server.stop()
        return EXIT_FAILED
    finally:
        for task in (stopped, dead):
            task.cancel()
        await asyncio.gather(stopped, dead, return_exceptions=True)
