"""One settings tree for every service: defaults < YAML file < environment < flags.

A program's tree is a `Settings` class whose fields are all sections; a section is a frozen `Section` whose fields are
made with `setting(default, doc)`. The setting `port` of the section `server` is

    server: {port: 7000}           in the YAML file given by --config
    TANDEM_SERVER__PORT=7000       in the environment: TANDEM_, then the path in capitals joined by two underscores
    --server-port 7000             as a flag, and --port if the setting declares that flag

Every variable has a double underscore, so the variables that Kubernetes makes for a Service called tandem
(TANDEM_PORT=tcp://...) are never read as settings. An unknown name is an error that suggests the right one. In the
environment only the program's own sections, and names that resemble one of them, are checked: other sections belong to
other programs, and so do the settings of its own sections that `Settings.of_other_programs` lists: one environment may
serve several. The composition root reads the tree once and passes sections down.

pydantic-settings reads the environment. It cannot do the rest: its YAML source ignores a missing file, its command line
names nested flags `--server.port`, and no source reports which one a wrong value came from.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import update_wrapper
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import click
import pydantic_settings
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from serving.yaml_file import parse_yaml

_log = logging.getLogger(__name__)
_PREFIX = "TANDEM_"
_ENVIRONMENT = "environment"
_FLAGS = "flags"
_DEFAULT = "default"
_MAX_INT64 = 2**63 - 1

_ADDRESS = re.compile(r"(?P<host>\[[^\[\]/]+\]|[^\[\]:/]+):(?P<port>[0-9]{1,5})")

Tree = dict[str, Any]
Keys = tuple[str, ...]


class SettingsError(ValueError):
    """A setting that does not exist or has a wrong value. The message names it, its origin and the remedy."""


class Section(BaseModel):
    """A group of settings. Frozen: what was read at the start holds for the life of the process. Numbers are finite:
    infinity does not fit gRPC's times, and a sum with it orders nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _path_is_not_empty(cls, value: object, info: ValidationInfo) -> object:
        """`Path("")` is the working directory: VARIABLE= would be a store there."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if value == "" and Path in (annotation, *get_args(annotation)):
            raise ValueError("must be a path, or left out; . is the working directory")
        return value

    @field_validator("*")
    @classmethod
    def _fits_a_message(cls, value: object) -> object:
        """Python's integers have no end, those of messages and of most libraries do."""
        if isinstance(value, int) and abs(value) > _MAX_INT64:
            raise ValueError(f"must be at most {_MAX_INT64}")
        return value


class Settings(pydantic_settings.BaseSettings):
    """The root of one program's tree: sections only. Make one with `load`, which merges the four sources."""

    model_config = pydantic_settings.SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=_PREFIX, env_nested_delimiter="__"
    )
    of_other_programs: ClassVar[frozenset[Keys]] = frozenset()
    """Settings that other programs have in sections which this one has too: their variables are ignored here."""

    @classmethod
    def ignored_variables(cls) -> list[str]:
        """Those of other programs that are set."""
        return sorted(
            {environment_name(path) for path in cls.of_other_programs} & {name.upper() for name in os.environ}
        )

    @classmethod
    def log_ignored_variables(cls) -> None:
        """Once the log is configured by the settings."""
        if ignored := cls.ignored_variables():
            _log.debug("variables that are settings of other programs are ignored: %s", ", ".join(ignored))

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[pydantic_settings.BaseSettings], *sources: Any, **named: Any
    ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
        """Only the constructor's arguments: `load` merges the sources itself, to report each value's origin."""
        return (named["init_settings"],)


S = TypeVar("S", bound=Settings)


