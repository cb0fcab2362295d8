"""`tandem chat`: a conversation with a running stack, line by line.

    reading ─text─▶ answering ─finished, stopped by Ctrl-C, or failed─▶ reading ─/exit, Ctrl-D, end of input─▶ ended
       │               └─calls─▶ the tool runs ─its results─▶ answering
       └─/command─▶ reading

A failed message leaves the conversation as it was; an answer that Ctrl-C stops stays in it as far as it came. What the
model thinks is shown and no part of the conversation.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from engine.errors import suggestion
from tandem.commands import calculator
from tandem.commands.options import (
    AnswerPrinter,
    Choice,
    IntRange,
    call_options,
    calling_client,
    counted,
    echo_answer,
    is_terminal,
    lora_option,
    sampling_options,
    standard_input,
)

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from tandem.client.client import Client
    from tandem.client.completion import Completion, Piece, ToolCall

_PROMPT, _CONTINUATION = "> ", "… "
_COMMANDS = {
    "/help": "show this list",
    "/stats": "times, tokens and instances of the last answer",
    "/system TEXT": "set the system message; without TEXT show it",
    "/tool NAME": "let the model call a tool: calculator; off: none; without NAME show it",
    "/reset": "forget the conversation; the system message stays",
    "/save FILE": "write the conversation to a new JSON file",
    "/exit": "end, as Ctrl-D does",
}
_NAMES = {usage.partition(" ")[0] for usage in _COMMANDS}
_KEYS = "Alt-Enter, or \\ at the end of a line, begins a new line; Ctrl-C stops an answer; ↑ recalls earlier messages"
_TOOLS = ("calculator", "off")
_MAX_ROUNDS = 5
"""Of calls for one message."""
_RETRY_HINTS = {
    "UNAVAILABLE": "the message was not kept; type it again to retry",
    "RESOURCE_EXHAUSTED": "the message was not kept; type it again to retry",
    "DEADLINE_EXCEEDED": "the message was not kept; start `tandem chat` with a longer --timeout",
}


@click.command("chat")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--max-tokens", type=IntRange(min=1), default=1024, show_default=True, help="Most in an answer.")
@sampling_options
@lora_option
@click.option("--tool", type=Choice(_TOOLS), default="off", show_default=True, help="What the model may call.")
@call_options
@click.option("--stats", is_flag=True, help="After each answer print, on standard error, what /stats shows.")
def command(
    system: str | None, address: str | None, timeout_s: float, stats: bool, tool: str, **sampling: object
) -> None:
    """Chat with the model of a running stack; `/help` lists the commands within.

    On a terminal: history, several lines, and Ctrl-C stops the answer, not the program. Without one, each line of
    standard input is a message, and the first failure ends it.

    --tool calculator runs on this machine what the model calls: arithmetic, and nothing else. A message with an
    expression, such as 17 * 25, makes the model call it.

    \b
    Examples:
      tandem chat
      tandem chat --system "Answer in one sentence." --temperature 0
      tandem chat --tool calculator                     then: What is 17 * 25?
      tandem chat --stats                               which instances answered, TTFT and ITL
      echo "What is a tandem?" | tandem chat --address 127.0.0.1:50051
    """
    messages = standard_input()
    is_dialogue = is_terminal(messages) and is_terminal(sys.stdout)
    with calling_client(address, timeout_s) as client:
        info = client.model_info()
        if not info.supports_chat:
            raise click.ClickException(f'{info.model} has no chat template; use `tandem generate "PROMPT"`')
        model = str(sampling["lora"] or info.model)
        chat = _Chat(client, model, system, sampling, stats, tool)
        if is_dialogue:
            click.echo(f"{model} at {client.address}; /help lists the commands, Ctrl-D ends")
            _talk(chat, _terminal_lines(_session()))
        else:
            _obey(chat, _piped_lines(messages))


@dataclass(slots=True)
class _Answer:
    """One answer and when its tokens came."""

    started_s: float
    text: str = ""
    """Without thoughts and calls."""
    times: list[tuple[float, int]] = field(default_factory=list)
    """Arrival and number of tokens of each piece."""
    completion: Completion | None = None
    """None while it streams, and for one that was stopped."""

    def add(self, piece: Piece) -> None:
        self.times.append((time.monotonic(), len(piece.token_ids)))
        self.text += piece.content

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.times)

    def report(self) -> list[str]:
        """The lines of /stats."""
        first_s, last_s = self.times[0][0], self.times[-1][0]
        gaps_ms = [(after_s - before_s) * 1e3 for (before_s, _), (after_s, _) in pairwise(self.times)]
        gaps_ms = sorted(gaps_ms + [0.0] * sum(count - 1 for _, count in self.times[1:] if count))  # as bench serve
        lines = [f"{counted(self.num_tokens, 'token')}; TTFT {(first_s - self.started_s) * 1e3:.0f} ms"]
        if gaps_ms:
            mean_ms = (last_s - first_s) * 1e3 / max(1, self.num_tokens - self.times[0][1])
            worst_ms = gaps_ms[math.ceil(0.99 * (len(gaps_ms) - 1))]
            lines[0] += f", ITL mean {mean_ms:.1f} ms, p99 {worst_ms:.1f} ms, {1e3 / max(mean_ms, 1e-3):.0f} tokens/s"
        return lines + ([] if self.completion is None else _route_lines(self.completion))


def _route_lines(completion: Completion) -> list[str]:
    """The prompt's tokens by where their KV came from, and the instances."""
    usage, route = completion.usage, completion.route
    lines = [
        f"prompt: {counted(completion.prompt_tokens, 'token')}, {usage.cached_tokens} cached, "
        f"{usage.external_tokens} from another instance"
    ]
    if route.decode:
        prefill = f"prefill {', '.join(route.prefill)} → " if route.prefill else ""
        lines.append(f"{prefill}decode {', '.join(route.decode)} ({route.reason})")
    return lines


