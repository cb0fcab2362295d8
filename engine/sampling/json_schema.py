"""JSON schemas as constraints: the part of JSON Schema that xgrammar follows exactly, and how large a schema may be.

    text ─▶ parsed ─▶ every reachable subschema checked ─▶ no recursion without a value ─▶ text, for xgrammar

Anything else is rejected with its path and keyword: xgrammar would ignore it, and the output would not satisfy the
schema. As in OpenAI's strict mode objects have the declared properties alone, unless `additionalProperties` says
otherwise. Unknown keywords have no effect, as JSON Schema prescribes.
A check runs in event loops and between steps, so its work is bounded: by the limits below, and by what it keeps.
Schemas of other programs become short texts first (`without_annotations`, `json_text`): a constraint has a limit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from engine.errors import InvalidRequest, shown
from engine.sampling.json_values import constants_of, hashable, listed, long_integer, types_of

MAX_JSON_DEPTH = 100
MAX_DEPTH = 32
"""Subschemas inside each other."""
MAX_PROPERTIES = 500
"""Of all objects of a schema together; the time to compile is quadratic in those of one object."""
MAX_ENUM_VALUES = 1000
MAX_ONE_OF = 64
MAX_SCHEMAS = 2**13
"""Of a schema together, with those that several references reach counted for each."""
MAX_PATTERN_CHARS = 2**14
"""Of all different patterns of a schema together, without those of formats."""
MAX_MULTIPLE = 1000
MAX_INTEGER = 2**53
MAX_NUMBER = 10**15
_NUMBER_DIGITS = 6
"""Decimals of the bounds of a number."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})"
_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = rf"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = r"([01]\d|2[0-3])"
_TIME = rf"{_HOUR}:[0-5]\d:[0-5]\d(\.\d{{1,9}})?(Z|[+-]{_HOUR}:[0-5]\d)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,28}[A-Za-z0-9])?"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    **dict.fromkeys(("duration", "email", "ipv6", "uri", "uri-reference", "uuid")),
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,7}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "time": _TIME,
}
"""With the pattern of those whose values xgrammar spells too freely: the 31st of February, labels of any length."""
_UNSUPPORTED = frozenset({
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "additionalItems", "contains",
    "dependencies", "dependentRequired", "dependentSchemas", "disallow", "divisibleBy", "else", "extends", "id", "if",
    "maxContains", "minContains", "not", "patternProperties", "propertyNames", "then", "unevaluatedItems",
})  # fmt: skip
_ANNOTATIONS = frozenset({"title", "description", "default", "examples"})
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
_INNER_SCHEMAS = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties",
               "unevaluatedProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
_ANYTHING: dict[str, Any] = {}
_ANY_NAME = {"type": "string"}
"""Of `propertyNames` what has no effect: zod writes it for each record."""
_ASSERTIONS = frozenset({"type", *_ALTERNATIVES, *itertools.chain.from_iterable(_OF_TYPE.values())})

PatternTranslation = Callable[[str], str]


def checked_schema(text: str, translated_pattern: PatternTranslation) -> str:
    """The schema in `text` as xgrammar is to read it. `translated_pattern` raises InvalidRequest for a `pattern`.

    Raises InvalidRequest with the path of the subschema and the keyword.
    """
    try:
        schema = json.loads(text)
        json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise InvalidRequest("json_schema", problem, "a JSON schema") from None
    if _depth(schema) > MAX_JSON_DEPTH:
        problem = f"is nested more than {MAX_JSON_DEPTH} deep"
        raise InvalidRequest("json_schema", problem, f"at most {MAX_DEPTH} schemas")
    _Checker(schema, translated_pattern).check()
    return json.dumps(schema)


def _depth(value: Any) -> int:
    """Levels of objects and lists in `value`, counted no further than is allowed."""
    depth, level = 0, [value]
    while level and depth <= MAX_JSON_DEPTH:
        nested = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [item for items in nested for item in items]
        depth += bool(nested)
    return depth


def _wrong(path: str, keyword: str, problem: str, allowed: str | None = None) -> InvalidRequest:
    return InvalidRequest("json_schema", f"at {path or '/'}: {keyword} {problem}", allowed)


