"""Structural tags as constraints: texts in which some parts are fixed and others have a constraint of their own.

    {"type": "structural_tag", "format": FORMAT}, with the names and the meaning of xgrammar

    const_string value · any_text · json_schema · regex pattern · grammar · tag begin, content, end · optional content
    sequence elements · or elements · triggered_tags triggers, tags · tags_with_separator tags, separator

Anything else is rejected with its path. The constraints inside are checked like those of a whole output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from engine.errors import InvalidRequest, shown

MAX_DEPTH = 8
MAX_FORMATS = 1000
"""Of a tag together; each is a rule of its grammar or several."""

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")
"""What an output with JSON in it cannot have."""
_TEXTS = {"const_string": ("value",), "tag": ("begin", "end"), "tags_with_separator": ("separator",)}
_LISTS = {"sequence": "elements", "or": "elements", "triggered_tags": "tags", "tags_with_separator": "tags"}
_LEAVES = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
_FLAGS = ("at_least_one", "stop_after_first")
_MEMBERS = {
    "const_string": {"value"},
    "any_text": set[str](),
    **{kind: {member} for kind, member in _LEAVES.items()},
    "tag": {"begin", "content", "end"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "triggered_tags": {"triggers", "tags", *_FLAGS},
    "tags_with_separator": {"tags", "separator", *_FLAGS},
}

LeafCheck = Callable[[str, Any], str]


def checked_structural_tag(text: str, check_leaf: LeafCheck, max_whitespace: int) -> tuple[str, set[str]]:
    """The tag in `text` as xgrammar is to read it, and the kinds of constraints inside. `check_leaf` gets the kind and
    the source of one, and returns the source for xgrammar. Beside other kinds xgrammar alone can distinguish white
    space of JSON from theirs, and limits it to `max_whitespace`. Raises InvalidRequest with the path."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise InvalidRequest("structural_tag", problem, "a structural tag") from None
    if not isinstance(tag, dict) or set(tag) != {"type", "format"} or tag["type"] != "structural_tag":
        raise _wrong("", "is not a structural tag", '{"type": "structural_tag", "format": {…}}')
    checker = _Checker(check_leaf)
    checked = checker.checked(tag["format"], "/format", 0)
    if checker.schemas and checker.excluded_by_json is not None:
        raise checker.excluded_by_json
    for schema in checker.schemas if len(checker.kinds) > 1 else ():
        schema["max_whitespace_cnt"] = max_whitespace
    return json.dumps({"type": "structural_tag", "format": checked}), checker.kinds


def _wrong(path: str, problem: str, allowed: str | None = None) -> InvalidRequest:
    return InvalidRequest("structural_tag", f"at {path or '/'}: {problem}", allowed)


class _Checker:
    """Checks the formats of one structural tag."""

    def __init__(self, check_leaf: LeafCheck) -> None:
        self._check_leaf = check_leaf
        self._num_formats = 0
        self.kinds: set[str] = set()
        """Of the constraints inside."""
        self.schemas: list[dict[str, Any]] = []
        """The checked formats of JSON schemas."""
        self.excluded_by_json: InvalidRequest | None = None
        """A text that an output with JSON in it cannot have."""

    def checked(self, given: Any, path: str, depth: int) -> dict[str, Any]:
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in _MEMBERS:
            raise _wrong(path, f"{shown(kind)} is not a format", ", ".join(_MEMBERS))
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS or depth > MAX_DEPTH:
            raise _wrong(path, "has too many formats", f"{MAX_FORMATS}, and {MAX_DEPTH} inside each other")
        if missing := _MEMBERS[kind] - set(given) - set(_FLAGS):
            raise _wrong(path, f"{kind} has no {min(missing)}")
        if unknown := set(given) - _MEMBERS[kind] - {"type"}:
            raise _wrong(path, f"{kind} has no {shown(min(unknown))}", ", ".join(sorted(_MEMBERS[kind])))
        _check_members(given, kind, path)
        for name in _TEXTS.get(kind, ()):
            if CONTROL.search(given[name]) and self.excluded_by_json is None:
                problem = f"{name} {shown(given[name])} has control characters, which are excluded beside JSON"
                self.excluded_by_json = _wrong(path, problem, "line feeds")
        checked = dict(given)
        if kind in _LEAVES:
            checked[_LEAVES[kind]] = self._leaf(kind, given[_LEAVES[kind]], path)
            self.kinds.add(kind)
        if kind == "json_schema":
            self.schemas.append(checked)
        if "content" in given:
            checked["content"] = self.checked(given["content"], f"{path}/content", depth + 1)
        if kind in _LISTS:
            name = _LISTS[kind]
            parts = [self.checked(one, f"{path}/{name}/{i}", depth + 1) for i, one in enumerate(given[name])]
            if name == "tags" and any(part["type"] != "tag" for part in parts):
                raise _wrong(path, "tags has another format", "tag")
            checked[name] = parts
        return checked

    def _leaf(self, kind: str, source: Any, path: str) -> Any:
        try:
            checked = self._check_leaf(kind, source)
        except InvalidRequest as error:
            raise _wrong(path, f"{error.field} {error.problem}", error.allowed) from None
        return json.loads(checked) if kind == "json_schema" else checked


def _check_members(given: dict[str, Any], kind: str, path: str) -> None:
    for name in _TEXTS.get(kind, ()):
        if not isinstance(given[name], str):
            raise _wrong(path, f"{name} {shown(given[name])} is not a string")
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise _wrong(path, f"{name} {shown(given[name])} is not a boolean", "true, false")
    if kind in _LISTS and (not isinstance(given[_LISTS[kind]], list) or not given[_LISTS[kind]]):
        raise _wrong(path, f"{_LISTS[kind]} is not a list of formats", "at least one format")
    if kind == "triggered_tags":
        triggers = given["triggers"]
        if not isinstance(triggers, list) or not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise _wrong(path, f"triggers {shown(triggers)} is not a list of texts", "at least one text")
