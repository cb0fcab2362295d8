"""`tandem completion`: the script with which a shell completes commands and options of `tandem`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tandem.commands.options import Choice


@click.command("completion")
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes `tandem` in a SHELL.

    \b
    Once, then in every new shell:
      tandem completion bash > ~/.local/share/bash-completion/completions/tandem
      tandem completion zsh > "${fpath[1]}/_tandem"
      tandem completion fish > ~/.config/fish/completions/tandem.fish

    \b
    In this shell alone:
      source <(tandem completion bash)
      source <(tandem completion zsh)
      tandem completion fish | source
    """
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(context.find_root().command, {}, "tandem", "_TANDEM_COMPLETE").source())