class _Checker:
    """Checks a parsed schema, and what it refers to, once."""

    def __init__(self, root: Any, translated_pattern: PatternTranslation) -> None:
        self._root = root
        self._translated_pattern = translated_pattern
        self._checked: set[str] = set()
        self._translated: set[int] = set()
        """The schemas whose pattern is translated already; as below, by the id of a part of `root`."""
        self._patterns: dict[str, str] = {}
        """With their translation."""
        self._same: dict[int, list[int]] = {}
        """The schemas that describe the same value as one with alternatives or a reference."""
        self._references: dict[int, tuple[str, str]] = {}
        """The path and the reference of each schema that has one, in the order of the check."""
        self._values: dict[int, frozenset[Hashable] | None] = {}
        self._types_by_schema: dict[int, set[str]] = {}
        self._disjoint: dict[tuple[int, int], bool] = {}
        self._searched: set[int] = set()
        """The schemas whose values are searched for long integers already."""
        self._num_schemas = 0
        self._num_properties = 0
        self._num_values = 0
        self._num_pattern_chars = 0

    def check(self) -> None:
        self._check(self._root, "", 0)
        self._check_recursion()

    def _check(self, schema: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _wrong(path, "the schema", f"is nested more than {MAX_DEPTH} deep")
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise _wrong(path, "the schema", f"has more than {MAX_SCHEMAS} schemas in all")
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise _wrong(path, shown(schema), "is not supported as a schema", "an object, or true")
        if schema.get("propertyNames") == _ANY_NAME:
            del schema["propertyNames"]
        for keyword in schema:
            if keyword in _UNSUPPORTED:
                raise _wrong(path, keyword, "is not supported")
        self._check_combination(schema, path)
        for child, where in self._children(schema, path):
            self._check(child, where, depth + 1)
        if "oneOf" in schema:
            self._check_disjoint(schema["oneOf"], path)
        if "$ref" in schema:
            self._follow(schema, path, depth)

    def _check_combination(self, schema: dict[str, Any], path: str) -> None:
        """One of the alternatives, or a type with its keywords."""
        given = [keyword for keyword in _ALTERNATIVES if keyword in schema]
        if not given:
            self._check_typed(schema, path)
            return
        [keyword, *others] = [*given, *(name for name in schema if name in _ASSERTIONS and name not in given)]
        if keyword in ("enum", "const"):
            others = [name for name in others if name != "type"]
            self._check_values(schema, keyword, path)
        if others:
            raise _wrong(path, others[0], f"next to {keyword} is not supported", "one of them, or a schema for each")
        if keyword in ("anyOf", "oneOf", "allOf"):
            self._check_branches(schema[keyword], keyword, path)
            self._same[id(schema)] = [id(branch) for branch in schema[keyword]]

    def _check_values(self, schema: dict[str, Any], keyword: str, path: str) -> None:
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise _wrong(path, keyword, f"{shown(values)} leaves no value", "a list of at least one value")
        self._num_values += len(values)
        if self._num_values > MAX_ENUM_VALUES:
            raise _wrong(path, keyword, f"makes more than {MAX_ENUM_VALUES} values in all")
        types = self._types(schema, path) if "type" in schema else set(_TYPES)
        for value in values:
            if types.isdisjoint(types_of(value)):
                raise _wrong(path, keyword, f"has {shown(value)}, which is not of type {', '.join(sorted(types))}")
        if id(schema) not in self._searched:  # it may be reached by several references
            self._searched.add(id(schema))
            if (number := long_integer(values)) is not None:
                problem = f"has {shown(number)}, which has more than 64 bits"
                raise _wrong(path, keyword, problem, "integers of 64 bits, or strings")

    def _check_branches(self, branches: Any, keyword: str, path: str) -> None:
        if not isinstance(branches, list) or not branches:
            raise _wrong(path, keyword, f"{shown(branches)} is not a list of schemas", "at least one schema")
        if keyword == "allOf" and len(branches) > 1:
            raise _wrong(path, keyword, f"of {len(branches)} schemas is not supported", "one schema")
        if keyword == "oneOf" and len(branches) > MAX_ONE_OF:
            raise _wrong(path, keyword, f"has {len(branches)} schemas", f"at most {MAX_ONE_OF}")

    def _check_disjoint(self, branches: list[Any], path: str) -> None:
        resolved = [self._resolved(branch, path) for branch in branches]
        for one, other in itertools.combinations(resolved, 2):
            pair = id(one), id(other)
            if pair not in self._disjoint:
                self._disjoint[pair] = self._are_disjoint(one, other, path)
            if not self._disjoint[pair]:
                self._require_tag(one, other, path)
                self._disjoint[pair] = True

    def _require_tag(self, one: dict[str, Any], other: dict[str, Any], path: str) -> None:
        """Makes a property that tells two objects apart required in both: pydantic leaves that out for a tag with a
        default, and rejects values without."""
        tags = [
            name
            for name, property_ in _properties(one).items()
            if self._have_other_constants(
                self._resolved(property_, path), self._resolved(_properties(other).get(name), path)
            )
        ]
        if not tags or any(self._value_types(branch, path) != {"object"} for branch in (one, other)):
            problem = "has schemas that a value may satisfy together"
            raise _wrong(path, "oneOf", problem, "different types, or a property with other constants")
        for branch in (one, other):
            branch["required"] = list(dict.fromkeys([*listed(branch.get("required")), tags[0]]))

    def _check_typed(self, schema: dict[str, Any], path: str) -> None:
        types = self._types(schema, path)
        for type_name, keywords in _OF_TYPE.items():
            present = [keyword for keyword in keywords if keyword in schema]
            if present and not types and type_name in ("string", "number"):
                raise _wrong(path, present[0], "requires type")
        if not types:
            types = {name for name in ("object", "array") if not schema.keys().isdisjoint(_OF_TYPE[name])}
            if len(types) > 1:
                raise _wrong(path, "properties and items together", "require type")
            if types:
                schema["type"] = next(iter(types))  # xgrammar ignores maxProperties without
        if "object" in types:
            self._check_object(schema, path)
        if "array" in types:
            self._check_array(schema, path)
        if "string" in types:
            self._check_string(schema, path)
        if types & {"integer", "number"}:
            _check_bounds(schema, path, is_integer="number" not in types)

    def _types(self, schema: Mapping[str, Any], path: str) -> set[str]:
        given = schema.get("type", [])
        types = given if isinstance(given, list) else [given]
        for name in types:
            if name not in _TYPES:
                raise _wrong(f"{path}/type", shown(name), "is not a type", ", ".join(_TYPES))
        if not types and "type" in schema:
            raise _wrong(path, "type", "is an empty list", ", ".join(_TYPES))
        return set(types)

    def _check_object(self, schema: dict[str, Any], path: str) -> None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise _wrong(path, "properties", f"{shown(properties)} is not an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _wrong(path, "required", f"{shown(required)} is not a list of names")
        if undeclared := [name for name in required if name not in properties]:
            raise _wrong(path, "required", f"names {shown(undeclared[0])}, which is not in properties")
        self._num_properties += len(properties)
        if self._num_properties > MAX_PROPERTIES:
            raise _wrong(path, "properties", f"makes more than {MAX_PROPERTIES} properties in all")
        _check_count(schema, path, "minProperties", "maxProperties")
        if schema.get("minProperties") and (not properties or schema.get("additionalProperties", False) is not False):
            problem = "without properties" if not properties else "together with additionalProperties"
            raise _wrong(path, "minProperties", f"{problem} is not supported")
        if not properties and "unevaluatedProperties" not in schema:
            schema.setdefault("additionalProperties", True)  # with another type or maxProperties xgrammar gives it none
        if schema.get("unevaluatedProperties", False) is not False:
            raise _wrong(path, "unevaluatedProperties", "is not supported", "additionalProperties, or false")

    def _check_array(self, schema: dict[str, Any], path: str) -> None:
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise _wrong(path, "prefixItems", f"{shown(prefix)} is not a list of schemas")
        if isinstance(schema.get("items"), list):
            raise _wrong(path, "items", "as a list is not supported", "prefixItems")
        if schema.get("uniqueItems", False) is not False:
            raise _wrong(path, "uniqueItems", "is not supported", "false")
        _check_count(schema, path, "minItems", "maxItems")
        if schema.get("maxItems", len(prefix)) < len(prefix):
            raise _wrong(path, "maxItems", f"is less than the {len(prefix)} prefixItems")
        if not prefix:
            schema.setdefault("items", True)  # to xgrammar a list of nothing is empty

    def _check_string(self, schema: dict[str, Any], path: str) -> None:
        _check_count(schema, path, "minLength", "maxLength")
        if "pattern" in schema:
            schema.pop("format", None)  # an annotation, as in JSON Schema: zod writes both for dates, times and ids
        if schema.get("minLength") == 1 and schema.get("format") not in (None, "uri-reference"):
            del schema["minLength"]  # pydantic's AnyUrl has it; no text of these formats is empty
        given = [keyword for keyword in ("pattern", "format", "minLength", "maxLength") if keyword in schema]
        if len(given) > 1 and set(given) != {"minLength", "maxLength"}:
            raise _wrong(path, given[0], f"together with {given[1]} is not supported")
        if "format" in schema:
            name = schema["format"]
            if not isinstance(name, str) or name not in _FORMATS:
                raise _wrong(path, "format", f"{shown(name)} is not supported", ", ".join(sorted(_FORMATS)))
            if (pattern := _FORMATS[name]) is not None:
                schema["pattern"] = pattern
                del schema["format"]
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str) or not schema["pattern"]:
                raise _wrong(path, "pattern", f"{shown(schema['pattern'])} is not a regular expression")
            if id(schema) not in self._translated:  # it may be reached by several references
                schema["pattern"] = self._translation(schema["pattern"], path)
                self._translated.add(id(schema))

    def _translation(self, pattern: str, path: str) -> str:
        if pattern not in self._patterns:
            self._num_pattern_chars += len(pattern) if pattern not in _FORMATS.values() else 0
            if self._num_pattern_chars > MAX_PATTERN_CHARS:
                problem = f"brings the schema's patterns to {self._num_pattern_chars} characters"
                raise _wrong(path, "pattern", problem, f"{MAX_PATTERN_CHARS} characters in all")
            try:
                self._patterns[pattern] = self._translated_pattern(pattern)
            except InvalidRequest as error:
                raise _wrong(path, "pattern", error.problem, error.allowed) from None
        return self._patterns[pattern]

    def _children(self, schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
        for keyword in _SCHEMA_LISTS:
            for index, child in enumerate(listed(schema.get(keyword))):
                yield child, f"{path}/{keyword}/{index}"
        for name, child in _properties(schema).items():
            yield child, f"{path}/properties/{name[:64]}"
        for keyword in _INNER_SCHEMAS:
            if schema.get(keyword, False) is not False:
                yield schema[keyword], f"{path}/{keyword}"

    # References

    def _follow(self, schema: dict[str, Any], path: str, depth: int) -> None:
        reference = schema["$ref"]
        target = self._target(reference, path)
        self._same[id(schema)] = [id(target)]
        self._references.setdefault(id(schema), (path, reference))
        if reference not in self._checked:
            self._checked.add(reference)
            self._check(target, reference.removeprefix("#"), depth + 1)

    def _target(self, reference: Any, path: str) -> Any:
        allowed = "#, or a pointer like #/$defs/name"
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            problem = f"{shown(reference)} is not within this schema: remote $ref is not supported"
            raise _wrong(path, "$ref", problem, allowed)
        if "~" in reference or "%" in reference or "" in reference.split("/")[1:]:
            problem = f"{shown(reference)} has an escape or an empty name, which is not supported"
            raise _wrong(path, "$ref", problem, allowed)
        target = self._root
        for part in reference.split("/")[1:]:
            if not isinstance(target, dict) or part not in target:
                raise _wrong(path, "$ref", f"{shown(reference)} does not exist", allowed)
            target = target[part]
        return target

    def _check_recursion(self) -> None:
        """A value must not consist of nothing but itself."""
        try:
            TopologicalSorter(self._same).prepare()
        except CycleError as error:
            cycle = set(error.args[1])
            path, reference = next(found for schema, found in self._references.items() if schema in cycle)
            problem = f"{shown(reference)} is a recursion without a value in between"
            raise _wrong(path, "$ref", problem) from None

    def _are_disjoint(self, one: dict[str, Any], other: dict[str, Any], path: str) -> bool:
        """Whether no value satisfies both, as far as types and constants of required properties show it."""
        ours, theirs = self._value_types(one, path), self._value_types(other, path)
        if ours.isdisjoint(theirs):
            return True
        if self._constants(one) is not None and self._constants(other) is not None:
            return self._have_other_constants(one, other)
        if ours != {"object"} or theirs != {"object"}:
            return False
        shared = {*listed(one.get("required"))} & {*listed(other.get("required"))}
        properties = [
            (self._resolved(_properties(one).get(name), path), self._resolved(_properties(other).get(name), path))
            for name in shared
        ]
        return any(self._have_other_constants(*pair) for pair in properties)

    def _have_other_constants(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        values, other_values = self._constants(one), self._constants(other)
        return values is not None and other_values is not None and values.isdisjoint(other_values)

    def _constants(self, schema: dict[str, Any]) -> frozenset[Hashable] | None:
        """The values of a schema that lists them."""
        if id(schema) not in self._values:
            values = constants_of(schema)
            self._values[id(schema)] = None if values is None else frozenset(map(hashable, values))
        return self._values[id(schema)]

    def _resolved(self, schema: Any, path: str) -> dict[str, Any]:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], path)
        return schema if isinstance(schema, dict) else _ANYTHING

    def _value_types(self, schema: dict[str, Any], path: str) -> set[str]:
        """The types of the schema's values; integers count as numbers."""
        if id(schema) not in self._types_by_schema:
            types = self._types(schema, path) or set(_TYPES)
            if (values := constants_of(schema)) is not None:
                types = {name for value in values for name in types_of(value)}
            types = {"number" if name == "integer" else name for name in types}
            self._types_by_schema[id(schema)] = types
        return self._types_by_schema[id(schema)]


def _check_count(schema: dict[str, Any], path: str, least: str, most: str) -> None:
    for keyword in (least, most):
        value = schema.get(keyword, 0)
        if type(value) is not int or not 0 <= value < 2**31:
            raise _wrong(path, keyword, f"{shown(value)} is out of range", "0..2147483647")
    if schema.get(least, 0) > schema.get(most, 2**31):
        raise _wrong(path, least, f"{schema[least]} is greater than {most} {schema[most]}")


def _check_bounds(schema: dict[str, Any], path: str, *, is_integer: bool) -> None:
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = schema.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(path, keyword, f"{shown(value)} is not a number")
        if is_integer and (abs(value) > MAX_INTEGER or value != int(value)):
            raise _wrong(path, keyword, f"{shown(value)} is out of range", "whole numbers up to 2^53 for an integer")
        if not is_integer and (abs(value) > MAX_NUMBER or round(value, _NUMBER_DIGITS) != value):
            allowed = f"up to {MAX_NUMBER:g} with at most {_NUMBER_DIGITS} decimals"
            raise _wrong(path, keyword, f"{shown(value)} is out of range", allowed)
    lows = [schema[keyword] for keyword in ("minimum", "exclusiveMinimum") if keyword in schema]
    highs = [schema[keyword] for keyword in ("maximum", "exclusiveMaximum") if keyword in schema]
    if lows and highs and not is_integer:
        # xgrammar writes at most six decimals: a smaller open range has no value that it can write.
        is_open = "exclusiveMinimum" in schema or "exclusiveMaximum" in schema
        if min(highs) - max(lows) < (10 ** (1 - _NUMBER_DIGITS) if is_open else 0):
            raise _wrong(path, "maximum", f"leaves no value between {max(lows)} and {min(highs)}")
    if "multipleOf" in schema:
        _check_multiple(schema, path, has_bounds=bool(lows or highs), is_integer=is_integer)


def _check_multiple(schema: dict[str, Any], path: str, *, has_bounds: bool, is_integer: bool) -> None:
    value = schema["multipleOf"]
    if not is_integer or has_bounds:
        raise _wrong(path, "multipleOf", "is not supported here", "for integers without bounds")
    if type(value) is not int or not 0 < value <= MAX_MULTIPLE:
        raise _wrong(path, "multipleOf", f"{shown(value)} is out of range", f"1..{MAX_MULTIPLE}")


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def without_annotations(schema: Any, depth: int = 0) -> Any:
    """`schema` without its titles, descriptions, defaults and examples, on which no value depends. What is nested
    deeper than a schema may be stays as it is."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    plain = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
    for keyword in _NAMED_SCHEMAS:
        if isinstance(named := plain.get(keyword), dict):
            plain[keyword] = {name: without_annotations(one, depth + 1) for name, one in named.items()}
    for keyword in _SCHEMA_LISTS:
        if isinstance(listed := plain.get(keyword), list):
            plain[keyword] = [without_annotations(one, depth + 1) for one in listed]
    for keyword in _INNER_SCHEMAS:
        if keyword in plain:
            plain[keyword] = without_annotations(plain[keyword], depth + 1)
    return plain


def json_text(value: Any) -> str:
    """`value` as JSON without escapes, with which Chinese text would be twice as long; with them where it has a lone
    surrogate, which no text may have."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
