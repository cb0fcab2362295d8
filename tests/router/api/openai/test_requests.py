"""Any bytes as a body become a request that fits the wire, or an error that names a parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sampling.constraints import CONSTRAINTS as CONSTRAINT_FIELDS
from protos.tandem.v1 import common_pb2
from router.api.openai.requests import ChatBody, CompletionBody, RequestBody
from serving.errors import InvalidArgument
from tests.sampling_fields import a_value_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "suffix", "user", "nonsense"})
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
GOOD: dict[type[RequestBody], dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
}


def is_accepted(kind: type[RequestBody], body: bytes) -> bool:
    """Whether `body` becomes requests; otherwise the error must name a field."""
    refusal: InvalidArgument | None = None
    try:
        parsed = kind.parse(body)
    except InvalidArgument as error:
        refusal = error
    if refusal is not None:
        assert refusal.violations[0].field
        return False
    for request in parsed.requests("label"):
        assert request.SerializeToString()
    return True


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(body=BODIES)
def test_any_object_is_accepted_or_rejected(kind: type[RequestBody], body: dict[str, Any]) -> None:
    is_accepted(kind, json.dumps(GOOD[kind] | body).encode())


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(at=st.integers(0, 200), data=st.binary(min_size=1, max_size=3))
def test_any_bytes_are_accepted_or_rejected(kind: type[RequestBody], at: int, data: bytes) -> None:
    body = json.dumps(GOOD[kind] | {"temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1.5}, "n": 2}).encode()
    is_accepted(kind, body[:at] + data + body[at + len(data) :])


OF_GRPC_ALONE = {"bad_word_ids", "prompt_logprobs", *CONSTRAINT_FIELDS}
"""Fields that a completion has under another name, or not at all."""
LISTS = {"stop": ["x"], "stop_token_ids": [1], "bad_words": ["x"], "logit_bias": {"1": 1.0}, "allowed_token_ids": [1]}


@pytest.mark.parametrize("name", sorted(set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - OF_GRPC_ALONE))
def test_every_sampling_parameter_of_the_wire_can_be_given(name: str) -> None:
    body = {"prompt": "x", name: LISTS.get(name) or a_value_of(name)}
    [request] = CompletionBody.parse(json.dumps(body).encode()).requests("label")
    expected = common_pb2.SamplingParams(**{name: a_value_of(name)})
    assert getattr(request.sampling, name) == getattr(expected, name)


SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json_schema": json.dumps(SCHEMA)},
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": None, "description": None, "schema": SCHEMA},
            }
        },
        {"json_schema": json.dumps(SCHEMA)},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
    ({"structured_outputs": {"json": {"const": "漢"}}}, {"json_schema": '{"const": "漢"}'}),
    ({"structured_outputs": {"json": "{}"}}, {"json_schema": "{}"}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": common_pb2.Texts(texts=["a", "b"])}),
    ({"structured_outputs": {"grammar": "root ::= [a]"}}, {"grammar": "root ::= [a]"}),
    ({"structured_outputs": {"structural_tag": "{}"}}, {"structural_tag": "{}"}),
    ({"guided_json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": common_pb2.Texts(texts=["a"])}),
    ({"guided_grammar": "root ::= [a]"}, {"grammar": "root ::= [a]"}),
]


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize(("given", "expected"), CONSTRAINTS, ids=lambda value: str(value)[:50])
def test_a_constraint_keeps_its_meaning(
    kind: type[RequestBody], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    [request] = kind.parse(json.dumps(GOOD[kind] | given).encode()).requests("label")
    wanted = common_pb2.SamplingParams(**expected)
    assert request.sampling.WhichOneof("constraint") == wanted.WhichOneof("constraint")
    for name in expected:
        assert getattr(request.sampling, name) == getattr(wanted, name)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_valid_body_is_accepted(kind: type[RequestBody]) -> None:
    assert is_accepted(kind, json.dumps(GOOD[kind]).encode())
