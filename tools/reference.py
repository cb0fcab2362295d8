"""docs/cli.md from the commands, docs/python.md from the Python client: `make docs` writes, `make check` compares."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import click

import tandem
from protos.reference import comments_of
from tandem.cli import main as cli
from tandem.client.request import RequestOptions

DOCS = Path(__file__).parent.parent / "docs"
_CLI_HEAD = """# Command line

Written by `make docs` from the commands' own help (`tandem COMMAND --help`). `python -m tandem` is the same command.
The services have their own: `python -m router --help`, and so for `prefill_service` and `decode_service`.
"""
_PYTHON_HEAD = """# Python client

Written by `make docs` from the package `tandem` (`from tandem import Client`); the [README](../README.md#call-it) has
examples.
"""
_OPTIONS_HEAD = """## Options of a request

An option that is not given, or is None, takes the value of the model's `generation_config.json`. The defaults here are
those of models that have none there.
"""
_OPTIONS = ("tandem.v1.SamplingParams", "tandem.v1.GenerateRequest")
"""Messages whose fields are options of a request."""


def cli_page() -> str:
    return "\n".join([_CLI_HEAD, *_command(cli, click.Context(cli, info_name="tandem"))]).rstrip("\n") + "\n"


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    """One command, then its subcommands."""
    pieces = command.collect_usage_pieces(context)
    yield f"## {context.command_path}\n"
    yield f"```\n{context.command_path} {' '.join(pieces)}\n```\n"
    yield _help_text(command.help or "")
    options = [option for option in command.params if isinstance(option, click.Option)]
    rows = [record for option in options if (record := option.get_help_record(context)) is not None]
    if rows:
        yield _table("option", rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from _command(subcommand, click.Context(subcommand, info_name=name, parent=context))


def _help_text(text: str) -> str:
    """Paragraphs; those that click must not wrap (`\\b`) become blocks, without their title."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            title, _, lines = paragraph.removeprefix("\b\n").partition("\n")
            paragraph = f"{title}\n\n```console\n{textwrap.dedent(lines)}\n```"
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs) + "\n"


def python_page() -> str:
    pieces = [_PYTHON_HEAD]
    for name in sorted(tandem.__all__):
        pieces += _class(getattr(tandem, name))
    return "\n".join([*pieces, _OPTIONS_HEAD, _options_table()])


def _class(cls: type) -> Iterator[str]:
    """Docstring, fields or parameters, and the public methods in the order of the source."""
    yield f"## {cls.__name__}\n"
    yield f"{inspect.getdoc(cls)}\n"
    fields = _fields(cls)
    if fields:
        yield _table("field", fields)
    else:
        yield f"`{cls.__name__}{_signature(cls)}`\n"
    for name, member in vars(cls).items():
        if not name.startswith("_") and inspect.isfunction(member):
            yield f"**`{'await ' * inspect.iscoroutinefunction(member)}{name}{_signature(member)}`**\n"
            yield f"{inspect.getdoc(member)}\n"


def _signature(function: Callable[..., object]) -> str:
    """(prompt: Prompt, **options) → Completion; `self` and the single options of a request are left out."""
    signature = inspect.signature(function)
    has_options = RequestOptions.__annotations__.keys() <= signature.parameters.keys()
    shown = []
    for name, one in signature.parameters.items():
        if name == "self" or (has_options and name in RequestOptions.__annotations__):
            continue
        if one.kind is one.KEYWORD_ONLY and "*" not in shown and not has_options:
            shown.append("*")
        text = ("*" * (one.kind is one.VAR_POSITIONAL)) + f"{name}: {one.annotation}"
        shown.append(text if one.default is one.empty else f"{text} = {one.default!r}")
    returned = "" if signature.return_annotation in ("None", signature.empty) else f" → {signature.return_annotation}"
    return f"({', '.join(shown + ['**options'] * has_options)}){returned}"


def _fields(cls: type) -> list[tuple[str, str]]:
    """Annotated fields of a class body with their docstrings, and its properties."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    fields = []
    for index, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            after = node.body[index + 1] if index + 1 < len(node.body) else None
            text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            fields.append((f"{one.target.id}: {ast.unparse(one.annotation)}", text))
    for name, member in vars(cls).items():
        if isinstance(member, property) and not name.startswith("_"):
            fields.append((f"{name}: {inspect.signature(member.fget).return_annotation}", inspect.getdoc(member) or ""))  # type: ignore[arg-type]
    return fields


def _options_table() -> str:
    """Types from RequestOptions; meanings from the protos, and from its own docstrings for the rest."""
    meanings = dict(_fields(RequestOptions))
    meanings = {name.partition(":")[0]: text for name, text in meanings.items()}
    for message in reversed(_OPTIONS):
        meanings |= {name: text for name, text in comments_of(message).items() if not meanings.get(name)}
    rows = []
    for name, kind in RequestOptions.__annotations__.items():
        annotation = str(getattr(kind, "__forward_arg__", kind)).removesuffix(" | None")
        rows.append((f"{name}: {annotation}", meanings[name]))
    return _table("option", rows)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    def cell(text: str) -> str:
        return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")

    lines = [f"| `{cell(name)}` | {cell(text)} |" for name, text in rows]
    return "\n".join([f"| {title} | |", "|---|---|", *lines, ""])


PAGES: dict[str, Callable[[], str]] = {"cli.md": cli_page, "python.md": python_page}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/cli.md and docs/python.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed page is stale")
    check: bool = parser.parse_args().check
    for name, page in PAGES.items():
        if not check:
            (DOCS / name).write_text(page())
        elif not (DOCS / name).is_file() or (DOCS / name).read_text() != page():
            raise SystemExit(f"docs/{name} is stale (run `make docs`)")


if __name__ == "__main__":
    main()
