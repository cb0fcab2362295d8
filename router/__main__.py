"""Composition root: `python -m router --model FOLDER --prefill host:port,… --decode host:port,… --listen 127.0.0.1:0`.

When it listens it writes one line, `ready address=host:port`, to standard output and to --ready-file. From then on it
answers calls; whether requests can be served is reported by the health service, which follows the pools.
"""

from __future__ import annotations

from serving.lifecycle import end_on_sigterm

end_on_sigterm()  # before imports that take seconds

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from engine.errors import EngineError, may_pass
from engine.text.tokenizer import missing_tokenizer
from router.app import RouterApp
from router.request.validation import ServedModel
from router.settings import RouterSection, RouterSettings
from router.workers import Workers, WorkersFailed
from serving import logging as structured_logging
from serving.lifecycle import (
    EXIT_CANNOT_START,
    EXIT_CUT_OFF,
    EXIT_FAILED,
    EXIT_STOPPED,
    announce_ready,
    bind_to_parent,
    freeze_heap,
    raise_open_files_limit,
    serve_until_stopped,
    stop_signals,
    watch_children_without_threads,
)
from serving.settings import SettingsError, settings_options
from serving.tracing import exporting_spans

_log = logging.getLogger(__name__)


@settings_options(RouterSettings)
def main(settings: RouterSettings) -> None:
    """Tandem's router: dispatches requests to a pool of prefill and a pool of decode instances."""
    _run(settings, _serve_workers if settings.router.workers > 1 else _serve)


def work() -> None:
    """One of several workers: its settings come on standard input, where it listens goes to standard output. All else
    that is printed, as by the module of a scorer, goes to standard error: the supervisor reads that one line alone."""
    supervisor = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _run(RouterSettings(**json.load(sys.stdin)), partial(_serve, supervisor=supervisor))


def _run(settings: RouterSettings, serve: Callable[[RouterSettings], Coroutine[Any, Any, bool]]) -> None:
    bind_to_parent()
    raise_open_files_limit()
    structured_logging.configure(settings.log)
    settings.log_ignored_variables()
    try:
        lost_nothing = asyncio.run(serve(settings))
    except (OSError, SettingsError) as error:
        _log.error("cannot start: %s", error)
        sys.exit(EXIT_FAILED if may_pass(error) else EXIT_CANNOT_START)
    except WorkersFailed as error:
        _log.error("%s", error)
        sys.exit(error.status)
    sys.exit(EXIT_STOPPED if lost_nothing else EXIT_CUT_OFF)


async def _serve(settings: RouterSettings, supervisor: TextIO | None = None) -> bool:
    """Runs a router, the worker of a `supervisor` or alone, until a signal stops it; returns whether no request was cut
    off."""
    with exporting_spans(settings.tracing, "tandem-router"), stop_signals() as signals:
        app = RouterApp(settings, _model(settings.router))
        await app.start()
        freeze_heap()
        if supervisor is not None:
            with supervisor:
                supervisor.write(json.dumps({"address": app.address, "metrics": app.metrics_address}) + "\n")
        else:
            _announce(settings.router, app.address)
        return await serve_until_stopped(app, signals)


async def _serve_workers(settings: RouterSettings) -> bool:
    """Runs the workers until a signal stops them; returns whether no request was cut off."""
    watch_children_without_threads()
    with stop_signals() as signals, closing(Workers(settings)) as workers:
        await workers.start()
        _announce(settings.router, workers.address)
        return await serve_until_stopped(workers, signals)


def _model(section: RouterSection) -> ServedModel:
    try:
        _check_folder(section.model)
        if problem := missing_tokenizer(Path(section.model)):
            _log.warning("requests must have token ids, no text and no chats: %s", problem)
        return ServedModel.from_folder(
            section.model,
            section.model_name,
            tool_call_parser=section.tool_call_parser,
            reasoning_parser=section.reasoning_parser,
        )
    except (EngineError, OSError, ValueError) as error:
        raise SettingsError(f"the model's folder: {error}") from error


def _check_folder(model: str) -> None:
    """Without the instances' tokenizer files the router would start, and use none of them. Raises ValueError."""
    folder = Path(model)
    if not model or not folder.is_dir() or not any(folder.iterdir()):
        raise ValueError(
            f"{model or '(empty)'} is not a folder with files in it; give the instances' checkpoint, or a copy without "
            "weights: --model FOLDER (router.model); if it is a mount, mount it first"
        )


def _announce(section: RouterSection, address: str) -> None:
    announce_ready(f"ready address={address}\n", section.ready_file)


if __name__ == "__main__":
    main()
