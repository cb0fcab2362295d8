"""One module per command of `tandem`; each has a `command`. None of them imports torch or transformers at the top."""

from __future__ import annotations

import difflib

import click


class Group(click.Group):
    """A command with subcommands, which answers a mistyped one with what to type."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            above = " ".join(["tandem", *ctx.command_path.split()[1:]])
            similar = difflib.get_close_matches(args[0], known, n=1, cutoff=0.5)
            hint = f"Did you mean `{above} {similar[0]}`?" if similar else f"Available commands: {', '.join(known)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)
