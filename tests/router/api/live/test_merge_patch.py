"""JSON merge patches, as RFC 7396 has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.live.feed import patch_of
from router.api.live.state import Json
from tests.router.api.live.merge_patch import patched

LEAVES = st.one_of(st.booleans(), st.integers(0, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2))
STATES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(LEAVES, inner), max_size=3),
    max_leaves=8,
)


@given(before=STATES, after=STATES)
def test_a_patch_makes_one_state_of_the_other(before: Json, after: Json) -> None:
    was = copy.deepcopy(before)
    assert patched(before, patch_of(before, after)) == after
    assert before == was
    assert patch_of(after, copy.deepcopy(after)) == {}


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": 1}, {"a": {"bb": {"ccc": None}}}, {"e": 1, "a": {"bb": {}}}),
        ({"a": "foo"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_patches_are_applied_as_in_the_rfc(before: Json, patch: dict[str, Any], after: Json) -> None:
    assert patched(before, patch) == after