class _Chat:
    """The conversation and its commands. Owned by the one loop that reads the messages."""

    def __init__(
        self, client: Client, model: str, system: str | None, sampling: dict[str, Any], shows_stats: bool, tool: str
    ) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._sampling = sampling
        self._shows_stats = shows_stats
        self._tool = tool
        self._turns: list[dict[str, Any]] = []
        self._last: _Answer | None = None
        self.was_stopped = False
        """Whether Ctrl-C stopped an answer."""

    def handle(self, text: str) -> bool:
        """Answers a message, or obeys a command; False for /exit.

        Raises TandemError for a failed message, UsageError for a command that cannot be obeyed."""
        name, _, argument = text.strip().partition(" ")
        if name == "/exit":
            return False
        if name.startswith("/"):
            self._obey(name, argument.strip())
        elif text.strip():
            self._answer(text)
        return True

    @property
    def _messages(self) -> list[dict[str, Any]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._turns]

    def _answer(self, text: str) -> None:
        turns: list[dict[str, Any]] = [{"role": "user", "content": text}]
        expressions = calculator.expressions_in(text)[:_MAX_ROUNDS]
        for _ in range(_MAX_ROUNDS + 1):
            answer = self._streamed(turns, {} if self._tool == "off" else calculator.options(expressions))
            if not answer.times:
                return
            turns.append({"role": "assistant", "content": answer.text})
            calls = answer.completion.tool_calls if answer.completion is not None else ()
            if not calls or answer.completion is None or answer.completion.finish_reason == "length":
                break
            turns[-1]["tool_calls"] = [_as_openai(call) for call in calls]
            turns += [_run_call(call, expressions) for call in calls]
        self._turns += turns
        self._last = answer
        if answer.completion is not None and answer.completion.finish_reason == "length":
            click.echo("(ended by its length: --max-tokens, or the model's context)", err=True)
        if self._shows_stats:
            click.echo("\n".join(answer.report()), err=True)

    def _streamed(self, turns: list[dict[str, Any]], options: dict[str, Any]) -> _Answer:
        """The printed answer to `turns`; without times if it was stopped before its first token."""
        answer = _Answer(time.monotonic())
        stream = self._client.stream([*self._messages, *turns], **self._sampling, **options)
        try:
            answer.completion = _print_stream(stream, answer)
        except KeyboardInterrupt:
            stream.close()
            self.was_stopped = True
            click.echo("\n(stopped)", err=True)
        return answer

    def _obey(self, name: str, argument: str) -> None:
        match name:
            case "/help":
                click.echo("\n".join(f"  {usage:<14}{text}" for usage, text in _COMMANDS.items()) + f"\n{_KEYS}")
            case "/stats":
                if self._last is None:
                    raise click.UsageError("/stats: there is no answer yet; type a message first")
                click.echo("\n".join(self._last.report()))
            case "/system" if not argument:
                click.echo(self._system or "no system message; /system TEXT sets one")
            case "/system":
                self._system = argument
            case "/tool" if not argument:
                click.echo(f"tool: {self._tool}")
            case "/tool" if argument in _TOOLS:
                self._tool = argument
            case "/tool":
                raise click.UsageError(f"/tool: {argument} is no tool; allowed: {', '.join(_TOOLS)}")
            case "/reset":
                self._turns.clear()
            case "/save":
                self._save(argument)
            case _:
                hint = suggestion(name, _NAMES, "/help lists the commands")
                raise click.UsageError(f"{name} is no command{hint}")

    def _save(self, name: str) -> None:
        """Writes OpenAI's form of the conversation. Never replaces a file."""
        if not name:
            raise click.UsageError("/save: give a file, such as /save chat.json")
        path = Path(os.path.expanduser(name))  # Path's raises for unknown users
        text = json.dumps({"model": self._model, "messages": self._messages}, ensure_ascii=False, indent=2)
        content = text.encode(errors="replace")  # an argument may hold bytes that are no text
        try:
            path.touch(exist_ok=False)
            try:
                path.write_bytes(content)
            except OSError:
                path.unlink(missing_ok=True)  # a part of it is of no use, and would refuse its name
                raise
        except FileExistsError:
            raise click.UsageError(f"/save: {path} exists; give another name") from None
        except OSError as error:
            raise click.UsageError(f"/save: {path} cannot be written: {error.strerror}; give another name") from None
        click.echo(f"saved {counted(len(self._messages), 'message')} to {path}", err=True)


