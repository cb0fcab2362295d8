"""Patches and field owners, as Kubernetes' documentation and RFC 7386 and 6902 have them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chart.fake_kube.field_owners import Manager, Owners, leaves
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.patching import json_patched, merged, strategically_merged
from tests.chart.fake_kube.refusal import Refused

HELM, SCALER = Manager("helm"), Manager("tandem-router", "scale")
VALUES = st.recursive(
    st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


def deployment(image: str = "web:1", **spec: Any) -> Object:
    containers = [{"name": "web", "image": image, "env": [{"name": "A", "value": "1"}]}]
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": containers}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {"template": template, **spec},
    }


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": "foo"}, {"b": {"c": None}}, {"a": "foo", "b": {}}),
        ({"a": [1]}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_merge_patches_are_those_of_rfc_7386(target: Object, patch: Object, result: Object) -> None:
    assert merged(target, patch) == result


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_twice_is_once(target: Object, patch: Object) -> None:
    assert merged(merged(target, patch), patch) == merged(target, patch)


def test_strategic_merges_go_by_the_key_of_a_list() -> None:
    patch = {"containers": [{"name": "b", "image": "new"}, {"name": "c"}, {"name": "a", "$patch": "delete"}]}
    target = {"containers": [{"name": "a"}, {"name": "b", "image": "old", "args": ["x"]}]}
    assert strategically_merged(target, patch) == {
        "containers": [{"name": "b", "image": "new", "args": ["x"]}, {"name": "c"}]
    }
    assert strategically_merged({"args": ["x", "y"]}, {"args": ["z"]}) == {"args": ["z"]}


def test_json_patches_fit_or_are_refused() -> None:
    operations = [{"op": "test", "path": "/a/0", "value": 1}, {"op": "add", "path": "/a/-", "value": 2}]
    assert json_patched({"a": [1]}, operations) == {"a": [1, 2]}
    assert json_patched({"a": {"b/c": 1}}, [{"op": "remove", "path": "/a/b~1c"}]) == {"a": {}}
    for wrong in ({"op": "replace", "path": "/b", "value": 1}, {"op": "test", "path": "/a/0", "value": 2}):
        with pytest.raises(Refused):
            json_patched({"a": [1]}, [wrong])


def test_a_second_writer_is_a_conflict_and_the_same_value_is_none() -> None:
    owners = Owners()
    live = owners.apply(HELM, {}, deployment(replicas=2), force=False)
    scaled = {**live, "spec": {**live["spec"], "replicas": 5}}
    owners.wrote(SCALER, live, scaled)
    with pytest.raises(Refused, match=r'"tandem-router" with subresource "scale" using apps/v1: .spec.replicas'):
        owners.apply(HELM, scaled, deployment(replicas=2), force=False)
    assert owners.apply(HELM, scaled, deployment(replicas=5), force=False) == scaled
    owners.wrote(SCALER, live, scaled)
    assert owners.apply(HELM, scaled, deployment(replicas=2), force=True)["spec"]["replicas"] == 2


def test_what_is_no_longer_applied_goes_if_it_is_nobody_else_s() -> None:
    owners = Owners()
    live = owners.apply(HELM, {}, deployment(replicas=2, paused=True, minReadySeconds=3), force=False)
    scaled = {**live, "spec": {**live["spec"], "replicas": 5}}
    owners.wrote(SCALER, live, scaled)
    after = owners.apply(HELM, scaled, deployment("web:2", minReadySeconds=3), force=False)
    assert after["spec"]["replicas"] == 5
    assert "paused" not in after["spec"]
    assert after["spec"]["minReadySeconds"] == 3
    assert after["spec"]["template"]["spec"]["containers"][0]["image"] == "web:2"


def test_a_variable_that_is_no_longer_applied_goes_and_its_neighbours_stay() -> None:
    owners = Owners()
    first = deployment()
    first["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "B", "value": "2"})
    live = owners.apply(HELM, {}, first, force=False)
    (container,) = owners.apply(HELM, live, deployment(), force=False)["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "A", "value": "1"}]


@given(OBJECTS)
def test_what_is_applied_to_nothing_is_what_was_applied(found: Object) -> None:
    manifest = {**deployment(), "data": found}
    assert leaves(Owners().apply(HELM, {}, manifest, force=False)) == leaves(manifest)
