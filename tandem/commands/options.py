"""Options that several commands have, options from a file, and how a command ends whose call of a router fails."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
from click.core import ParameterSource

from engine.errors import shown, suggestion
from tandem.connectors import Options

if TYPE_CHECKING:
    from tandem.client.client import Client
    from tandem.client.completion import Piece
    from tandem.client.credentials import Credentials

F = TypeVar("F", bound=Callable[..., Any])
MAX_GIB = 1 << 20
"""Of memory, as an option gives it: more is a typing error."""
INTERRUPTED = 130
"""A shell's exit status for Ctrl-C."""
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that command a terminal."""
_META = "tandem.client.credentials"
_API_KEY = "api_key"
_CREDENTIALS = {
    "ca_file": "PEM: the CA that issued the server's certificate; enables TLS.",
    "cert_file": "PEM: your certificate, if the server requires one.",
    "key_file": "PEM: the certificate's private key.",
    "server_name": "Name in the router's certificate; absent: the host of its address.",
    "token_file": "File with your bearer token.",
}


def _allowed(kind: click.IntRange | click.FloatRange) -> str:
    noun = "an integer" if isinstance(kind, click.IntRange) else "a number"
    if kind.min is None:
        return noun
    lowest = f"{'above' if kind.min_open else 'at least'} {kind.min:g}"
    if kind.max is None:
        return f"{noun}, {lowest}"
    if kind.min_open:
        return f"{noun}, {lowest}, at most {kind.max:.12g}"
    return f"{noun}, {kind.min:g} to {kind.max:.12g}"


def _is_one(value: object, *kinds: type) -> bool:
    """Whether `value` has one of the types; `true` is no integer here."""
    return isinstance(value, kinds) and not isinstance(value, bool)


class IntRange(click.IntRange):
    """click's; its error has the value and what is allowed. Of a YAML file only integers and texts: click's would make
    1 of `true` and 2 of 2.7."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            if not _is_one(value, int, str):
                raise click.BadParameter("neither an integer nor a text")
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{str(value)!r}; allowed: {_allowed(self)}", param, ctx)


class FloatRange(click.FloatRange):
    """click's, for finite numbers; its error has the value and what is allowed."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            if not _is_one(value, int, float, str):
                raise click.BadParameter("neither a number nor a text")
            number = super().convert(value, param, ctx)
        except (click.BadParameter, OverflowError):
            self.fail(f"{str(value)!r}; allowed: {_allowed(self)}", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{str(value)!r} is not finite; allowed: {_allowed(self)}", param, ctx)
        return number


class Choice(click.Choice[str]):
    """click's; its error has the value and what is allowed."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{str(value)!r}; allowed: {', '.join(self.choices)}"


class OutputFile(click.Path):
    """A file to write; that it cannot be written is an error before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if problem := _path_problem(value):
            self.fail(f"{str(value)!r}: {problem}", param, ctx)
        made = Path(os.path.realpath(path)) if os.path.islink(path) else path
        if not os.path.exists(path) and not (os.path.isdir(made.parent) and os.access(made.parent, os.W_OK)):
            self.fail(f"{str(path)!r}: there is no folder {made.parent} that can be written", param, ctx)
        return path


class OutputFolder(click.Path):
    """A folder to write files to, and to make if there is none; OutputFile's counterpart."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if problem := _path_problem(value):
            self.fail(f"{str(value)!r}: {problem}", param, ctx)
        there = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
        if not os.path.isdir(there) or not os.access(there, os.W_OK):
            self.fail(f"{str(path)!r}: {there} is no folder that can be written", param, ctx)
        return path


