"""`tandem bench transfer`: how fast KV blocks move, by connector."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from tandem.stack_settings import CONNECTORS
from tandem.transfer_bench import private_redis
from tandem.transfer_bench.choice import ConnectorChoice, medium_of
from tandem.transfer_bench.options import Options, kv_options

if TYPE_CHECKING:
    from tandem.transfer_bench.measure import Result

_MULTIPLE_OF = 64
_NEEDS = {
    "nixl": ("nixl", "pip install '.[nixl]'"),
    "lmcache": ("lmcache", "pip install '.[lmcache]'"),
}


@click.command("transfer", short_help="How fast KV blocks move, by connector.")
@click.option(
    "--connector",
    "connectors",
    multiple=True,
    metavar="NAME",
    help=f"One of {', '.join(CONNECTORS)}, or module:Class; may be given several times.  [default: all that are here]",
)
@click.option(
    "--blocks",
    "block_counts",
    type=click.IntRange(1, 65536),
    multiple=True,
    default=[64],
    show_default=True,
    help="Blocks moved at once; may be given several times.",
)
@click.option(
    "--block-bytes",
    "block_sizes",
    type=click.IntRange(64, 1 << 30),
    multiple=True,
    default=[1_843_200],
    show_default=True,
    help="Size of a block, a multiple of 64; may be given several times.",
)
@click.option(
    "--digest",
    type=click.Choice(["both", "on", "off"]),
    default="both",
    show_default=True,
    help="Whether pages carry a keyed BLAKE3 digest, which the reader checks.",
)
@click.option(
    "--tls",
    "transports",
    multiple=True,
    metavar="UCX_TLS",
    default=["auto", "tcp"],
    show_default=True,
    help="Transports for nixl; auto is UCX's own choice. May be given several times.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=9, show_default=True, help="Measured rounds.")
@click.option("--kv-url", metavar="URL", help="Redis to use: redis://host:port/0.  [default: a private one]")
@click.option("--kv-folder", type=click.Path(path_type=Path), help="Folder for shared_storage.  [default: /dev/shm]")
@kv_options
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Also write every figure there.",
)
def command(
    *,
    connectors: tuple[str, ...],
    block_counts: tuple[int, ...],
    block_sizes: tuple[int, ...],
    digest: str,
    transports: tuple[str, ...],
    rounds: int,
    json_file: Path | None,
    **connection: Any,
) -> None:
    """How fast KV blocks move from one process to another, by connector, next to what the medium itself gives.

    One process lends blocks and this one reads them: through the connector without digests, with them, and raw, by the
    plainest loop that the medium allows (read the files, GET on one connection, a bare nixl read). The ways take turns
    within each round and every byte is compared, so on a busy machine GB/s suffer and shares of raw hardly do. Nothing
    is left behind: no file, no key, no process; Ctrl-C ends it at once.

    \b
    Examples:
      tandem bench transfer                                       everything that is installed, about a minute
      tandem bench transfer --connector nixl --tls tcp
      tandem bench transfer --connector redis --kv-url redis://10.0.0.7:6379/0
      tandem bench transfer --connector shared_storage --kv-folder /mnt/shared
      tandem bench transfer --blocks 1 --blocks 16 --blocks 256 --json transfer.json
      tandem bench transfer --kv-options '{num_io_threads: 4}'    an option of the connector's class
    """
    for size in block_sizes:
        if size % _MULTIPLE_OF:
            raise click.UsageError(f"--block-bytes {size} is no multiple of {_MULTIPLE_OF}; {size - size % 64} is one")
    names = connectors or tuple(CONNECTORS)
    try:
        choices = [_choice(name, is_chosen=bool(connectors), **connection) for name in names]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    plan = _Plan(
        [choice for choice in choices if choice is not None],
        transports,
        [(count, size) for size in block_sizes for count in block_counts],
        ["off", "on"] if digest == "both" else [digest],
        rounds,
    )
    with _interruptible():
        results, num_failed = _measure_all(plan)
    if json_file is not None and results:
        from tandem.transfer_bench.report import write_json

        write_json(json_file, results)
        click.echo(f"written: {json_file}")
    if num_failed or not results:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is measured."""

    choices: list[ConnectorChoice]
    transports: tuple[str, ...]
    sizes: list[tuple[int, int]]
    """(blocks, bytes of each)"""
    digests: list[str]
    num_rounds: int

    def runs(self) -> Iterator[tuple[ConnectorChoice, str, int, int]]:
        """In the order of the report."""
        for choice in self.choices:
            for tls in self.transports if choice.name == "nixl" else ("",):
                for num_blocks, block_bytes in self.sizes:
                    yield choice, "" if tls == "auto" else tls, num_blocks, block_bytes


def _choice(
    name: str, *, is_chosen: bool, kv_url: str | None, kv_folder: Path | None, options: Options
) -> ConnectorChoice | None:
    """None: it is not here, which was said. Of all connectors, only the one that has a setting is given it."""
    if not is_chosen:
        kv_url = kv_url if name == "redis" else None
        kv_folder = kv_folder if name == "shared_storage" else None
    choice = ConnectorChoice(name, kv_url, kv_folder, options)
    module, install = _NEEDS.get(name, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        click.echo(f"{name}: skipped, it is not installed: {install}")
        return None
    if name == "redis" and kv_url is None and private_redis.installed() is None:
        click.echo(f"redis: skipped, there is no redis-server here: {private_redis.INSTALL}")
        return None
    return choice


def _measure_all(plan: _Plan) -> tuple[list[Result], int]:
    """Print each table when it is there. Returns the results and how many measurements failed."""
    from engine.errors import EngineError
    from kv_transfer.store import StoreError
    from tandem.transfer_bench.half import Shape, TransferFailed
    from tandem.transfer_bench.measure import measure
    from tandem.transfer_bench.report import LEGEND, table

    results: list[Result] = []
    num_failed = 0
    for choice, tls, num_blocks, block_bytes in plan.runs():
        medium = medium_of(choice, tls=tls)
        progress = _Progress(medium.name)
        try:
            shape = Shape(num_blocks, block_bytes)
            result = measure(medium, shape, digests=plan.digests, num_rounds=plan.num_rounds, say=progress.say)
        except (EngineError, StoreError, TransferFailed, OSError) as error:
            progress.end()
            num_failed += 1
            click.echo(choice.redacted(f"{medium.name}: failed: {error}") + "; tandem doctor says more\n")
            continue
        progress.end()
        results.append(result)
        click.echo(choice.redacted("\n".join(table(result))) + "\n")
    if results:
        click.echo(LEGEND)
    return results, num_failed


class _Progress:
    """One line on standard error that changes; off a terminal, one line for each thing that is measured."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_live = sys.stderr.isatty()
        if not self._is_live:
            click.echo(f"measuring {name} …", err=True)

    def say(self, what: str) -> None:
        if self._is_live:
            click.echo(f"\r\033[K{self._name}: {what} …", nl=False, err=True)

    def end(self) -> None:
        if self._is_live:
            click.echo("\r\033[K", nl=False, err=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first Ctrl-C, or its like, ends what runs; a second one must not interrupt the clearing up."""

    def on_signal(signum: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        click.echo("\nstopped; nothing is left behind", err=True)
        raise SystemExit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
