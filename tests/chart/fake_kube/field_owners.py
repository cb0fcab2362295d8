"""Who has written which field: what makes a second writer of one field a conflict (server-side apply).

    a manager applies ──▶ the fields of its manifest are its own
                 ├── another one wrote a different value ──▶ 409 with that one's name, unless forced
                 └── a field that it applied before and leaves out now ──▶ removed, if it is nobody else's
    anybody else writes ──▶ the fields that have changed are its own

Ownership is kept beside the store, not in `managedFields`: no client here reads those.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.patching import key_of
from tests.chart.fake_kube.refusal import Refused

Part = str | tuple[str, Any]
Path = tuple[Part, ...]
_NOT_OWNED = {("apiVersion",), ("kind",), ("status",)}
_NOT_OWNED_METADATA = {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"}


@dataclass(frozen=True, slots=True)
class Manager:
    """One writer."""

    name: str
    subresource: str | None = None

    def __str__(self) -> str:
        return f'"{self.name}"' + (f' with subresource "{self.subresource}"' if self.subresource else "")


@dataclass
class Owners:
    """Of one object's fields."""

    applied: dict[Manager, set[Path]] = field(default_factory=dict)
    updated: dict[Manager, set[Path]] = field(default_factory=dict)

    def wrote(self, manager: Manager, before: Object, after: Object) -> None:
        """An update that is not an apply."""
        old, new = leaves(before), leaves(after)
        changed = {path for path, value in new.items() if path not in old or old[path] != value}
        self._take(changed)
        self.updated.setdefault(manager, set()).update(changed)

    def apply(self, manager: Manager, live: Object, manifest: Object, *, force: bool) -> Object:
        """What `live` becomes. Raises Refused (409) where another manager has another value."""
        wanted, there = leaves(manifest), leaves(live)
        theirs = {path for path, value in wanted.items() if path in there and there[path] != value}
        conflicts = {path: owner for path in theirs for owner in self._owners(path) if owner != manager}
        if conflicts and not force:
            raise _conflict(manifest, conflicts)
        dropped = self.applied.get(manager, set()) - set(wanted)
        self.applied[manager] = set()
        self.updated.pop(manager, None)
        result = copy.deepcopy(live)
        for path in sorted(dropped, key=_is_key):
            if not self._owners(path):
                _remove(result, path)
        self._take(theirs)
        self.applied[manager] = set(wanted)
        for path, value in wanted.items():
            _write(result, path, value)
        return result

    def _owners(self, path: Path) -> list[Manager]:
        return [owner for fields in (self.applied, self.updated) for owner, paths in fields.items() if path in paths]

    def _take(self, paths: set[Path]) -> None:
        for fields in (self.applied, self.updated):
            for theirs in fields.values():
                theirs -= paths


def _conflict(manifest: Object, conflicts: dict[Path, Manager]) -> Refused:
    messages = [
        f"conflict with {owner} using {manifest['apiVersion']}: {_text(path)}" for path, owner in conflicts.items()
    ]
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {owner}", "field": _text(path)}
        for path, owner in conflicts.items()
    ]
    plural = "conflict" if len(messages) == 1 else "conflicts"
    return Refused(409, "Conflict", f"Apply failed with {len(messages)} {plural}: {'; '.join(messages)}", causes=causes)


def leaves(found: Object) -> dict[Path, Any]:
    """Every value of an object that somebody may own, by its path."""
    result: dict[Path, Any] = {}

    def walk(path: Path, value: Any) -> None:
        if path in _NOT_OWNED or (len(path) == 2 and path[0] == "metadata" and path[1] in _NOT_OWNED_METADATA):
            return
        parts = _parts(path, value)
        if parts is None:
            result[path] = value
        else:
            for part, child in parts:
                walk((*path, part), child)

    walk((), found)
    return result


def _parts(path: Path, value: Any) -> list[tuple[Part, Any]] | None:
    """What `value` consists of; None where it is one value."""
    if isinstance(value, dict) and value:
        return list(value.items())
    field_name = path[-1] if path and isinstance(path[-1], str) else ""
    if isinstance(value, list) and value:
        keys = [key_of(field_name, element) for element in value]
        if None not in keys and len(set(keys)) == len(keys):
            return [(key, element) for key, element in zip(keys, value, strict=True) if key is not None]
    return None


def _step(parent: Any, part: Part) -> Any:
    """The child of `parent`; None where there is none."""
    if isinstance(part, str):
        return parent.get(part)
    return next((element for element in parent if element.get(part[0]) == part[1]), None)


def _write(target: Object, path: Path, value: Any) -> None:
    parent: Any = target
    for part, following in zip(path, [*path[1:], None], strict=True):
        if following is None:
            _set(parent, part, copy.deepcopy(value))
            return
        child = _step(parent, part)
        if child is None or not isinstance(child, dict | list):
            child = [] if isinstance(following, tuple) else {}
            _set(parent, part, child)
            child = _step(parent, part)
        parent = child


def _set(parent: Any, part: Part, value: Any) -> None:
    if isinstance(part, str):
        parent[part] = value
    elif isinstance(value, dict):
        parent.append({part[0]: part[1], **value})


def _is_key(path: Path) -> bool:
    """Whether it is what tells an element of a list from its neighbours, which goes last."""
    return len(path) > 1 and isinstance(path[-2], tuple) and path[-1] == path[-2][0]


def _remove(target: Object, path: Path) -> None:
    """The value, and what holds nothing any more without it. An element that holds more than its key keeps that."""
    parents: list[Any] = [target]
    for part in path[:-1]:
        child = _step(parents[-1], part)
        if child is None:
            return
        parents.append(child)
    if _step(parents[-1], path[-1]) is None or (_is_key(path) and len(parents[-1]) > 1):
        return
    for parent, part, child in zip(parents[::-1], path[::-1], [None, *parents[:0:-1]], strict=True):
        if isinstance(part, str):
            del parent[part]
        else:
            parent.remove(child)
        if parent:
            return


def _text(path: Path) -> str:
    """As Kubernetes writes it: .spec.template.spec.containers[name="decode"].image."""
    return "".join(f".{part}" if isinstance(part, str) else f'[{part[0]}="{part[1]}"]' for part in path)
