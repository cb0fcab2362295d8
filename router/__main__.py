"""Composition root: `python -m router --model FOLDER --prefill host:port,… --decode host:port,… --listen 127.0.0.1:0`.

When it listens it writes one line, `ready address=host:port`, to standard output and to --ready-file. That says that
calls are answered; whether requests can be served is for the health service, which follows the pools.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import NoReturn

from engine.errors import UnsupportedModel
from router.app import RouterApp
from router.config import RouterSettings
from router.model import ServedModel
from serving import logging as structured_logging
from serving.lifetime import (
    EXIT_CANNOT_START,
    EXIT_CUT_OFF,
    EXIT_STOPPED,
    allow_open_files,
    bind_to_parent,
    leave_in_memory,
    serve_until_stopped,
    stop_signals,
)
from serving.settings import SettingsError, settings_options
from serving.trace_export import exported

_log = logging.getLogger(__name__)


@settings_options(RouterSettings)
def main(settings: RouterSettings) -> None:
    """Tandem's router: the front door to a pool of prefill and a pool of decode instances."""
    bind_to_parent()
    allow_open_files()
    structured_logging.configure(settings.log)
    try:
        model = ServedModel.from_folder(settings.router.model, settings.router.model_name)
    except (UnsupportedModel, OSError, ValueError) as error:
        _cannot_start(f"the model's folder: {error}")
    try:
        with exported(settings.tracing, "tandem-router"):
            lost_nothing = asyncio.run(serve(settings, model))
    except (OSError, SettingsError) as error:
        _cannot_start(str(error))
    sys.exit(EXIT_STOPPED if lost_nothing else EXIT_CUT_OFF)


async def serve(settings: RouterSettings, model: ServedModel) -> bool:
    """Runs a router until a signal ends it; returns whether no request was cut off."""
    app = RouterApp(settings, model)
    with stop_signals() as signals:
        await app.start()
        leave_in_memory()
        line = f"ready address={app.address}\n"
        if settings.router.ready_file is not None:
            _write_whole(Path(settings.router.ready_file), line)
        sys.stdout.write(line)
        sys.stdout.flush()
        return await serve_until_stopped(app, signals)


def _cannot_start(why: str) -> NoReturn:
    _log.error("cannot start: %s", why)
    sys.exit(EXIT_CANNOT_START)


def _write_whole(path: Path, text: str) -> None:
    """Whoever polls for the file never sees half of it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
