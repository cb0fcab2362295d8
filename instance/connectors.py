"""The configuration of the KV connector, one or a list, from the transfer settings.

The first connector of a list hands KV over, the others are prefix stores. Folder, address, key and capacity are given
to those that take them; options of a list are prefixed by their connector: {"redis.ttl_s": 600}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import KVConnectorConfig
from kv_transfer.transfer.connector import MAX_LEASE_S
from serving.settings import SettingsError

_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LIST = "kv_transfer.multi_connector:MultiConnector"
_SETTINGS = {
    "path": "transfer.folder (--kv-folder)",
    "url": "transfer.url (--kv-url)",
    "kv_secret_file": "transfer.secret_file (--kv-secret-file)",
    "capacity_bytes": "transfer.capacity_bytes (--kv-capacity-bytes)",
}
"""Options with a setting of their own, by the name of the connectors' argument."""


@dataclass(frozen=True, slots=True)
class KnownConnector:
    """A connector with a short name. `takes`: options with a setting of their own."""

    class_path: str
    takes: frozenset[str]
    needs: frozenset[str] = frozenset()  # at least one of these is required
    is_store: bool = True  # stores pages by content, so that it may follow another connector in a list


_KNOWN = {
    "null": KnownConnector("engine.kv_connector:NullKVConnector", frozenset(), is_store=False),
    "shared_storage": KnownConnector(
        "kv_transfer.stores.files:SharedStorageConnector",
        frozenset({"path", "kv_secret_file", "capacity_bytes"}),
        frozenset({"path"}),
    ),
    "redis": KnownConnector(
        "kv_transfer.stores.redis.connector:RedisConnector", frozenset({"url", "kv_secret_file"}), frozenset({"url"})
    ),
    "nixl": KnownConnector("kv_transfer.nixl.connector:NixlConnector", frozenset({"kv_secret_file"}), is_store=False),
    "lmcache": KnownConnector(
        "kv_transfer.stores.lmcache.connector:LMCacheConnector", frozenset(_SETTINGS), frozenset({"path", "url"})
    ),
}
CONNECTORS = {name: known.class_path for name, known in _KNOWN.items()}
"""Class of each short name; any other connector is given as module:Class."""


def check_names(connector: str) -> str:
    """Returns the setting; raises ValueError for an unknown connector or an invalid list."""
    names = connector.split(",")
    for name in names:
        if name not in _KNOWN and not _CLASS_PATH.fullmatch(name):
            raise ValueError(f"{name!r} must be one of {', '.join(CONNECTORS)}, or module:Class")
    if len(set(names)) < len(names):
        raise ValueError("names a connector twice")
    if len(names) > 1 and "null" in names:
        raise ValueError("null transfers nothing and cannot be in a list")
    for name in names[1:]:
        if name in _KNOWN and not _KNOWN[name].is_store:
            raise ValueError(f"{name} stores nothing: it can only be the first of a list")
    if "lmcache" in names and (shared := {"redis", "shared_storage"}.intersection(names)):
        raise ValueError(f"lmcache would get the url or folder of {min(shared)}: give it alone, or after nixl")
    return connector


def connector_config(
    connector: str, named: Mapping[str, Any], options: Mapping[str, Any], *, advertised_host: str, lease_s: float
) -> KVConnectorConfig:
    """`named`: the settings of `_SETTINGS`, None where not given; `lease_s`: the longest lease here. Raises
    SettingsError."""
    names = connector.split(",")
    given = {name: value for name, value in named.items() if value is not None}
    for option in given:
        if not any(name not in _KNOWN or option in _KNOWN[name].takes for name in names):
            raise SettingsError(f"{_SETTINGS[option]} is not supported by the {connector} connector")
    configs = []
    _check_max_lease(names[0], options, lease_s)
    for name, own_options in zip(names, _split_options(names, options), strict=True):
        configs.append(_one(name, given, own_options, advertised_host, lease_s))
    if len(configs) == 1:
        return configs[0]
    members = [{"class_path": config.class_path, "options": config.options} for config in configs]
    return KVConnectorConfig(class_path=_LIST, options={"connectors": members})


def _check_max_lease(name: str, options: Mapping[str, Any], lease_s: float) -> None:
    """Of the first connector, which alone hands over."""
    try:
        max_lease_s = float(options.get("max_lease_s", options.get(f"{name}.max_lease_s", lease_s)))
    except (TypeError, ValueError):
        return  # the connector says what it takes
    if max_lease_s < lease_s:
        raise SettingsError(
            f"transfer.options: max_lease_s of {name} is {max_lease_s:g};"
            f" it must not be less than transfer.lease_s (--lease-s), which is {lease_s:g}"
        )


def _split_options(names: list[str], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    if len(names) == 1:
        return [dict(options)]
    split: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        name, dot, option = key.rpartition(".")
        if not dot or name not in split:
            raise SettingsError(f"transfer.options.{key}: in a list of connectors it must be {names[-1]}.{option}")
        split[name][option] = value
    return [split[name] for name in names]


def _one(
    name: str, given: Mapping[str, Any], options: dict[str, Any], advertised_host: str, lease_s: float
) -> KVConnectorConfig:
    known = _KNOWN.get(name)
    own = {option: value for option, value in given.items() if known is None or option in known.takes}
    if twice := own.keys() & options.keys():
        raise SettingsError(f"transfer.options.{min(twice)} has a setting of its own; give it there")
    if known is None:
        return KVConnectorConfig(class_path=name, options={**options, **own})
    if name == "null" and options:
        raise SettingsError("the null connector takes no options")
    if known.needs and not known.needs & own.keys():
        needed = " or ".join(_SETTINGS[option] for option in sorted(known.needs))
        hint = "; give a folder that all instances share, or --kv-connector nixl" if name == "shared_storage" else ""
        raise SettingsError(f"{needed} is required by the {name} connector{hint}")
    if "kv_secret_file" in known.takes - own.keys() and options.get("digest", True):
        raise SettingsError(
            f"transfer.secret_file is required by the {name} connector: create one with"
            " `openssl rand -hex 32`, the same for all instances, and set --kv-secret-file"
        )
    if name == "nixl":
        own.setdefault("address", options.pop("address", advertised_host))
    if name != "null" and lease_s > MAX_LEASE_S:
        options.setdefault("max_lease_s", lease_s)
    return KVConnectorConfig(class_path=known.class_path, options={**options, **own})
