"""`tandem bench transfer`: the speed of KV transfers, by connector."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import to_install
from tandem.commands.options import (
    Choice,
    IntRange,
    OutputFile,
    echo_or_drop,
    given_options,
    interruptible,
    is_terminal,
    kv_options,
    write_errors,
)
from tandem.connectors import CONNECTORS, ConnectorChoice, Options

if TYPE_CHECKING:
    from tandem.bench.transfer.measure import Result

_MULTIPLE_OF = 64


@click.command("transfer", short_help="The speed of KV transfers, by connector.")
@click.option(
    "--connector", "connectors", multiple=True, metavar="NAME",
    help=f"One of {', '.join(CONNECTORS)}, or module:Class; may be given several times.  [default: all installed ones]",
)  # fmt: skip
@click.option(
    "--blocks", "block_counts", type=IntRange(1, 65536), multiple=True, default=[64], show_default=True,
    help="Blocks moved at once; may be given several times.",
)  # fmt: skip
@click.option(
    "--block-bytes", "block_sizes", type=IntRange(64, 1 << 30), multiple=True, default=[1_843_200], show_default=True,
    help="Size of a block, a multiple of 64; may be given several times.",
)  # fmt: skip
@click.option(
    "--digest", type=Choice(["both", "on", "off"]), default="both", show_default=True,
    help="Whether pages carry a keyed BLAKE3 digest that the reader verifies. Not for module:Class.",
)  # fmt: skip
@click.option(
    "--tls", "transports", multiple=True, metavar="UCX_TLS", default=["auto", "tcp"], show_default=True,
    help="Transports for nixl; auto is UCX's own choice. May be given several times.",
)  # fmt: skip
@click.option("--rounds", type=IntRange(1, 1000), default=9, show_default=True, help="Measured rounds.")
@click.option(
    "--kv-url", metavar="URL",
    help="Server of redis: redis://host:port/0; absent: a private one. Of lmcache: tcp://host:port; absent: on disk.",
)  # fmt: skip
@click.option(
    "--kv-folder", type=click.Path(path_type=Path), help="Folder for shared_storage and lmcache.  [default: /dev/shm]"
)
@kv_options
@click.option("--json", "json_file", type=OutputFile(), help="Also write all figures there.")
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
    """Measure the transfer of KV blocks between two processes, by connector, next to the raw speed of the medium.

    One process offers blocks and this one reads them: through the connector without digests, with them, and raw, by the
    plainest loop that the medium allows (read the files, GET on one connection, a bare nixl read). The ways alternate
    within each round and every byte is compared: load on the machine lowers GB/s, but hardly the shares of raw. All
    files, keys and processes are removed; Ctrl-C ends it at once, and --json gets what was measured.

    \b
    Examples:
      tandem bench transfer                                       every installed connector, about a minute
      tandem bench transfer --connector nixl --tls tcp
      tandem bench transfer --connector redis --kv-url redis://10.0.0.7:6379/0
      tandem bench transfer --connector shared_storage --kv-folder /mnt/shared
      tandem bench transfer --blocks 1 --blocks 16 --blocks 256 --json transfer.json
      tandem bench transfer --kv-options '{num_io_threads: 4}'    an option of the connector's class
    """
    for size in block_sizes:
        if size % _MULTIPLE_OF:
            raise click.UsageError(
                f"--block-bytes {size} is not a multiple of {_MULTIPLE_OF}; {size - size % _MULTIPLE_OF} is"
            )
    try:
        choices = [_choice(name, named=bool(connectors), **connection) for name in connectors or CONNECTORS]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _check_digest(choices)
    subjects = [
        (choice, "" if tls == "auto" else tls, num_blocks, block_bytes)
        for choice in choices
        if _is_installed(choice)
        for tls in (transports if choice.name == "nixl" else ("",))
        for block_bytes in block_sizes
        for num_blocks in block_counts
    ]
    results: list[Result] = []
    try:
        with interruptible() as check_interrupted:
            _measure_all(subjects, ["off", "on"] if digest == "both" else [digest], rounds, results, check_interrupted)
    finally:
        if json_file is not None and results:
            from tandem.bench.transfer.measure import write_json

            with write_errors():
                write_json(json_file, results, is_partial=len(results) < len(subjects))
            echo_or_drop(f"written: {json_file}")
    if not results or len(results) < len(subjects):
        raise click.exceptions.Exit(1)


def _choice(name: str, *, named: bool, kv_url: str | None, kv_folder: Path | None, options: Options) -> ConnectorChoice:
    """Raises ValueError. Unless connectors are named, URL and folder go to those that have one."""
    if "digest" in options and name in CONNECTORS:
        raise ValueError("give digest by --digest, not in --kv-options")
    if not named:
        kv_url = kv_url if name == "redis" else None
        kv_folder = kv_folder if name in ("shared_storage", "lmcache") else None
    return ConnectorChoice(name, kv_url, kv_folder, options)


def _check_digest(choices: Sequence[ConnectorChoice]) -> None:
    """Raises UsageError where --digest is given for a connector that this command cannot set it for."""
    own = [choice.name for choice in choices if choice.name not in CONNECTORS]
    if own and "digest" in [option.name for option in given_options(click.get_current_context())]:
        raise click.UsageError(
            f"--digest is for {', '.join(CONNECTORS)}; if {own[0]} has such an option, give it in --kv-options"
        )


def _is_installed(choice: ConnectorChoice) -> bool:
    """Whether the connector can be measured; if not, prints what to install."""
    if choice.name == "nixl" and importlib.util.find_spec("nixl") is None:
        click.echo(f"nixl: skipped, not installed: {to_install('nixl')}")
        return False
    if choice.name == "redis" and choice.kv_url is None:
        from tandem.bench.transfer.media import INSTALL_REDIS, installed_redis

        if installed_redis() is None:
            click.echo(f"redis: skipped, no redis-server is installed: {INSTALL_REDIS}")
            return False
    return True


def _measure_all(
    subjects: Sequence[tuple[ConnectorChoice, str, int, int]],
    digests: Sequence[str],
    num_rounds: int,
    results: list[Result],
    check_interrupted: Callable[[], None],
) -> None:
    """Adds the results of those that do not fail to `results`, and prints each table, as soon as it is measured.

    A subject is a connector, UCX_TLS, a number of blocks and the bytes of each. `check_interrupted` is called before
    each round, as `interruptible` gives it.
    """
    from engine.errors import EngineError
    from kv_transfer.stores.base import StoreError
    from tandem.bench.transfer.endpoint import Shape, TransferFailed, described
    from tandem.bench.transfer.measure import LEGEND, measure, table
    from tandem.bench.transfer.media import medium_of

    for choice, tls, num_blocks, block_bytes in subjects:
        medium = medium_of(choice, tls=tls)
        progress = _ProgressLine(medium.name, check_interrupted)
        try:
            shape = Shape(num_blocks, block_bytes)
            result = measure(medium, shape, digests=digests, num_rounds=num_rounds, progress=progress.show)
        except Exception as error:  # the connector may be the user's own
            progress.clear()
            is_known = isinstance(error, EngineError | StoreError | TransferFailed | OSError)
            problem = str(error) if is_known else described(error)
            click.echo(choice.one_line(f"{medium.name}: failed: {problem}") + "; run tandem doctor for details\n")
            continue
        progress.clear()
        results.append(result)
        click.echo(choice.redacted("\n".join(table(result))) + "\n")
    if results:
        click.echo(LEGEND)


class _ProgressLine:
    """One line on standard error that changes; off a terminal, one line for each measurement."""

    def __init__(self, name: str, check_interrupted: Callable[[], None]) -> None:
        self._name = name
        self._check_interrupted = check_interrupted
        self._is_live = is_terminal(sys.stderr)
        if not self._is_live:
            click.echo(f"measuring {name} …", err=True)

    def show(self, text: str) -> None:
        """Raises KeyboardInterrupt instead if one was lost."""
        self._check_interrupted()
        if self._is_live:
            click.echo(f"\r\033[K{self._name}: {text} …", nl=False, err=True)

    def clear(self) -> None:
        if self._is_live:
            click.echo("\r\033[K", nl=False, err=True)
