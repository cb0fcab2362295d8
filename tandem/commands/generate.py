"""`tandem generate`: streams the answer to one prompt from a running stack."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tandem.commands.options import (
    AnswerPrinter,
    IntRange,
    call_options,
    calling_client,
    counted,
    lora_option,
    sampling_options,
    standard_input,
)

if TYPE_CHECKING:
    from tandem.client.client import Client
    from tandem.client.completion import TokenLogprob
    from tandem.client.request import Prompt


@click.command("generate")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, rendered with the chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: a system message before it.")
@click.option("--max-tokens", type=IntRange(min=1), default=128, show_default=True, help="Most tokens.")
@sampling_options
@lora_option
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this string; may be given several times.")
@click.option("--json-schema", metavar="FILE|TEXT", help="The answer is JSON that satisfies this JSON schema.")
@click.option("--regex", metavar="PATTERN", help="The whole answer matches this regular expression.")
@click.option("--choice", multiple=True, metavar="TEXT", help="The answer is this text; give several to choose from.")
@click.option(
    "--logprobs", type=IntRange(0, 20), metavar="N",
    help="Afterwards list, on standard error, every token's log-probability and the N best tokens at its position.",
)  # fmt: skip
@call_options
@click.option(
    "--stats", is_flag=True, help="Afterwards print, on standard error, the number of tokens and their times."
)
def command(
    prompt: str,
    chat: bool,
    system: str | None,
    address: str | None,
    timeout_s: float,
    stats: bool,
    json_schema: str | None,
    choice: tuple[str, ...],
    **sampling: object,
) -> None:
    """Stream the answer to PROMPT; `-` reads the prompt from standard input.

    \b
    Examples:
      tandem generate "Once upon a time"
      tandem generate --chat "What is a tandem?" --temperature 0
      tandem generate "A tandem is" --max-tokens 40 --seed 7 --stats
      tandem generate "A tandem is" --temperature 0 --logprobs 3
      tandem generate "Is a tandem a bicycle? " --choice yes --choice no
      tandem generate "A rider in JSON: " --json-schema rider.json
      cat story.txt | tandem generate - --address 127.0.0.1:50051
    """
    if prompt == "-":
        try:
            prompt = standard_input().buffer.read().decode()
        except UnicodeDecodeError as error:
            raise click.ClickException(f"the prompt on standard input is not UTF-8: {error}") from None
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    sampling |= {"json_schema": _schema(json_schema), "choice": choice or None}
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    with calling_client(address, timeout_s) as client:
        _stream(client, messages if chat else prompt, sampling, stats)


def _schema(given: str | None) -> str | None:
    """The text of a schema, from a file unless it is one itself."""
    if given is None or given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise click.UsageError(
            f"--json-schema: {given!r} is neither a JSON object nor a readable file: {reason}"
        ) from None


def _stream(client: Client, prompt: Prompt, sampling: dict[str, object], stats: bool) -> None:
    started_s = time.monotonic()
    first_s: float | None = None
    num_tokens = 0
    positions: list[tuple[TokenLogprob, ...]] = []
    printer = AnswerPrinter()
    try:
        for piece in client.stream(prompt, **sampling):  # type: ignore[arg-type]  # tandem.client.request checks names and kinds
            if first_s is None:
                first_s, num_first = time.monotonic(), len(piece.token_ids)
            num_tokens += len(piece.token_ids)
            positions += piece.logprobs
            printer.add(piece)
    finally:
        if first_s is not None:
            click.echo()
    ended_s = time.monotonic()  # before the tokenizer is read for the lines below
    text_of = _texts_of_ids(client.address) if positions else None
    for index, candidates in enumerate(positions):
        click.echo(_logprobs_line(index, candidates, text_of), err=True)
    if stats and first_s is not None:
        line = f"{counted(num_tokens, 'token')}; first after {(first_s - started_s) * 1e3:.0f} ms"
        if num_later := num_tokens - num_first:
            line += f", then one every {(ended_s - first_s) / num_later * 1e3:.1f} ms"
        click.echo(line, err=True)


def _texts_of_ids(address: str) -> Callable[[int], str] | None:
    """The text of a single token, by the tokenizer of the local stack at `address`; None for other routers."""
    from engine.text.tokenizer import Tokenizer
    from tandem.client.registry import model_folder_of

    folder = model_folder_of(address)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_folder(folder)
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)


def _logprobs_line(
    index: int, candidates: tuple[TokenLogprob, ...], text_of: Callable[[int], str] | None = None
) -> str:
    """One output token: its index, id, text if `text_of` is known, and log-probability; then the best others."""

    def shown(one: TokenLogprob) -> str:
        return f"{one.token_id}" if text_of is None else f"{one.token_id} {text_of(one.token_id)!r}"

    token, *others = candidates
    line = f"{index:4}  token {shown(token)}  {token.logprob:.4f}  rank {token.rank}"
    if others:
        line += "  | " + "  ".join(f"{shown(other)} {other.logprob:.4f}" for other in others)
    return line
