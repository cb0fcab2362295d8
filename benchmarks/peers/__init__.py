"""Comparisons with vLLM, and the options that they share."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.shapes import SHAPES


def _existing(context: click.Context, option: click.Parameter, python: Path) -> Path:
    del context, option
    if not python.is_file():
        raise click.BadParameter(f"{python} is no file. `make test-vllm` makes .venv-vllm, or give your own's Python.")
    return python


vllm_python_option = click.option(
    "--vllm-python",
    type=click.Path(path_type=Path),
    default=Path(".venv-vllm/bin/python"),
    show_default=True,
    callback=_existing,
    help="Python of the environment that has vLLM.",
)
shapes_option = click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), default=list(SHAPES), show_default=True
)
