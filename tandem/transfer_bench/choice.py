"""From what a person typed (--connector, --kv-url, --kv-folder, --kv-options) to the medium that is measured.

Free of torch until `medium_of` is called, so that a command line can be checked at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.stack_settings import CONNECTORS

if TYPE_CHECKING:
    from tandem.transfer_bench.media import Medium

_WITH_URL, _WITH_FOLDER = ("redis", "lmcache"), ("shared_storage", "lmcache")
_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LOGIN = re.compile(r"://[^/@\s]*@")
_SECRET_NAME = re.compile(r"pass|secret|token|credential|(^|_)key$", re.IGNORECASE)
_FILE_NAME = re.compile(r"_(file|path|dir)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConnectorChoice:
    """One connector as configured. Raises ValueError with what to type."""

    name: str
    kv_url: str | None = None
    kv_folder: Path | None = None
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_connector(self.name):
            raise ValueError(f"{self.name!r} is none of {', '.join(CONNECTORS)}, nor module:Class of your own")
        if self.kv_url is not None and self.name in ("shared_storage", "nixl"):
            raise ValueError(f"--kv-url goes with --connector redis, {self.name} has no server")
        if self.kv_folder is not None and self.name in ("redis", "nixl"):
            raise ValueError(f"--kv-folder goes with --connector shared_storage, {self.name} has no folder")
        for name, setting in (("url", "--kv-url"), ("path", "--kv-folder")):
            if name in self.options and self.name in CONNECTORS:
                raise ValueError(f"give {name} by {setting}, not in --kv-options")

    def redacted(self, text: str) -> str:
        """`text` without logins in addresses and without the values of options that are secrets."""
        text = _LOGIN.sub("://***@", text)
        for name, value in self.options.items():
            is_secret = _SECRET_NAME.search(name) and not _FILE_NAME.search(name) and isinstance(value, str)
            if is_secret and str(value):
                text = text.replace(str(value), "***")
        return text


def choices_of(
    connector: str, kv_url: str | None, kv_folder: Path | None, options: Mapping[str, str | int | float | bool]
) -> list[ConnectorChoice]:
    """One for each of a list ("nixl,redis"), in which options name their connector: {"redis.ttl_s": 600}.

    Raises ValueError with what to type.
    """
    names = connector.split(",")
    if len(names) == 1:
        return [ConnectorChoice(connector, kv_url, kv_folder, options)]
    for option in options:
        if option.rpartition(".")[0] not in names:
            raise ValueError(f"--kv-options: {option} must name its connector, for example {names[-1]}.{option}")
    return [
        ConnectorChoice(
            name,
            kv_url if name in _WITH_URL else None,
            kv_folder if name in _WITH_FOLDER else None,
            {option.rpartition(".")[2]: value for option, value in options.items() if option.startswith(f"{name}.")},
        )
        for name in names
    ]


def is_connector(name: str) -> bool:
    """A short name, or module:Class."""
    return name in CONNECTORS or _CLASS_PATH.fullmatch(name) is not None


def medium_of(choice: ConnectorChoice, *, tls: str = "") -> Medium:
    """What `measure` is told."""
    options, name, url, folder = dict(choice.options), choice.name, choice.kv_url, choice.kv_folder
    if name == "nixl":
        from tandem.transfer_bench.nixl_medium import NixlMedium

        return NixlMedium(options=options, tls=tls)
    if name == "shared_storage":
        from tandem.transfer_bench.file_media import SharedStorageMedium

        return SharedStorageMedium(options=options, parent=folder)
    if name == "redis" or (name == "lmcache" and url is not None):
        from tandem.transfer_bench.server_media import LMCacheServerMedium, RedisMedium

        return (
            RedisMedium(options=options, url=url)
            if url is None or name == "redis"
            else LMCacheServerMedium(options=options, url=url)
        )
    if name == "lmcache":
        from tandem.transfer_bench.file_media import LMCacheMedium

        return LMCacheMedium(options=options, parent=folder)
    from tandem.transfer_bench.media import OtherMedium

    given = {"url": url, "path": None if folder is None else str(folder)}
    return OtherMedium(
        connector=name, options=options | {key: value for key, value in given.items() if value is not None}
    )