def _path_problem(given: str | os.PathLike[str]) -> str | None:
    """Why nothing can have this path: it is empty, a name is too long, or links form a loop."""
    if not os.fspath(given):
        return "it is empty"
    try:
        os.stat(given)
    except OSError as error:
        return error.strerror if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else None
    return None


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def end_signals() -> list[signal.Signals]:
    """Those that end a command; not a SIGHUP that is ignored, as under nohup."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignores_hangup else [signal.SIGHUP])]


def is_terminal(stream: TextIO | None) -> bool:
    """Whether it is one; a standard stream that is closed (`2>&-`) is None."""
    return stream is not None and stream.isatty()


def echo_answer(text: str, *, nl: bool = False, err: bool = False) -> None:
    """Prints what a model has written: as it is, but on a terminal, which it could command, control characters other
    than tabs and line feeds as escapes."""
    if is_terminal(sys.stderr if err else sys.stdout):
        text = _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
    click.echo(text, nl=nl, err=err)


class AnswerPrinter:
    """Prints an answer as it comes: what the model thinks on standard error, in lines of its own. Where that cannot be
    written it is dropped, and not the answer."""

    def __init__(self) -> None:
        self._is_thinking = False

    def add(self, piece: Piece) -> None:
        is_thinking = self._is_thinking or bool(piece.reasoning)
        ends = is_thinking and bool(piece.content or piece.tool_calls or piece.finish_reason)
        with suppress(OSError):
            echo_answer(piece.reasoning, nl=ends, err=True)
        self._is_thinking = is_thinking and not ends
        echo_answer(piece.content)


def unusable(error: ValueError) -> click.ClickException:
    """For a value that cannot be sent: one that is not UTF-8 is named."""
    problem = f"{shown(error.object)} is not UTF-8: {error}" if isinstance(error, UnicodeEncodeError) else str(error)
    return click.ClickException(problem)


def standard_input() -> TextIO:
    """Raises ClickException where it is closed."""
    if sys.stdin is None:
        raise click.ClickException("standard input is closed")
    return sys.stdin


def echo_or_drop(text: str, *, err: bool = False) -> str:
    """Prints as click.echo does. Returns why that failed, or "". A stream that cannot be written, as without its
    terminal or the reader of its pipe, drops what is printed from then on."""
    problem = ""
    try:
        click.echo(text, err=err)
    except OSError as error:
        problem = error.strerror or str(error)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it is closed
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())
    return problem


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """The first Ctrl-C, or a like signal, ends a transfer of blocks by SystemExit; a second one must not interrupt the
    cleanup.

    Gives a function for long work to call between its parts: it raises KeyboardInterrupt again if the first one was
    lost, as Python drops an exception that is raised within `__del__`.
    """
    was_interrupted = False

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def check() -> None:
        if was_interrupted:
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, on_signal) for number in end_signals()}
    try:
        yield check
    except KeyboardInterrupt:
        echo_or_drop("\nstopped; all files, keys and processes are removed", err=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def write_errors() -> Iterator[None]:
    """Raises ClickException for a file of figures that cannot be written, as on a disk that became full meanwhile."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"cannot be written: {error}") from None


def given_options(context: click.Context) -> list[click.Parameter]:
    """Those that are on the command line, and not from the environment or a default."""
    source_of = context.get_parameter_source
    return [one for one in context.command.params if one.name and source_of(one.name) is ParameterSource.COMMANDLINE]


