"""YAML in which a key is there twice is an error; anchors, merges and several documents stay what they are."""

from __future__ import annotations

import re

import pytest
import yaml

from serving.yaml_file import DuplicateKeyError, parse_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auth: {a: 1}\nhttp: {}\nauth: {b: 2}\n", "'auth' is there twice, in lines 1 and 3"),
        ("server:\n  port: 1\n  host: a\n  'port': 2\n", "'port' is there twice, in lines 2 and 4"),
        ("- a: 1\n- {b: [{c: 1, c: 2}]}\n", "'c' is there twice, in lines 2 and 2"),
        ("base: &base {a: 1, a: 2}\nb: {<<: *base}\n", "'a' is there twice"),
        ("1: a\n0x1: b\n", "1 is there twice"),
        ("a: 1\n=: 2\n=: 3\n", "'=' is there twice"),
    ],
)
def test_a_key_that_is_there_twice_is_reported_with_its_lines(text: str, message: str) -> None:
    with pytest.raises(DuplicateKeyError, match=re.escape(message)):
        parse_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "base: &base {a: 1, b: 2}\nown: {<<: *base, a: 3}\n",
        "base: &base {a: 1}\nmore: &more {a: 2}\nown: {<<: *base, <<: *more, b: 1}\nlist: {<<: [*base, *more]}\n",
        # The shallow alias is constructed, and merged, before the deep anchor.
        "base: &base {x: 1}\ndeep: {er: {est: &deepest {<<: *base, x: 2}}}\nown: {<<: *deepest, x: 3}\n",
        "a: {x: 1}\nb: {x: 1}\nc: [{x: 1}, {x: 1}]\n",
        "1: a\n'1': b\n",
        "? [a, b]\n: 1\n",
    ],
)
def test_all_else_is_what_safe_load_makes_of_it(text: str) -> None:
    try:
        expected = yaml.safe_load(text)
    except yaml.YAMLError:
        with pytest.raises(ValueError, match="not YAML"):
            parse_yaml(text)
    else:
        assert parse_yaml(text) == expected


def test_a_map_that_contains_itself_ends() -> None:
    parsed = parse_yaml("a: &a {b: *a}\n")
    assert parsed["a"]["b"] is parsed["a"]


@pytest.mark.parametrize("text", ["a: [\n", "a: !!python/object:os.system {}\n", "a: 2026-99-99\n"])
def test_what_is_not_yaml_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not YAML"):
        parse_yaml(text)
