"""The further flags of a stack's instances, read as the instances read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from instance.config import InstanceSettings
from serving.settings import settings_options


def instance_settings(flags: Sequence[str]) -> InstanceSettings:
    """What they set, over the environment. Raises ValueError for flags or variables with which no instance starts."""
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
