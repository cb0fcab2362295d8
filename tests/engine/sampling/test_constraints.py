"""Rows 45-59 of the bad-input catalogue, and what the constraints that pass really admit."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.sampling.params import SamplingParams, validate
from engine.sampling.structural_tag import _MEMBERS
from tests.engine.sampling.grammar_walks import Walker
from tests.engine.sampling.schemas import (
    RANDOM_SCHEMAS,
    STRING,
    beside_json,
    check,
    nested,
    suite_schemas,
    tagged,
    wrapped,
)

INTEGER = {"type": "integer"}
JUDGE = jsonschema.Draft202012Validator
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])
"""Others are spelling alone: a date may be the 31st of February."""


# What is rejected

REJECTED: list[tuple[str, Any, str]] = [
    # row 46: no regular expression
    ("regex", "[", r"at position 0: '\[' cannot be read"),
    ("regex", "a)", r"at position 1: '\)' closes no group"),
    ("regex", "a\\", "cannot be read"),
    ("regex", "", "0 bytes; allowed: a text of 1..4096 bytes"),
    ("regex", 5, "5 is not a string"),
    ("regex", "a" * 5000, "has 5000 bytes"),
    ("regex", "\ud800", "lone surrogates"),
    ("regex", "(" * 101 + ")" * 101, "more than 100 deep"),
    # row 48: constructs that xgrammar has not, or takes for something else
    ("regex", "(?=a)b", "at position 0: '\\(\\?=a' is not supported"),
    ("regex", "(?<=a)b", "is not supported"),
    ("regex", "(?P<x>a)", "is not supported"),
    ("regex", r"(a)\1", r"at position 3: \\1 is not supported"),
    ("regex", r"\bword\b", r"at position 0: \\b is not supported"),
    ("regex", r"\p{L}", r"\\p is not supported"),
    ("regex", r"\Aa\Z", r"\\A is not supported"),
    ("regex", "a^b", r"at position 1: \^ here is not supported"),
    ("regex", "a$b", r"at position 1: \$ here is not supported"),
    ("regex", r"a\|^b", r"at position 3: \^ here is not supported"),
    ("regex", "[^]abc]", r"at position 0: '\[\^\]abc\]' cannot be read"),
    ("regex", r"[^\s\S]", r"at position 0: .*, which matches no character,"),
    ("regex", "a{,3}", r"at position 1: '\{,3\}' cannot be read"),
    ("regex", "a{1000000000}", "cannot be read"),
    # row 49, 50
    ("json_schema", "{", "json_schema: is not JSON: .*line 1 column 2"),
    ("json_schema", "5", "at /: 5 is not supported as a schema"),
    ("json_schema", {"properties": {"x": {"type": "stsring"}}}, "at /properties/x/type: 'stsring' is not a type"),
    # row 51, 52
    ("json_schema", {"$ref": "#"}, r"at /: \$ref '#' is a recursion without a value in between"),
    ("json_schema", {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, INTEGER]}}, "$ref": "#/$defs/a"}, "recursion"),
    ("json_schema", {"$ref": "http://169.254.169.254/"}, "remote .ref is not supported"),
    ("json_schema", {"$ref": "#/$defs/x"}, r"'#/\$defs/x' does not exist"),
    # row 53, 54
    ("json_schema", "[" * 5000 + "]" * 5000, "nested too deeply|nested more than 100 deep"),
    ("json_schema", nested(34), "the schema is nested more than 32 deep"),
    ("json_schema", {"const": json.loads("[" * 101 + "]" * 101)}, "nested more than 100 deep"),
    ("json_schema", {"enum": list(range(1001))}, "enum makes more than 1000 values"),
    ("json_schema", {"enum": list(range(10**5))}, "bytes; allowed: a text of 1..65536 bytes"),
    ("json_schema", {"properties": {f"p{i}": True for i in range(501)}}, "more than 500 properties"),
    # row 55
    ("json_schema", {"enum": []}, r"enum \[\] leaves no value"),
    ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 is greater than maxLength 2"),
    ("json_schema", {"type": "number", "minimum": 3, "maximum": 2}, "maximum leaves no value between 3 and 2"),
    ("json_schema", {"type": "object", "required": ["a"]}, "required names 'a', which is not in properties"),
    ("json_schema", {"properties": {"a": False}}, "at /properties/a: False is not supported as a schema"),
    # what xgrammar would ignore
    ("json_schema", {"type": "string", "not": {"const": "a"}}, "at /: not is not supported"),
    ("json_schema", {"items": {"if": {}, "then": {}}}, "at /items: if is not supported"),
    ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
    ("json_schema", {"type": "string", "pattern": "a", "minLength": 3}, "pattern together with minLength"),
    ("json_schema", {"type": "string", "pattern": 'a"'}, "pattern at position 1: '\"', which JSON would escape"),
    ("json_schema", {"type": "string", "format": "json-pointer"}, "format 'json-pointer' is not supported"),
    ("json_schema", {"type": "string", "format": ["date"]}, "format \\['date'\\] is not supported"),
    ("json_schema", {"type": "string", "pattern": "[^]abc]"}, "cannot be read"),
    ("json_schema", {"type": "string", "pattern": 'a["]'}, "which JSON would escape"),
    ("json_schema", {"type": "string", "pattern": "[^ -~\x80-\U0010ffff]"}, "which JSON would escape"),
    ("json_schema", {"minProperties": 1}, "minProperties without properties is not supported"),
    ("json_schema", {"$ref": "#/$defs//a", "$defs": {"": {"a": {}}}}, "has an escape or an empty name"),
    ("json_schema", {"type": "integer", "minimum": 1, "multipleOf": 2}, "multipleOf is not supported here"),
    ("json_schema", {"type": "integer", "minimum": 0.5}, "minimum 0.5 is out of range"),
    ("json_schema", {"type": "number", "minimum": 1e-9}, "at most 6 decimals"),
    ("json_schema", {"minimum": 3}, "minimum requires type"),
    ("json_schema", {"anyOf": [INTEGER, STRING], "minimum": 3}, "minimum next to anyOf is not supported"),
    ("json_schema", {"allOf": [INTEGER, {"minimum": 3}]}, "allOf of 2 schemas"),
    ("json_schema", {"oneOf": [INTEGER, {"type": "number"}]}, "oneOf has schemas that a value may satisfy together"),
    ("json_schema", {"type": "string", "enum": ["a", 1]}, "enum has 1, which is not of type string"),
    # row 56, 59, and the rest
    ("grammar", "x" * 2**17, "bytes; allowed"),
    (
        "grammar",
        "root ::= a\na[max_tokens=2] ::= [a-z]*",
        r"grammar: has a rule with attributes: '\[max_tokens=2\] ::='; allowed: name ::= …",
    ),
    ("grammar", 'root[temperature=0.2]  ::= "a"', "has a rule with attributes"),
    ("grammar", 'root ::= ["] [\\]] # "\na[lazy] ::= "b"', "has a rule with attributes"),
    ("grammar", "root ::= a # x\ra[max_tokens=2] ::= [a-z]*", r"attributes: '\[max_tokens=2\] ::='"),
    ("grammar", 'root ::= a\na[capture="]", max_tokens=2] ::= [a-z]*', "has a rule with attributes"),
    ("grammar", 'root ::= a\na[capture = "#[\'" , stop_capture="]" ]::= [a-z]*', "has a rule with attributes"),
    ("grammar", 'root ::= x [a-z]\nx ::= "a" (= "b")', r"lookahead, \(= …\), which is not supported; allowed: texts"),
    ("grammar", 'root ::= ["(="] "(=" x # (=\nx ::= "a"(="b")', "has a lookahead"),
    ("grammar", "root ::= (Token # an id\n (0) | [a-z])", "has Token, which is not supported; allowed: texts"),
    ("grammar", "root ::= ExcludeToken(5)", "has ExcludeToken, which is not supported"),
    ("grammar", 'root ::= TokenTagDispatch((5, x))\nx ::= "b"', "has TokenTagDispatch, which is not supported"),
    ("grammar", 'root ::= "a" | Regex("a(?=c)b")', "has Regex, which is not supported"),
    ("grammar", 'root ::= "a"\0 | "b"', "contains the character U\\+0000; allowed: its escape"),
    ("choice", [], "not a list of texts; allowed: 1..1000 texts"),
    ("choice", ["a", ""], r"choice\[1\]: has 0 bytes"),
    ("choice", ["x" * 60_000] * 2, "the texts are too long"),
    ("json_object", "yes", "not a boolean"),
    *(
        ("structural_tag", tag, message)
        for tag, message in (
            ("{", "structural_tag: is not JSON"),
            ("[" * 9999, "is nested too deeply|is not JSON"),
            ({"format": {"type": "any_text"}}, "at /: is not a structural tag; allowed:"),
            (tagged({"type": "xml"}), "at /format: 'xml' is not a format; allowed: const_string, any_text"),
            (tagged({"type": "regex"}), "at /format: regex has no pattern"),
            (tagged({"type": "regex", "pattern": None}), "at /format: regex None is not a string"),
            (tagged({"type": "grammar", "grammar": False}), "at /format: grammar False is not a string"),
            (tagged({"type": "grammar", "grammar": 'root ::= "a" (= "b")'}), "at /format: grammar has a lookahead"),
            (tagged({"type": "any_text", "excludes": []}), "at /format: any_text has no 'excludes'"),
            (tagged({"type": "sequence", "elements": []}), "elements is not a list of formats"),
            (
                tagged({"type": "or", "elements": [{"type": "regex", "pattern": "(?=a)"}]}),
                "at /format/elements/0: regex at",
            ),
            (tagged({"type": "json_schema", "json_schema": {"not": {}}}), "json_schema at /: not is not supported"),
            (
                tagged({"type": "tag", "begin": 1, "content": {"type": "any_text"}, "end": ""}),
                "begin 1 is not a string",
            ),
            (
                tagged({"type": "triggered_tags", "triggers": [""], "tags": [{"type": "any_text"}]}),
                "not a list of texts",
            ),
            (tagged({"type": "triggered_tags", "triggers": ["a"], "tags": [{"type": "any_text"}]}), "another format"),
            (tagged({"type": "sequence", "elements": [{"type": "any_text"}] * 1001}), "too many formats"),
            (
                beside_json({"type": "const_string", "value": "a\tb"}),
                r"elements/0: value 'a\\tb' has control characters",
            ),
            (beside_json({"type": "tag", "begin": "\r", "content": {"type": "any_text"}, "end": ""}), "0: begin '"),
            (tagged(wrapped(9)), "too many formats; allowed: 1000, and 8 inside each other"),
        )
    ),
]


@pytest.mark.parametrize(("name", "value", "message"), REJECTED, ids=lambda value: repr(value)[:40])
def test_a_constraint_that_cannot_be_followed_is_rejected_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        check(**{name: value})
    assert len(str(raised.value)) < 500


SCHEMA_KEYWORDS = [
    *("type", "properties", "required", "additionalProperties", "minProperties", "maxProperties", "items"),
    *("prefixItems", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum"),
    *("maximum", "exclusiveMinimum", "multipleOf", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "$defs"),
]
ODD = st.sampled_from([None, True, False, 0, 1, -1, 2.5, "x", "a+", "object", "string", "array", "#", "#/$defs/a"])
MALFORMED_SCHEMAS = st.recursive(
    st.just({}) | ODD,
    lambda inner: st.dictionaries(
        st.sampled_from(SCHEMA_KEYWORDS),
        inner | st.lists(inner, max_size=2) | st.builds(lambda one: {"a": one}, inner),
        max_size=3,
    ),
    max_leaves=6,
)
MALFORMED_TAGS = st.recursive(
    st.just({"type": "any_text"}),
    lambda inner: st.one_of(
        [
            st.fixed_dictionaries(
                {
                    "type": st.just(kind),
                    **{member: inner | ODD | st.lists(inner | ODD, max_size=2) for member in members},
                }
            )
            for kind, members in _MEMBERS.items()
        ]
    ),
    max_leaves=5,
)


@given(schema=MALFORMED_SCHEMAS, tag=MALFORMED_TAGS)
@settings(max_examples=400)
def test_a_malformed_constraint_is_admitted_or_rejected_by_name(schema: Any, tag: dict[str, Any]) -> None:
    for name, value in (("json_schema", schema), ("structural_tag", tagged(tag))):
        with contextlib.suppress(InvalidRequest):
            check(**{name: json.dumps(value)})


def test_two_constraints_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="regex: is given together with json_object; allowed: at most one of"):
        check(json_object=True, regex="a")


def test_what_looks_like_attributes_a_lookahead_or_a_macro_is_none(walker: Walker) -> None:
    for grammar, text in (
        ('root ::= ["] "a[b] ::= c"', '"a[b] ::= c'),
        ('root ::= "\\"[b] ::= " # a[b] ::= c', '"[b] ::= '),
        ("root ::= [a[] # ]\n", "["),
        ("root ::= [^\\]] ", "["),
        ('root ::= a["\\]] "a[lazy] ::= b"\na ::= "x"', "x]a[lazy] ::= b"),
        ('root ::= a["] ", lazy] ::= b"\na ::= "x"', 'x", lazy] ::= b'),
        ('root ::= a[b="]" [c] ::= "\na ::= "x"', "x= [c] ::= "),
        ('root ::= a # a[lazy] ::= b\ra ::= "x"', "x"),
        ('root ::= "(= b) Token(5) Regex(" [(=)] # (= Token(5)\n', "(= b) Token(5) Regex(="),
        ('root ::= Tokens a.Token Regex-a\nTokens ::= "x"\na.Token ::= "y"\nRegex-a ::= "z"', "xyz"),
        ('root ::= TagDispatch(("<a>", x)) Substring("a", "b")\nx ::= "b"', "c<a>ba"),
    ):
        assert walker.accepts(check(grammar=grammar), text), grammar


def test_an_end_that_is_ignored_contradicts_a_constraint() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos: contradicts a constraint"):
        check(regex="a", ignore_eos=True)
    with pytest.raises(InvalidRequest, match="this model has no EOS"):
        validate(SamplingParams(regex="a"), vocab_size=9, max_model_len=99, num_prompt_tokens=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": "root ::= foo"}, 'grammar: xgrammar cannot compile it: .*Rule "foo" is not defined'),
        ({"grammar": "root ::= " + "(" * 30_000}, "Nest layer exceeded"),
        ({"grammar": "start: 'a'"}, "line 1, column 6"),
        ({"grammar": "root ::= " + "[" * 60_000}, "xgrammar cannot compile it"),
        ({"grammar": "root ::= " + '"\\' * 30_000}, "xgrammar cannot compile it"),
        ({"regex": "a**"}, "Two consecutive repetition modifiers"),
        ({"regex": "[z-a]"}, "lower bound is larger"),
        ({"json_schema": {"type": "array", "prefixItems": [INTEGER], "minItems": 2}}, "minItems is greater"),
    ],
)
def test_what_only_the_compiler_can_reject_says_why(walker: Walker, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        walker.compiled(check(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a+)+"},
        {"regex": "a{100000000}"},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(.*a){20}b"},
        {"regex": "|".join(f"w{number}" for number in range(600))},
        {"json_schema": nested(32)},
        {"json_schema": {"enum": [f"value {number}" for number in range(1000)]}},
        {"json_schema": {"properties": {f"p{number}": STRING for number in range(500)}}},
        {"json_schema": {"type": "array", "minItems": 2**31 - 1}},
        {"json_schema": {"type": "string", "maxLength": 2**31 - 1}},
        {"grammar": 'root ::= root root | "a" | ""'},
    ],
    ids=lambda value: str(value)[:50],
)
def test_the_largest_constraints_that_are_admitted_compile(walker: Walker, fields: dict[str, Any]) -> None:
    """Rows 45, 47 and 51: bounded. Any of them takes a second at the most on an idle machine."""
    assert walker.compiled(check(**fields)).memory_size_bytes < 2**24


# What is admitted

WITHOUT_TIME_LIMIT = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def patterns(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "{0,2}", "{1,2}", "{2}", "{1,}"])
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(parts, repeats).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


RANDOM_PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "c", "[ab]", "[^a]", "[!-~]", r"\d", r"\D", r"\w", "."]), patterns, max_leaves=6
)
SHORT_TEXTS = ["".join(text) for length in range(5) for text in itertools.product('ab1"', repeat=length)]


def assert_matched_alike(walker: Walker, pattern: str, in_json: bool) -> None:
    """As by Python; in JSON no character is escaped."""
    fields = {"json_schema": json.dumps({**STRING, "pattern": pattern})} if in_json else {"regex": pattern}
    source = random.Random(pattern)
    for text in source.sample(SHORT_TEXTS, 40):
        is_accepted = walker.accepts(check(**fields), f'"{text}"' if in_json else text)
        is_matched = re.fullmatch(pattern, text, re.ASCII) is not None
        assert is_accepted == (is_matched and not (in_json and '"' in text)), (pattern, text)


@given(pattern=RANDOM_PATTERNS, in_json=st.booleans())
@settings(max_examples=60, **WITHOUT_TIME_LIMIT)  # type: ignore[arg-type]
def test_a_pattern_matches_what_python_matches(walker: Walker, pattern: str, in_json: bool) -> None:
    assert_matched_alike(walker, pattern, in_json)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(pattern=RANDOM_PATTERNS, in_json=st.booleans())
@settings(max_examples=4000, **WITHOUT_TIME_LIMIT)  # type: ignore[arg-type]
def test_thousands_of_patterns_match_what_python_matches(walker: Walker, pattern: str, in_json: bool) -> None:
    assert_matched_alike(walker, pattern, in_json)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"a(x\d+)?b", r"(c|((c|[ab])){1,2})", r"-?\d+(\.\d+)?", "^$", "^a$|b", r"[^\s]\S.\W"),
        *(r"[\^a]", r"[\^]", r"[\^-z]", r"[\^+-]", r"[\^^]", r"[+\^]{2}", r"[^\^a]"),
    ],
)
def test_a_pattern_of_a_schema_is_not_an_approximation(walker: Walker, pattern: str) -> None:
    """The first two were, where xgrammar makes an automaton of them."""
    for text in [*SHORT_TEXTS, "a1b", "ax1b", "bccc", "-1.5", "1.", "ab b", "é-.é", "^", "_", "z", "+^"]:
        is_valid = re.fullmatch(pattern, text, re.ASCII) is not None and '"' not in text
        assert walker.accepts(check(json_schema={**STRING, "pattern": pattern}), f'"{text}"') == is_valid, text


REGEXES = [
    r"[a-z]+@[a-z]+\.(com|org)", r"\d{3}-\d{4}", r"(?:ab|c)*d?", r"^a|b$", r".{2,5}", r"\s\S\w\W\D", r"[^\s]{2}",
    r"[^\S\n]", r"[^\S]{3}", r"[^,\S]a", r"[^\\S]{3}",
    r"[\^-\^]", r"[\^-^ab]",
    r"[\^+]", r"[\^]{2}", r"[\^-z]", r"[\^-]", r"[\^+*/-]", r"[\^^\^a-c]", r"[^\^a]", r"[\x5E_]", r"[\u005e\]]",
    r"x*?y+?", r"\x41\u0042[\x43-\x45]", r"\x41b[\x41b][\\x41]", r"\xe9a\\x41",
    r"\t\n", r"é[ö-ü]?", r"a{2}|a{4,}", r"[\]\\-]", r"\"\\", r"|a",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_outputs_match_the_regular_expression_in_python(walker: Walker, regex: str) -> None:
    outputs = walker.outputs(check(regex=regex), range(30))
    assert outputs
    for output in outputs:
        assert re.fullmatch(regex, output, re.ASCII), output


@pytest.mark.parametrize("regex", [r"[\S]", r"[\s\S]+", r"[\S,]", r"[\Sa\n]{2}", r"[^\s\w]", r"[^\S]", r"\S"])
def test_other_spaces_than_those_of_ascii_are_no_spaces(walker: Walker, regex: str) -> None:
    for text in map("".join, itertools.product("a ,\n\u00a0\u2003", repeat=2)):
        for part in (text, text[0]):
            is_matched = re.fullmatch(regex, part, re.ASCII) is not None
            assert walker.accepts(check(regex=regex), part) == is_matched, part


def test_the_output_is_one_of_the_choices(walker: Walker) -> None:
    texts = ["yes", "no", 'a "quoted"\\ one', "two\nlines\t", "naïve 漢", "ye", "\x7f{}|"]
    assert set(walker.outputs(check(choice=texts), range(200))) == set(texts)


@pytest.mark.parametrize("text", ['"face"', "a\nbad", "a\\b", "a\r\n1", "\tFeed", "\x7fab", "\x00b", "é\n12345"])
def test_a_choice_has_hexadecimal_digits_behind_an_escaped_character(walker: Walker, text: str) -> None:
    assert walker.accepts(check(choice=[text]), text)
    assert set(walker.outputs(check(choice=[text]), range(5))) == {text}


TABBED = {"type": "tag", "begin": "<\t>", "content": {"type": "const_string", "value": "a\r\nb"}, "end": ""}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"type": "const_string", "value": "a\tb"}, "a\tb"),
        ({"type": "regex", "pattern": r"a\tb"}, "a\tb"),
        ({"type": "grammar", "grammar": r'root ::= "\r" [\t]'}, "\r\t"),
        ({"type": "any_text"}, "\ta"),
        (TABBED, "<\t>a\r\nb"),
        ({"type": "tags_with_separator", "tags": [TABBED], "separator": "\t"}, "<\t>a\r\nb\t<\t>a\r\nb"),
        (beside_json({"type": "const_string", "value": "a\nb"})["format"], "a\nb1"),
    ],
    ids=str,
)
def test_the_texts_of_a_structural_tag_may_have_control_characters(
    walker: Walker, form: dict[str, Any], text: str
) -> None:
    """Beside JSON line feeds alone."""
    assert walker.accepts(check(structural_tag=json.dumps(tagged(form))), text)


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "person": lambda: {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mail": {"type": "string", "format": "email"},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "tree": lambda: {
        "$defs": {"node": {"type": "object", "properties": {
            "value": {"anyOf": [{"type": "null"}, {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        }, "required": ["value"]}},
        "$ref": "#/$defs/node",
    },
    "union": lambda: {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}, "x": INTEGER}, "required": ["kind"]},
        {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}, "y": STRING}, "required": ["kind"]},
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "boolean"}, "minItems": 2},
    ]},
    "map": lambda: {"type": "object", "additionalProperties": {"type": "integer", "multipleOf": 3}},
    "odd": lambda: {"enum": [1, "a", None, True, {"a": [1.5]}, 'quotes "\\ \n é']},
    "types": lambda: {"type": ["string", "null", "integer"], "minLength": 2, "minimum": 3},
    "any": lambda: {},
    "list": lambda: {"type": "array", "minItems": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_satisfy_the_schema(walker: Walker, name: str) -> None:
    schema = SCHEMAS[name]()
    assert len(assert_satisfied(walker, schema, seeds=range(60))) > 1, "the output varies"


def assert_satisfied(walker: Walker, schema: dict[str, Any], seeds: range) -> set[str]:
    outputs = walker.outputs(check(json_schema=json.dumps(schema)), seeds)
    for output in outputs:
        JUDGE(schema, format_checker=FORMATS).validate(json.loads(output))
    return set(outputs)


def test_json_mode_gives_objects(walker: Walker) -> None:
    outputs = walker.outputs(check(json_object=True), range(60))
    assert len(outputs) > 20
    assert all(isinstance(json.loads(output), dict) for output in outputs)


@given(schema=RANDOM_SCHEMAS)
@example(schema={"type": "object", "properties": {"\ud000": {"type": "null"}}, "additionalProperties": False})
@settings(max_examples=40, **WITHOUT_TIME_LIMIT)  # type: ignore[arg-type]
def test_outputs_satisfy_any_schema(walker: Walker, schema: dict[str, Any]) -> None:
    assert_satisfied(walker, schema, seeds=range(4))


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(schema=RANDOM_SCHEMAS)
@settings(max_examples=1000, **WITHOUT_TIME_LIMIT)  # type: ignore[arg-type]
def test_outputs_satisfy_a_thousand_schemas(walker: Walker, schema: dict[str, Any]) -> None:
    assert_satisfied(walker, schema, seeds=range(10))


def test_the_suites_schemas_are_satisfied_and_what_it_calls_invalid_is_excluded(walker: Walker) -> None:
    """Of the JSON Schema Test Suite, as far as it is supported."""
    keywords, num_accepted, num_valid = Counter[str](), 0, 0
    for keyword, schema, values in suite_schemas():
        keywords[keyword] += 1
        assert_satisfied(walker, schema, seeds=range(4))
        for value, is_valid in values:
            is_accepted = walker.accepts(check(json_schema=json.dumps(schema)), json.dumps(value, ensure_ascii=False))
            is_valid = is_valid and JUDGE(schema).is_valid(value)  # by its type, too, where that was added
            assert is_valid or not is_accepted, (keyword, schema, value)
            num_accepted, num_valid = num_accepted + is_accepted, num_valid + is_valid
    print(f"{keywords.total()} schemas of {len(keywords)} keywords; {num_accepted} of {num_valid} valid values")
    assert len(keywords) > 35
    assert num_accepted > 0.5 * num_valid
