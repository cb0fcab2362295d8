"""What a schema may lose before it becomes a constraint, and its text."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, ValidationError

from engine.errors import InvalidRequest
from engine.sampling.json_schema import _FORMATS, MAX_DEPTH, json_text, without_annotations
from tests.engine.sampling.grammar_walks import Walker
from tests.engine.sampling.schemas import STRING, check, suite_schemas

TEXTS = {"title": "T", "description": "D", "default": {"title": 1}, "examples": [{"description": 2}]}


def test_annotations_are_left_out_wherever_schemas_are() -> None:
    plain = {
        "type": "object",
        "properties": {"a": STRING, "b": {"type": "array", "items": STRING, "prefixItems": [STRING]}},
        "additionalProperties": {"anyOf": [STRING, {"allOf": [{"oneOf": [STRING]}]}]},
        "$defs": {"c": STRING},
        "definitions": {"d": STRING},
    }

    def annotated(schema: Any, *, is_schema: bool = True) -> Any:
        """Only the members of these three are no schemas themselves."""
        if not isinstance(schema, dict):
            return [annotated(one) for one in schema] if isinstance(schema, list) else schema
        names = ("properties", "$defs", "definitions")
        inner = {name: annotated(value, is_schema=not is_schema or name not in names) for name, value in schema.items()}
        return {**inner, **TEXTS} if is_schema else inner

    assert annotated(plain)["properties"]["a"] == {**STRING, **TEXTS}
    assert without_annotations(annotated(plain)) == plain


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": dict.fromkeys(TEXTS, STRING), "required": ["title"]},
        {"$defs": dict.fromkeys(TEXTS, STRING), "$ref": "#/$defs/default"},
        {"const": TEXTS},
        {"enum": [TEXTS, [TEXTS], "title"]},
        {"$ref": "#/kept/description", "kept": {"description": STRING}},
        {"properties": 5, "items": True, "anyOf": TEXTS, "$defs": [TEXTS]},
        True,
        5,
    ],
)
def test_names_and_values_stay(schema: Any) -> None:
    assert without_annotations(schema) == schema


def test_a_schema_of_any_depth_is_read() -> None:
    schema: dict[str, Any] = STRING
    for _ in range(100 * MAX_DEPTH):
        schema = {"items": schema, "title": "T"}
    assert "title" not in without_annotations(schema)


def test_the_same_values_satisfy_a_schema_without_its_annotations() -> None:
    num_annotated = 0
    for _, schema, values in suite_schemas():
        plain = without_annotations(schema)
        check(json_schema=json.dumps(plain))  # supported as before
        judges = [jsonschema.Draft202012Validator(one) for one in (schema, plain)]
        before, after = ([judge.is_valid(value) for value, _ in values] for judge in judges)
        assert before == after
        num_annotated += plain != schema
    assert num_annotated > 0


@given(st.recursive(st.text(max_size=4), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner)))
def test_a_text_of_json_is_valid_unicode_and_means_the_same(value: Any) -> None:
    assert json.loads(json_text(value).encode()) == value


def test_a_text_of_json_has_escapes_only_where_it_needs_them() -> None:
    assert json_text({"名": "漢字"}) == '{"名": "漢字"}'
    assert json_text({"名": "\ud83c"}) == r'{"\u540d": "\ud83c"}'


ZOD_DATE = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))$"
)
ZOD_TIME = r"T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"
ZOD_UUID = (
    r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    r"|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)


@pytest.mark.parametrize(
    ("name", "pattern", "valid", "invalid"),
    [
        ("date", ZOD_DATE, "2024-02-29", "2023-02-29"),
        ("date-time", ZOD_DATE[:-1] + ZOD_TIME, "2024-02-29T10:00:00Z", "2024-02-29T10:00:00+01:00"),
        ("uuid", ZOD_UUID, "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-92d3-a456-426614174000"),
        ("cuid2", "^[a-z]{2}$", "ab", "abc"),
    ],
)
def test_beside_a_pattern_a_format_is_an_annotation(
    walker: Walker, name: str, pattern: str, valid: str, invalid: str
) -> None:
    """As zod writes its dates, times and ids; OpenAI's Node client and Vercel's AI SDK send zod's schemas."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name, "pattern": pattern}}}
    params = check(json_schema=json.dumps(schema))
    assert [walker.accepts(params, json.dumps({"a": value})) for value in (valid, invalid)] == [True, False]


def test_a_text_with_a_format_is_not_empty_anyway(walker: Walker) -> None:
    class Page(BaseModel):
        url: AnyUrl

    assert Page.model_json_schema()["properties"]["url"]["minLength"] == 1
    params = check(json_schema=json.dumps(Page.model_json_schema()))
    assert [walker.accepts(params, json.dumps({"url": url})) for url in ("http://a.b", "")] == [True, False]
    for lengths in ({"minLength": 2}, {"minLength": 1, "maxLength": 2083}):
        with pytest.raises(InvalidRequest, match=r"format together with m..Length is not supported"):
            check(json_schema=json.dumps({"type": "string", "format": "uri", **lengths}))
    with pytest.raises(InvalidRequest, match=r"format together with m..Length is not supported"):
        check(json_schema=json.dumps({"type": "string", "format": "uri-reference", "minLength": 1}))


