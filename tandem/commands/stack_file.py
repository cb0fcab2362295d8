"""`tandem up --config FILE`: the command's options from a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from engine.errors import suggestion

_KEY = "api_key"


def read_stack_file(context: click.Context, path: Path | None) -> None:
    """Makes the options in the file the defaults of the command of `context`; an option without a value is absent.
    Raises click.BadParameter."""
    if path is None:
        return
    options = {option.opts[0].removeprefix("--"): option for option in context.command.params}
    defaults: dict[str, object] = {}
    try:
        for name, value in _read(path).items():
            option = _option(str(name), value, options)
            if option.name in defaults:
                raise ValueError(f"{name} is there twice, with - and with _: keep one of them")
            _check_value(str(name), value, option)
            is_single = option.multiple and not isinstance(value, list)
            if value is not None:
                defaults[str(option.name)] = [value] if is_single else value
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}") from None
    context.default_map = defaults


def _read(path: Path) -> dict[object, object]:
    from serving.yaml_file import parse_yaml

    content = parse_yaml(path.read_text())
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("it must be a map from options to values, such as `decode: 2`")
    return content


def _option(name: str, value: object, options: Mapping[str, click.Parameter]) -> click.Option:
    option = options.get(name.replace("_", "-"))
    if isinstance(option, click.Option) and option.name != "config" and not isinstance(value, dict):
        return option
    what, known = ("section", []) if isinstance(value, dict) else ("option", list(options))
    hint = suggestion(
        name, [one for one in known if one != "config"], "settings of the services go into router-arg, instance-arg"
    )
    raise ValueError(f"`tandem up` has no {what} {name!r}{hint}")


def _check_value(name: str, value: object, option: click.Option) -> None:
    if value is None and option.name == _KEY:
        raise ValueError(f"{name} has no value: give a key, or remove the line for a stack without one")
    if isinstance(value, list) and not option.multiple:
        raise ValueError(f"{name} has one value, not a list: {value}")
    if option.type is not click.STRING:
        return
    for text in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(text, str):
            # YAML has changed it already: 1.10 to 1.1, 010 to 8, no to False.
            shown = "" if option.name == _KEY else f", not {text!r}"
            raise ValueError(f'{name} must be text{shown}: quote it, as in {name}: "text"')
