"""The four kinds of patch, as pure functions on objects.

A list whose elements have a key (containers, env, ports, …) is merged element by element by strategic merge patches and
by server-side apply; any other list is one value. The keys are those of Kubernetes' own types.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.refusal import Refused

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "topologySpreadConstraints": ("topologyKey",),
}


def key_of(field: str, element: Any) -> tuple[str, Any] | None:
    """What tells `element` of the list `field` from its neighbours; None: the list is one value."""
    if isinstance(element, dict):
        for key in _KEYS.get(field, ()):
            if key in element:
                return key, element[key]
    return None


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def strategically_merged(target: Any, patch: Any, field: str = "") -> Any:
    """The one of `kubectl apply` and `kubectl patch`: RFC 7386, but lists with keys by element."""
    if isinstance(patch, dict):
        return _strategic_object(target, patch)
    if isinstance(patch, list) and patch and all(key_of(field, element) for element in patch):
        return _strategic_list(target or [], patch, field)
    return copy.deepcopy(patch)


def _strategic_object(target: Any, patch: Object) -> Object:
    if patch.get("$patch") == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != "$patch"}
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith(("$setElementOrder/", "$retainKeys")):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [element for element in result.get(name, []) if element not in value]
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = strategically_merged(result.get(key), value, key)
    return result


def _strategic_list(target: list[Any], patch: list[Any], field: str) -> list[Any]:
    elements = {key_of(field, element): element for element in target}
    for change in patch:
        key = key_of(field, change)
        if change.get("$patch") == "delete":
            elements.pop(key, None)
        else:
            elements[key] = strategically_merged(elements.get(key), change)
    return list(elements.values())


def json_patched(target: Any, operations: list[Object]) -> Any:
    """RFC 6902: add, remove, replace and test. Raises Refused (422) where one of them does not fit."""
    result = copy.deepcopy(target)
    for operation in operations:
        *path, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        try:
            parent = result
            for part in path:
                parent = parent[int(part) if isinstance(parent, list) else part]
            _OPERATIONS[operation["op"]](parent, _index(parent, last), operation.get("value"))
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise Refused(422, "Invalid", f"the server rejected our request: {operation} ({error!r})") from error
    return result


def _index(parent: Any, part: str) -> Any:
    if not isinstance(parent, list):
        return part
    return len(parent) if part == "-" else int(part)


def _add(parent: Any, index: Any, value: Any) -> None:
    if isinstance(parent, list):
        parent.insert(index, value)
    else:
        parent[index] = value


def _remove(parent: Any, index: Any, _: Any) -> None:
    del parent[index]


def _replace(parent: Any, index: Any, value: Any) -> None:
    parent[index]  # it has to be there
    parent[index] = value


def _test(parent: Any, index: Any, value: Any) -> None:
    if parent[index] != value:
        raise ValueError(f"it is {parent[index]!r}")


_OPERATIONS: dict[str, Callable[[Any, Any, Any], None]] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "test": _test,
}
