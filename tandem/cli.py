"""The command `tandem`: one module per command under tandem/commands/, imported only when it is called.

This module imports little but click, so that a mistyped command line is answered at once.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import Any

import click

from tandem.commands import Group

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's core else prints each connection that a server closes

_COMMANDS = {
    "up": "Start a router and its prefill and decode instances on this machine.",
    "generate": "Send a prompt to a running stack and stream the answer.",
    "chat": "Chat with the model of a running stack.",
    "doctor": "Check this machine, the model, the connectors and a running stack.",
    "pools": "Show and resize the pools of a running stack, explain a pick, drain an instance.",
    "top": "Show the pools of a running stack on a full screen; resize and drain by key.",
    "bench": "Measure a stack under load, KV transfers, and the engine alone.",
    "completion": "Print the script that completes `tandem` in bash, zsh or fish.",
}


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _LazyGroup(Group):
    """Lists the commands by name and help line; imports `tandem.commands.<name>` only for the one that is called."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Ends by a message where the disk does not take the output, as with `tandem pools > FILE`."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in _DISK_ERRORS or error.filename is not None:
                raise
            from tandem.commands.options import echo_or_drop

            echo_or_drop(f"Error: the output cannot be written: {error.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """The exit status of Ctrl-C is the same at each moment, also while a command is imported; click's is 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from tandem.commands.options import INTERRUPTED, echo_or_drop

            echo_or_drop("\nAborted!", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tandem.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tandem-llm", prog_name="tandem")
@click.pass_context
def main(context: click.Context) -> None:
    """Serve language models with prefill and decode on separate pools.

    \b
    Start here:
      tandem doctor                          check this machine
      tandem up                              a router, one prefill and one decode instance, the demo model
      tandem generate "Once upon a time"     in another terminal
      tandem chat                            a conversation

    \b
    Then:
      tandem up --model Qwen/Qwen3-0.6B      a model from the Hugging Face hub (or a local folder)
      tandem up --prefill 2 --decode 2       larger pools
      tandem pools                           the instances and their load
    """
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        context.color = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="replace")  # a character that the locale lacks must end no command


if __name__ == "__main__":
    main()
