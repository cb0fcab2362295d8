"""Typed access to config.json: a field of the wrong type is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import InvalidCheckpoint, UnsupportedModel, shown


class ConfigFields:
    """config.json with typed access; a field of the wrong type is refused by name."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self._raw = raw
        self._where = where

    def has(self, name: str) -> bool:
        return name in self._raw

    def raw(self, name: str) -> Any:
        return self._raw.get(name)

    def section(self, name: str) -> ConfigFields | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return ConfigFields(value, f"{self._where}{name}.")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None:
            raise self._wrong(name, value, "a number")
        return value

    def optional_number(self, name: str) -> float | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> UnsupportedModel:
        return UnsupportedModel(f"config.json: {self._where}{name} is {shown(value)}; it must be {wanted}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint folder; InvalidCheckpoint if it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path.name} of the checkpoint: {error.strerror}") from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{path.name} of the checkpoint is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path.name} of the checkpoint is not a JSON object")
    return value
