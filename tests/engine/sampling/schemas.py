"""JSON schemas and structural tags to try constraints on: random schemas from Hypothesis, and those of the JSON Schema
Test Suite."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.sampling.params import SamplingParams, validate

STRING = {"type": "string"}
SUITE = Path(__file__).parents[2] / "data/json_schema_test_suite.json.gz"


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"null"}' + "}}" * depth


def tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def beside_json(form: dict[str, Any]) -> dict[str, Any]:
    return tagged({"type": "sequence", "elements": [form, {"type": "json_schema", "json_schema": {}}]})


def wrapped(depth: int) -> dict[str, Any]:
    return {"type": "optional", "content": wrapped(depth - 1)} if depth else {"type": "any_text"}


_numbers = st.decimals(-(10**6), 10**6, places=3).map(float)
_counts = st.integers(0, 4)


def _between(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(values, values).map(sorted).map(lambda pair: {low: pair[0], high: pair[1]})


_LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, STRING]),
    _between("minLength", "maxLength", _counts).map(lambda lengths: {"type": "string", **lengths}),
    st.sampled_from([r"^[a-c]{2,3}$", "x.y", r"\d+", "(ab|c)*", r"[^z]\S"]).map(lambda one: {**STRING, "pattern": one}),
    st.sampled_from(["date", "uuid", "ipv4", "email", "uri"]).map(lambda one: {**STRING, "format": one}),
    _between("minimum", "maximum", st.integers(-1000, 1000)).map(lambda bounds: {"type": "integer", **bounds}),
    _between("minimum", "maximum", _numbers).map(lambda bounds: {"type": "number", **bounds}),
    _numbers.map(lambda bound: {"type": "number", "exclusiveMinimum": bound}),
    st.integers(1, 50).map(lambda multiple: {"type": "integer", "multipleOf": multiple}),
    st.lists(st.text(max_size=5) | st.integers(-5, 5) | st.none(), min_size=1, max_size=4).map(
        lambda one: {"enum": one}
    ),
)


@st.composite
def _objects(draw: st.DrawFn, children: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), children, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        _objects(children),
        children.map(lambda one: {"type": "object", "additionalProperties": one}),
        st.tuples(children, _between("minItems", "maxItems", _counts)).map(
            lambda pair: {"type": "array", "items": pair[0], **pair[1]}
        ),
        st.lists(children, min_size=1, max_size=3).map(lambda ones: {"type": "array", "prefixItems": ones}),
        st.lists(children, min_size=1, max_size=3).map(lambda ones: {"anyOf": ones}),
        children.map(lambda one: {"$defs": {"it": one}, "type": "array", "items": one}),
    )


RANDOM_SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=8)


def random_schemas(count: int) -> list[dict[str, Any]]:
    """So many different ones, the same in every process."""
    found: dict[str, dict[str, Any]] = {}

    @given(schema=RANDOM_SCHEMAS)
    @settings(
        max_examples=2 * count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(schema: dict[str, Any]) -> None:
        found.setdefault(json.dumps(schema), schema)

    collect()
    assert len(found) >= count
    return list(found.values())[:count]


def check(**fields: Any) -> SamplingParams:
    """Parameters as the engine takes them. Raises InvalidRequest."""
    return validate(
        SamplingParams(**fields), vocab_size=1000, max_model_len=128, num_prompt_tokens=8, eos_token_ids=[2]
    )


# The JSON Schema Test Suite (tests/data/README.md)

_NEEDS = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    "multipleOf": "integer",
}


def suite_schemas() -> Iterator[tuple[str, Any, list[tuple[Any, bool]]]]:
    """Of each supported schema the keyword that it tries, the schema, and the suite's values with its verdicts."""
    for group in json.loads(gzip.decompress(SUITE.read_bytes()))["groups"]:
        schema = _typed(group["schema"])
        try:
            check(json_schema=json.dumps(schema))
        except InvalidRequest:
            continue
        yield group["keyword"], schema, group["values"]


def _typed(schema: Any) -> Any:
    """With the type that a keyword is for, which the suite leaves out, and constraints require."""
    if not isinstance(schema, dict):
        return schema
    branches = {name: list(map(_typed, schema[name])) for name in ("anyOf", "oneOf", "allOf") if name in schema}
    needed = [kind for keyword, kind in _NEEDS.items() if keyword in schema and "type" not in schema]
    return {**schema, **branches, **({"type": needed[0]} if needed else {})}
