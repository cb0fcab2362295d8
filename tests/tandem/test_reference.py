"""docs/cli.md and docs/python.md: what the commands and the client say now, and all of it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import tandem
from tandem import AsyncClient, Client
from tandem.cli import main as cli
from tandem.client.request import RequestOptions
from tools import reference

CLI, PYTHON = ((reference.DOCS / name).read_text() for name in ("cli.md", "python.md"))


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_current(name: str) -> None:
    assert (reference.DOCS / name).read_text() == reference.PAGES[name](), "run `make docs`"


def commands(command: click.Command, path: str = "tandem") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, f"{path} {name}")


def test_every_command_and_option_is_on_the_page() -> None:
    for path, command in commands(cli):
        _, found, section = CLI.partition(f"\n## {path}\n")
        assert found, path
        rows = re.findall(r"^\| `(--[\w-]+)", section.partition("\n## ")[0], re.MULTILINE)
        assert rows == [one.opts[0] for one in command.params if isinstance(one, click.Option)]


def test_every_public_class_and_option_is_on_the_page() -> None:
    assert re.findall(r"^## (\w+)$", PYTHON, re.MULTILINE) == sorted(tandem.__all__)
    options = PYTHON.partition("## Options of a request\n")[2]
    assert re.findall(r"^\| `(\w+): [^`]+` \| \S", options, re.MULTILINE) == list(RequestOptions.__annotations__)


@pytest.mark.parametrize("method", [Client.generate, Client.stream, AsyncClient.generate, AsyncClient.stream])
def test_the_clients_methods_have_their_options_as_parameters(method: object) -> None:
    parameters = inspect.signature(method).parameters  # type: ignore[arg-type]
    assert list(parameters) == ["self", "prompt", *RequestOptions.__annotations__]
    assert parameters["temperature"].annotation == "float | None"
    assert parameters["timeout_s"].default is None


def test_a_stale_page_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    reference.main()
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    with pytest.raises(SystemExit, match="make docs"):
        reference.main()
    monkeypatch.setattr(sys, "argv", ["reference"])
    reference.main()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"cli.md": CLI, "python.md": PYTHON}