def _as_openai(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _run_call(call: ToolCall, expressions: list[str]) -> dict[str, Any]:
    """Prints a call with its result, and removes it from the `expressions` to compute; returns the message for the
    model."""
    expression, result = calculator.answer(call.arguments)
    if expression in expressions:
        expressions.remove(expression)
    echo_answer(f"({call.name}: {expression} = {result})", nl=True, err=True)
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def _print_stream(stream: Generator[Piece, None, Completion], answer: _Answer) -> Completion:
    """Prints the pieces as they come; returns the whole. Raises TandemError after a line break."""
    from tandem.client.errors import TandemError

    printer = AnswerPrinter()
    try:
        while True:
            piece = next(stream)
            answer.add(piece)
            printer.add(piece)
    except StopIteration as ended:
        completion: Completion = ended.value
        if answer.text or not completion.tool_calls:
            click.echo()
        return completion
    except TandemError:
        click.echo(err=True)
        raise


def _obey(chat: _Chat, lines: Iterator[str]) -> None:
    """The loop without a terminal: a failure or Ctrl-C ends it."""
    for text in lines:
        if not chat.handle(text):
            return
        if chat.was_stopped:
            raise KeyboardInterrupt


def _talk(chat: _Chat, lines: Iterator[str]) -> None:
    """The loop on a terminal: a failure is shown, and the next message read."""
    from tandem.client.errors import TandemError

    for text in lines:
        try:
            if not chat.handle(text):
                return
        except TandemError as error:
            hint = _RETRY_HINTS.get(error.status, "the message was not kept; /reset begins a new conversation")
            click.echo(f"Error: {error.message}\n({hint})", err=True)
        except click.UsageError as error:
            click.echo(f"Error: {error.message}", err=True)
        except ValueError as error:  # as of a token file that is gone with its stack
            click.echo(f"Error: {error}", err=True)
        except KeyboardInterrupt:
            click.echo("(interrupted; Ctrl-D ends)", err=True)


def _piped_lines(stream: TextIO) -> Iterator[str]:
    """Messages of a stream: its lines; one that ends with a backslash continues on the next."""
    begun: list[str] = []
    for number, raw in enumerate(getattr(stream, "buffer", stream), 1):
        try:
            line = raw.decode() if isinstance(raw, bytes) else raw
        except UnicodeDecodeError as error:
            raise click.ClickException(f"line {number} of standard input is not UTF-8: {error}") from None
        line = line.rstrip("\r\n")
        if line.endswith("\\"):
            begun.append(line.removesuffix("\\"))
            continue
        yield "\n".join([*begun, line])
        begun.clear()
    if begun:
        yield "\n".join(begun)


def _terminal_lines(session: PromptSession[str]) -> Iterator[str]:
    """Messages typed on the terminal, until Ctrl-D; Ctrl-C clears the line."""
    while True:
        try:
            yield session.prompt(_PROMPT, prompt_continuation=_CONTINUATION)
        except KeyboardInterrupt:
            click.echo("(Ctrl-D or /exit ends)", err=True)
        except EOFError:
            return


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import FuzzyCompleter, WordCompleter
    from prompt_toolkit.filters import Condition

    session: PromptSession[str] = PromptSession(
        history=_history(),
        completer=FuzzyCompleter(WordCompleter(sorted(_NAMES), sentence=True)),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        key_bindings=_bindings(),
        multiline=True,
    )
    return session


def _history() -> History:
    """What was typed, also in earlier conversations: of those nothing where the file cannot be read, and nothing for
    later ones where it cannot grow, as on a full disk."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def load_history_strings(self) -> list[str]:
            try:
                return list(super().load_history_strings())
            except OSError:
                return []

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    path = _history_file()
    return InMemoryHistory() if path is None else Kept(path)


def _bindings() -> KeyBindings:
    """Enter sends; Alt-Enter, and Enter after a backslash, begin a new line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history_file() -> Path | None:
    """$XDG_STATE_HOME/tandem/chat_history, or below ~/.local/state, of mode 0600; None where it cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "tandem"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        path.touch(mode=0o600)
    except (OSError, RuntimeError):  # no home, or a read-only one
        return None
    return path if os.access(path, os.W_OK) else None