def setting(
    default: Any,
    doc: str,
    *,
    flag: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """One setting of a section: `doc` says what it does and its unit, `...` as default makes it required, and `flag` is
    a short flag beside the one made of the path, say "--port"."""
    return Field(default, description=doc, json_schema_extra={"flag": flag} if flag else None, ge=ge, gt=gt, le=le)


def parse_address(text: str) -> tuple[str, int]:
    """Host, without brackets, and port of `host:port`. Raises ValueError."""
    matched = _ADDRESS.fullmatch(text)
    if matched is None or int(matched["port"]) > 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:7000, an IPv6 host in brackets; port 0 takes a free one")
    return matched["host"].strip("[]"), int(matched["port"])


def format_address(host: str, port: int) -> str:
    """host:port as gRPC writes it, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _valid_address(text: str) -> str:
    parse_address(text)
    return text


MAX_TIME_S = 1e9  # of settings that become a time of gRPC's or of protobuf's, which overflow beyond it; 32 years
Address = Annotated[str, AfterValidator(_valid_address)]  # the type of a setting that is a host:port


def leaves(tree: type[BaseModel], above: Keys = ()) -> Iterator[tuple[Keys, FieldInfo]]:
    """Every setting of `tree` with its path, in the order of declaration."""
    for name, field in tree.model_fields.items():
        section = _section(field)
        if section is not None:
            yield from leaves(section, (*above, name))
        elif not above:
            raise TypeError(f"{tree.__name__}.{name} is not a Section: every setting lives in a section")
        else:
            yield (*above, name), field


def environment_name(path: Keys) -> str:
    return _PREFIX + "__".join(path).upper()


def load(tree: type[S], *, config: Path | None = None, flags: Mapping[Keys, object] | None = None) -> S:
    """The settings from all four sources. Raises SettingsError, one problem a line."""
    layers: dict[str, Tree] = {}
    if config is not None:
        layers[str(config)] = _without_empty(tree, _read_yaml(config))
    layers[_ENVIRONMENT] = _read_environment(tree)
    layers[_FLAGS] = {}
    for path, value in (flags or {}).items():
        _merge(layers[_FLAGS], _nested(path, value))
    problems = [problem for origin, layer in layers.items() for problem in _unknown(tree, layer, origin, ())]
    if problems:
        raise SettingsError("\n".join(problems))
    merged: Tree = {}
    for layer in layers.values():
        _merge(merged, layer)
    try:
        return tree(**merged)
    except ValidationError as error:
        raise SettingsError("\n".join(_explained(item, layers, tree) for item in error.errors())) from None


def settings_options(tree: type[S]) -> Callable[[Callable[[S], None]], click.Command]:
    """Turns `def main(settings)` into a click command with --config and one documented option a setting."""

    def decorate(main: Callable[[S], None]) -> click.Command:
        by_name = {"__".join(path): path for path, _ in leaves(tree)}

        def run(config: Path | None, **values: object) -> None:
            flags = {by_name[name]: value for name, value in values.items() if value is not None}
            try:
                settings = load(tree, config=config, flags=flags)
            except SettingsError as error:
                raise click.UsageError(str(error)) from None
            main(settings)

        update_wrapper(run, main)
        command = click.command(context_settings={"max_content_width": 110, "show_default": False})(run)
        command.params = [_CONFIG_OPTION, *(_option(path, field) for path, field in leaves(tree))]
        flags = [flag for option in command.params for flag in (*option.opts, *option.secondary_opts)]
        if duplicates := sorted({flag for flag in flags if flags.count(flag) > 1}):
            raise TypeError(f"two settings of {tree.__name__} declare {', '.join(duplicates)}")
        return command

    return decorate


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _nested(path: Keys, value: object) -> Tree:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _merge(below: Tree, above: Tree) -> None:
    """Lays `above` over `below`, section by section."""
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge(below[name], value)
        else:
            below[name] = dict(value) if isinstance(value, dict) else value


def _read_yaml(path: Path) -> Tree:
    try:
        content = parse_yaml(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: the top level must be sections, not {type(content).__name__}")
    return content


def _without_empty(tree: type[BaseModel], layer: Tree) -> Tree:
    """`layer` without sections that are empty, as where all their lines are comments."""
    sections = {name: section for name, field in tree.model_fields.items() if (section := _section(field))}
    return {
        name: _without_empty(sections[name], value) if name in sections and isinstance(value, dict) else value
        for name, value in layer.items()
        if value is not None or name not in sections
    }


def _read_environment(tree: type[Settings]) -> Tree:
    for name in os.environ:
        section, delimiter, _ = name.removeprefix(_PREFIX).lower().partition("__")
        if not (name.startswith(_PREFIX) and delimiter and section) or section in tree.model_fields:
            continue
        if similar := difflib.get_close_matches(section, tree.model_fields, n=1, cutoff=0.75):
            right = f"{_PREFIX}{similar[0].upper()}__"
            raise SettingsError(f"{_ENVIRONMENT}: unknown section in {name}; did you mean {right}...?")
    source = pydantic_settings.EnvSettingsSource(tree)
    # It would read a whole section from a variable without a double underscore.
    ignored = {name.lower() for name in tree.ignored_variables()}
    source.env_vars = {
        name: value for name, value in source.env_vars.items() if "__" in name and name.lower() not in ignored
    }
    try:
        return source()
    except pydantic_settings.SettingsError as error:
        raise SettingsError(f"{_ENVIRONMENT}: {error}: lists and maps are written as JSON") from None


def _unknown(tree: type[BaseModel], layer: Tree, origin: str, above: Keys) -> Iterator[str]:
    """One line for each name in `layer` that `tree` does not have."""
    for name, value in layer.items():
        path = (*above, str(name))
        field = tree.model_fields.get(str(name))
        if field is None:
            yield _suggestion(tree, path, origin)
        elif (section := _section(field)) is not None and isinstance(value, dict):
            yield from _unknown(section, value, origin, path)


def _suggestion(tree: type[BaseModel], path: Keys, origin: str) -> str:
    shown = environment_name if origin == _ENVIRONMENT else ".".join
    similar = difflib.get_close_matches(path[-1], tree.model_fields, n=1, cutoff=0.5)
    hint = f"did you mean {shown((*path[:-1], similar[0]))}?" if similar else f"known: {', '.join(tree.model_fields)}"
    return f"{origin}: unknown setting {shown(path)}; {hint}"


def _explained(item: Any, layers: Mapping[str, Tree], tree: type[Settings]) -> str:
    """One line for one of pydantic's errors: the setting, its value, the value's origin and the problem."""
    path: Keys = tuple(str(part) for part in item["loc"])
    if item["type"] == "missing":
        missing = [keys for keys, field in leaves(tree) if keys[: len(path)] == path and field.is_required()]
        return "\n".join(
            f"{'.'.join(keys)} is required: set {environment_name(keys)} or {_long_flag(keys)}" for keys in missing
        )
    if not path:
        return str(item["msg"])
    setting_path = next((keys for keys, _ in leaves(tree) if keys == path[: len(keys)]), path)
    if isinstance(item["input"], dict) and _is_section(path, tree):
        origins = [name for name, layer in layers.items() if _depth(path, layer) == len(path)]
        return f"{'.'.join(path)} (from {', '.join(origins) or _DEFAULT}): {item['msg']}"
    origin, depth = _origin(path, len(setting_path), layers)
    where = environment_name(setting_path) if origin == _ENVIRONMENT else origin
    hint = _quoting_hint(item) if origin not in (_ENVIRONMENT, _FLAGS, _DEFAULT) else ""
    return f"{'.'.join(path[:depth])} = {ascii(item['input'])[:64]} (from {where}): {item['msg']}{hint}"


def _is_section(path: Keys, tree: type[BaseModel]) -> bool:
    field = tree.model_fields.get(path[0])
    section = None if field is None else _section(field)
    return section is not None and (len(path) == 1 or _is_section(path[1:], section))


def _origin(path: Keys, min_depth: int, layers: Mapping[str, Tree]) -> tuple[str, int]:
    """The layer with the longest part of `path`, of `min_depth` keys at least, and that part's length; of several the
    uppermost. What pydantic adds to a path, such as the member of a union, no layer has."""
    origin, longest = _DEFAULT, min_depth
    for name, layer in layers.items():
        if (depth := _depth(path, layer)) >= longest:
            origin, longest = name, depth
    return origin, longest


def _depth(path: Keys, value: object) -> int:
    """How many keys of `path` lead to something in `value`."""
    for depth, part in enumerate(path):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return depth
    return len(path)


def _quoting_hint(item: Any) -> str:
    """For a text in a YAML file that YAML reads as something else."""
    if item["type"] not in ("string_type", "path_type") or isinstance(item["input"], dict | list):
        return ""
    return '; give a text, or "null" in quotes for the word null' if item["input"] is None else "; put it in quotes"


_CONFIG_OPTION = click.Option(
    ["--config"],
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="YAML file with settings, section by section.",
)


def _long_flag(path: Keys) -> str:
    return f"--{'-'.join(path).replace('_', '-')}"


def _option(path: Keys, field: FieldInfo) -> click.Option:
    """The click option of one setting. Its own default is None, so that only a given value counts as a flag."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    flags = list(dict.fromkeys(str(flag) for flag in (extra.get("flag"), _long_flag(path)) if flag))
    kind = _click_type(field.annotation)
    if kind is click.BOOL:
        flags = [f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags]
    value = field.get_default(call_default_factory=True, validated_data={})
    default = "required" if field.is_required() else f"default: {'none' if value is None else value}"
    help_text = f"{field.description or ''} [{default}; {environment_name(path)}]"
    return click.Option(["__".join(path), *flags], type=kind, default=None, help=help_text)


def _click_type(annotation: Any) -> click.ParamType[Any]:
    """The click type of a setting's annotation; anything structured is given as YAML."""
    if get_origin(annotation) in (Union, UnionType):
        rest = [kind for kind in get_args(annotation) if kind is not NoneType]
        annotation = rest[0] if len(rest) == 1 else str
    if get_origin(annotation) is Annotated:
        annotation, *_ = get_args(annotation)
    if get_origin(annotation) is Literal:
        return click.Choice([str(value) for value in get_args(annotation)])
    simple: dict[Any, click.ParamType[Any]] = {
        bool: click.BOOL,
        int: click.INT,
        float: click.FLOAT,
        str: click.STRING,
        Path: _PathValue(path_type=Path),
    }
    return simple.get(annotation) or _YamlValue()


class _PathValue(click.Path):
    """An empty text stays one, for the settings to reject."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "" else super().convert(value, param, ctx)


class _YamlValue(click.ParamType[Any]):
    """A list or map on the command line: `[a, b]` or `{a: 1}`."""

    name = "yaml"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_yaml(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
