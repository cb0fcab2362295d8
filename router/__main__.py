"""Composition root: `python -m router --model FOLDER --prefill host:port,… --decode host:port,… --listen 127.0.0.1:0`.

When it listens it writes one line, `ready address=host:port`, to standard output and to --ready-file. From then on it
answers calls; whether requests can be served is reported by the health service, which follows the pools.
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
from router.request.validation import ServedModel
from serving import logging as structured_logging
from serving.lifecycle import (
    EXIT_CANNOT_START,
    EXIT_CUT_OFF,
    EXIT_STOPPED,
    announce_ready,
    bind_to_parent,
    freeze_heap,
    raise_open_files_limit,
    serve_until_stopped,
    stop_signals,
)
from serving.settings import SettingsError, settings_options
from serving.tracing import exporting_spans

_log = logging.getLogger(__name__)


@settings_options(RouterSettings)
def main(settings: RouterSettings) -> None:
    """Tandem's router: dispatches requests to a pool of prefill and a pool of decode instances."""
    bind_to_parent()
    raise_open_files_limit()
    structured_logging.configure(settings.log)
    try:
        model = ServedModel.from_folder(
            settings.router.model,
            settings.router.model_name,
            tool_call_parser=settings.router.tool_call_parser,
            reasoning_parser=settings.router.reasoning_parser,
        )
    except (UnsupportedModel, OSError, ValueError) as error:
        _cannot_start(f"the model's folder: {error}")
    try:
        with exporting_spans(settings.tracing, "tandem-router"):
            lost_nothing = asyncio.run(serve(settings, model))
    except (OSError, SettingsError) as error:
        _cannot_start(str(error))
    sys.exit(EXIT_STOPPED if lost_nothing else EXIT_CUT_OFF)


async def serve(settings: RouterSettings, model: ServedModel) -> bool:
    """Runs a router until a signal stops it; returns whether no request was cut off."""
    app = RouterApp(settings, model)
    with stop_signals() as signals:
        await app.start()
        freeze_heap()
        ready_file = settings.router.ready_file
        announce_ready(f"ready address={app.address}\n", Path(ready_file) if ready_file is not None else None)
        return await serve_until_stopped(app, signals)


def _cannot_start(why: str) -> NoReturn:
    _log.error("cannot start: %s", why)
    sys.exit(EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
