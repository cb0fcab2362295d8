"""The further flags of a stack's instances, read as the instances read them. What reads them is imported late: it takes
half a second, and most stacks have none."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from instance.config import InstanceSettings


def instance_settings(flags: Sequence[str]) -> InstanceSettings:
    """What they set, over the environment. Raises ValueError for flags or variables with which no instance starts."""
    from instance.config import InstanceSettings
    from serving.settings import settings_options

    read: list[InstanceSettings] = []
    try:
        settings_options(InstanceSettings)(read.append).main(["--model", "any", *flags], standalone_mode=False)
    except click.ClickException as error:
        problem = error.format_message().rstrip(".")
        source = "--instance-arg" if flags else "the instances' settings"
        raise ValueError(f"{source}: {problem}; `python -m decode_service --help` lists FLAG=VALUE") from None
    if not read:
        sys.exit()  # --help was one of them
    return read[0]


def given_settings(flags: Sequence[str]) -> InstanceSettings | None:
    """As `instance_settings`; None where neither flags nor variables say anything about KV transfer."""
    if not flags and not any(name.upper().startswith("TANDEM_TRANSFER__") for name in os.environ):
        return None
    return instance_settings(flags)
