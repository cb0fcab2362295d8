"""The flag --kv-options, which commands share: further options of a connector's class, as the services take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Options = dict[str, str | int | float | bool]
C = TypeVar("C", bound=Callable[..., Any])


def kv_options(command: C) -> C:
    """Adds --kv-options, which the command gets as `options`."""
    return click.option(
        "--kv-options",
        "options",
        metavar="YAML",
        default="{}",
        callback=lambda context, option, value: _parsed(value),
        help="Options of the connector's class: '{num_io_threads: 4}'.",
    )(command)


def _parsed(text: str) -> Options:
    import yaml

    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError:
        options = None
    if not isinstance(options, dict) or not all(
        isinstance(value, str | int | float | bool) for value in options.values()
    ):
        raise click.BadParameter("a map in YAML is expected: '{num_io_threads: 4, digest: false}'")
    return {str(name): value for name, value in options.items()}