def option_group(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator; --help lists them in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


sampling_options = option_group(
    click.option("--temperature", type=FloatRange(0, 2), help="0 is greedy; absent: the model's default."),
    click.option(
        "--top-p",
        type=FloatRange(0, 1, min_open=True),
        help="Sample from the most likely tokens up to this probability.",
    ),
    click.option("--top-k", type=IntRange(min=0), help="Sample from so many of the most likely tokens; 0: all."),
    click.option(
        "--min-p", type=FloatRange(0, 1), help="Drop tokens less likely than this part of the most likely one."
    ),
    click.option("--seed", type=IntRange(min=0), help="Equal seed and prompt give equal tokens."),
)
"""How tokens are sampled; absent: the model's defaults."""


lora_option = click.option("--lora", metavar="NAME", help="A LoRA adapter of the model; absent: the model alone.")


def _keep(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None:  # the group of a subcommand may have been given the option as well
        context.meta.setdefault(_META, {})[option.name] = value


def _credential_option(name: str, text: str) -> Callable[[F], F]:
    is_file = name.endswith("_file")
    return click.option(
        f"--{name.replace('_', '-')}",
        name,
        metavar="FILE" if is_file else "NAME",
        type=click.Path(dir_okay=False, path_type=Path) if is_file else str,
        envvar=f"TANDEM_CLIENT__{name.upper()}",
        expose_value=False,
        callback=_keep,
        help=text,
    )


credential_options = option_group(*(_credential_option(name, text) for name, text in _CREDENTIALS.items()))
"""Their values are returned by `given_credentials`. Environment: TANDEM_CLIENT__CA_FILE etc. A local stack on this
machine needs none of them."""


call_options = option_group(
    click.option("--address", metavar="HOST:PORT", help="The router; absent: the stack that runs on this machine."),
    click.option(
        "--timeout", "timeout_s", type=FloatRange(min=0, min_open=True), default=600.0, show_default=True,
        help="Seconds for the whole request.",
    ),
    credential_options,
)  # fmt: skip
"""Where a request goes, and how long it may take."""


@contextmanager
def calling_client(address: str | None, timeout_s: float) -> Iterator[Client]:
    """The client that the call options describe. Ends the command with a message where its call fails, and by
    Ctrl-C."""
    from tandem.client.client import Client
    from tandem.client.errors import TandemError

    try:
        with Client(address, timeout_s=timeout_s, credentials=given_credentials(address)) as client:
            yield client
    except ValueError as error:  # an invalid address, an unusable file of the credentials
        raise unusable(error) from None
    except TandemError as error:
        is_late = error.status == "DEADLINE_EXCEEDED"
        hint = f" (--timeout {timeout_s:g}: seconds for the whole request)" if is_late else ""
        raise click.ClickException(error.message + hint) from None
    except KeyboardInterrupt:
        click.echo(err=True)
        raise SystemExit(INTERRUPTED) from None


def given_credentials(address: str | None, *, from_environment: bool = True) -> Credentials | None:
    """The Credentials of the command line and, unless excluded, of the environment; without any, those of the local
    stack that has `address`, or None without an address. Raises UsageError for options that exclude each other."""
    from tandem.client.credentials import Credentials
    from tandem.client.registry import credentials_for

    context = click.get_current_context()
    given = context.meta.get(_META, {})
    if not from_environment:
        typed = {option.name for option in given_options(context)}
        given = {name: value for name, value in given.items() if name in typed}
    try:
        if given:
            return Credentials(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return None if address is None else credentials_for(address)


def _parse_options(context: click.Context, option: click.Parameter, text: str) -> Options:
    from serving.yaml_file import DuplicateKeyError, parse_yaml

    try:
        options = parse_yaml(text)
    except DuplicateKeyError as error:
        raise click.BadParameter(str(error)) from None
    except ValueError:
        options = None
    if not isinstance(options, dict) or not all(
        isinstance(value, str | int | float | bool) for value in options.values()
    ):
        raise click.BadParameter("must be a map in YAML: '{num_io_threads: 4, digest: false}'")
    return {str(name): value for name, value in options.items()}


kv_options = click.option(
    "--kv-options", "options", metavar="YAML", default="{}", callback=_parse_options,
    help="Options of the connector's class: '{num_io_threads: 4}'.",
)  # fmt: skip


def read_stack_file(context: click.Context, path: Path | None) -> None:
    """Makes the options in the YAML file the defaults of the command of `context`; an option without a value is absent.
    Raises click.BadParameter."""
    if path is None:
        return
    options = {option.opts[0].removeprefix("--"): option for option in context.command.params}
    defaults: dict[str, object] = {}
    try:
        for name, value in _read_stack_file(path).items():
            option = _option_of_file(str(name), value, options)
            if option.name in defaults:
                raise ValueError(f"{name} is there twice, with - and with _: keep one of them")
            _check_value_of_file(str(name), value, option)
            is_single = option.multiple and not isinstance(value, list)
            if value is not None:
                defaults[str(option.name)] = [value] if is_single else value
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}") from None
    context.default_map = defaults


def _read_stack_file(path: Path) -> dict[object, object]:
    from serving.yaml_file import parse_yaml

    content = parse_yaml(path.read_text())
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("it must be a map from options to values, such as `decode: 2`")
    return content


def _option_of_file(name: str, value: object, options: Mapping[str, click.Parameter]) -> click.Option:
    option = options.get(name.replace("_", "-"))
    if isinstance(option, click.Option) and option.name != "config" and not isinstance(value, dict):
        return option
    what, known = ("section", []) if isinstance(value, dict) else ("option", list(options))
    hint = suggestion(
        name, [one for one in known if one != "config"], "settings of the services go into router-arg, instance-arg"
    )
    raise ValueError(f"`tandem up` has no {what} {name!r}{hint}")


def _check_value_of_file(name: str, value: object, option: click.Option) -> None:
    if value is None and option.name == _API_KEY:
        raise ValueError(f"{name} has no value: give a key, or remove the line for a stack without one")
    if isinstance(value, list) and not option.multiple:
        raise ValueError(f"{name} has one value, not a list: {value}")
    if option.type is not click.STRING:
        return
    for text in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(text, str):
            # YAML has changed it already: 1.10 to 1.1, 010 to 8, no to False.
            shown = "" if option.name == _API_KEY else f", not {text!r}"
            raise ValueError(f'{name} must be text{shown}: quote it, as in {name}: "text"')