@pytest.mark.parametrize("name", [name for name in _FORMATS if name != "uri-reference"])
def test_a_format_has_no_empty_text(walker: Walker, name: str) -> None:
    assert not walker.accepts(check(json_schema=json.dumps({"type": "string", "format": name})), '""')


def test_names_of_a_record_are_strings_anyway(walker: Walker) -> None:
    """zod writes `propertyNames` for each record; other names are not supported."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    schema = {"$defs": {"r": record}, "properties": {"a": {"$ref": "#/$defs/r"}, "b": {"$ref": "#/$defs/r"}}}
    params = check(json_schema=json.dumps(schema))
    values = ({"a": {"x": 1}, "b": {}}, {"a": {"x": "1"}})
    assert [walker.accepts(params, json.dumps(value)) for value in values] == [True, False]
    record["propertyNames"] = {"enum": ["x"]}
    with pytest.raises(InvalidRequest, match="propertyNames is not supported"):
        check(json_schema=json.dumps(schema))


def test_a_tagged_union_of_pydantic_requires_its_tag(walker: Walker) -> None:
    class Cat(BaseModel):
        kind: Literal["cat"] = "cat"
        lives: int

    class Dog(BaseModel):
        kind: Literal["dog", "hound"] = "dog"
        tail: bool

    class Pets(BaseModel):
        pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]

    params = check(json_schema=json.dumps(Pets.model_json_schema()))
    for pet in ({"kind": "cat", "lives": 9}, {"kind": "hound", "tail": True}, {"lives": 9}, {"kind": "cat"}):
        try:
            is_valid = bool(Pets.model_validate({"pets": [pet]}))
        except ValidationError:
            is_valid = False
        assert walker.accepts(params, json.dumps({"pets": [pet]})) == is_valid, pet
        assert is_valid == (len(pet) == 2)


def test_a_tag_is_required_unless_the_branches_require_one(walker: Walker) -> None:
    """Without `discriminator`, too, which pydantic-ai leaves out."""
    properties = [{"v": {"const": 1}, "kind": {"const": kind}, "size": {"enum": [kind]}} for kind in ("cat", "dog")]
    for required, is_needed in (([], True), (["size"], False)):
        branches = [{"properties": one, "required": required} for one in properties]
        params = check(json_schema=json.dumps({"oneOf": branches}))
        assert walker.accepts(params, '{"v": 1, "kind": "cat", "size": "cat"}')
        assert walker.accepts(params, '{"size": "dog"}') == (not is_needed)
        assert walker.accepts(params, '{"kind": "dog"}') == is_needed


@pytest.mark.parametrize("more", [[], [STRING], [True]])
def test_branches_that_share_a_constant_have_no_tag(more: list[Any]) -> None:
    branches = [{"properties": {"kind": {"enum": [name, "pet"]}}} for name in ("cat", "dog")]
    with pytest.raises(InvalidRequest, match="oneOf has schemas that a value may satisfy together"):
        check(json_schema=json.dumps({"oneOf": [*branches, *more]}))


def test_the_only_branch_keeps_its_optional_constants(walker: Walker) -> None:
    params = check(json_schema=json.dumps({"oneOf": [{"properties": {"kind": {"const": "cat"}}}]}))
    assert walker.accepts(params, "{}")


LONG = [2**63, -(2**63) - 1, 2**64 - 1, 2**70 + 1]


@pytest.mark.parametrize("number", LONG)
@pytest.mark.parametrize(
    ("place", "path"),
    [
        (lambda one: {"const": one}, "at /: const"),
        (lambda one: {"type": "integer", "enum": [1, one]}, "at /: enum"),
        (lambda one: {"properties": {"a": {"enum": ["x", {"ids": [1, one]}]}}}, "at /properties/a: enum"),
        (lambda one: {"$ref": "#/$defs/a", "$defs": {"a": {"const": [[one]]}}}, "at /$defs/a: const"),
    ],
)
def test_a_value_with_an_integer_of_more_than_64_bits_is_rejected(number: int, place: Any, path: str) -> None:
    """xgrammar writes it as a rounded number."""
    said = f"{path} has {number}, which has more than 64 bits; allowed: integers of 64 bits, or strings"
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        check(json_schema=json.dumps(place(number)))
    tool = {"type": "json_schema", "json_schema": place(number)}
    with pytest.raises(InvalidRequest, match=re.escape("has more than 64 bits")):
        check(structural_tag=json.dumps({"type": "structural_tag", "format": tool}))


def test_integers_of_64_bits_floats_and_booleans_are_values() -> None:
    check(json_schema=json.dumps({"enum": [2**63 - 1, -(2**63), 1e22, True, {"a": [False, str(2**64)]}]}))
