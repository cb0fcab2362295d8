"""JSON schemas as short texts: what no value depends on, and escapes that are not necessary, would count towards the
longest constraint."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 32
"""Subschemas inside each other."""
_ANNOTATIONS = frozenset({"title", "description", "default", "examples"})
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
INNER_SCHEMAS = ("items", "additionalProperties")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def without_annotations(schema: Any) -> Any:
    """`schema` without its titles, descriptions, defaults and examples, on which no value depends. What is nested
    deeper than a schema may be stays as it is."""
    return _without_annotations(schema, 0)


def _without_annotations(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    plain = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
    for keyword in _NAMED_SCHEMAS:
        if isinstance(named := plain.get(keyword), dict):
            plain[keyword] = {name: _without_annotations(one, depth + 1) for name, one in named.items()}
    for keyword in SCHEMA_LISTS:
        if isinstance(listed := plain.get(keyword), list):
            plain[keyword] = [_without_annotations(one, depth + 1) for one in listed]
    for keyword in INNER_SCHEMAS:
        if keyword in plain:
            plain[keyword] = _without_annotations(plain[keyword], depth + 1)
    return plain


def json_text(value: Any) -> str:
    """`value` as JSON without escapes, with which Chinese text would be twice as long; with them where it has a lone
    surrogate, which no text may have."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
