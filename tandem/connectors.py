"""The KV connectors of the command line: their short names, and one connector with its URL, folder and options.

Imports nothing heavy, so that a command line can be checked at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from engine.imports import CLASS_PATH

CONNECTORS = ("shared_storage", "redis", "nixl", "lmcache")
"""The short names in instance/settings.py that a stack of several instances can use."""
Options = dict[str, str | int | float | bool]
_WITH_URL, _WITH_FOLDER = ("redis", "lmcache"), ("shared_storage", "lmcache")
_LOGIN = re.compile(r"://[^/\s]*@")
_SECRET_NAME = re.compile(r"pass|secret|token|credential|(^|_)key$", re.IGNORECASE)
_MAX_SHOWN_CHARS = 600
_FILE_NAME = re.compile(r"_(file|path|dir)$", re.IGNORECASE)


def without_logins(text: str) -> str:
    """`text` in which addresses have *** in place of a login."""
    return _LOGIN.sub("://***@", text)


@dataclass(frozen=True, slots=True)
class ConnectorChoice:
    """One connector as configured. Raises ValueError that says what to type."""

    name: str
    """A short name, or module:Class."""
    kv_url: str | None = None
    kv_folder: Path | None = None
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in CONNECTORS and not CLASS_PATH.fullmatch(self.name):
            raise ValueError(f"{self.name!r} must be one of {', '.join(CONNECTORS)}, or module:Class")
        if self.kv_url is not None and self.name in ("shared_storage", "nixl"):
            raise ValueError(f"--kv-url goes with --connector redis or lmcache, {self.name} has no server")
        if self.name == "lmcache" and (self.kv_url or "").startswith("redis"):
            raise ValueError("lmcache: a redis:// URL is not supported; use --connector redis")
        if self.kv_folder is not None and self.name in ("redis", "nixl"):
            raise ValueError(f"--kv-folder goes with --connector shared_storage or lmcache, {self.name} has no folder")
        for name, setting in (("url", "--kv-url"), ("path", "--kv-folder")):
            if name in self.options and self.name in CONNECTORS:
                raise ValueError(f"give {name} by {setting}, not in --kv-options")

    def redacted(self, text: str) -> str:
        """`text` without logins in addresses and without the values of secret options."""
        text = without_logins(text)
        for name, value in self.options.items():
            is_secret = _SECRET_NAME.search(name) and not _FILE_NAME.search(name)
            if is_secret and isinstance(value, str) and value:
                text = text.replace(value, "***")
        return text

    def one_line(self, text: str) -> str:
        """`text`, which the connector's own code may have made, without secrets and control characters, shortened."""
        from serving.logging import escaped, redacted

        text = escaped(redacted(self.redacted(text)))
        return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def split_connectors(
    connector: str, kv_url: str | None, kv_folder: Path | None, options: Options
) -> list[ConnectorChoice]:
    """One for each of a list ("nixl,redis"), in which options name their connector: {"redis.ttl_s": 600}.

    Raises ValueError that says what to type.
    """
    names = connector.split(",")
    if "redis" in names and kv_url is None:
        raise ValueError("the redis connector needs the address of a Redis: --kv-url redis://host:port/0")
    if len(names) == 1:
        return [ConnectorChoice(connector, kv_url, kv_folder, options)]
    for option in options:
        if option.rpartition(".")[0] not in names:
            raise ValueError(f"--kv-options: {option} must name its connector, for example {names[-1]}.{option}")
    own = [name for name in names if name not in CONNECTORS]  # module:Class may have either
    with_url, with_folder = ([name for name in names if name in known] + own for known in (_WITH_URL, _WITH_FOLDER))
    if kv_url is not None and not with_url:
        raise ValueError(f"--kv-url goes with redis or lmcache, none of {connector} has a server")
    if kv_folder is not None and not with_folder:
        raise ValueError(f"--kv-folder goes with shared_storage or lmcache, none of {connector} has a folder")
    return [
        ConnectorChoice(
            name,
            kv_url if name in with_url else None,
            kv_folder if name in with_folder else None,
            {option.rpartition(".")[2]: value for option, value in options.items() if option.startswith(f"{name}.")},
        )
        for name in names
    ]
