"""The tenant of a call, as a trusted gateway names it."""

from __future__ import annotations

import pytest

from router.request.caller import NO_TENANT, Caller, tenant_of
from serving.errors import InvalidArgument


def test_without_a_key_in_the_settings_all_callers_are_one_tenant() -> None:
    assert tenant_of((("x-tenant", "alice"), ("tenant", "bob")), "") == NO_TENANT


def test_with_a_key_the_gateway_names_the_tenant() -> None:
    metadata = (("x-other", "alice"), ("x-tenant", "bob"))
    assert tenant_of(metadata, "x-tenant") == "bob"
    assert tenant_of((), "x-tenant") == tenant_of(None, "x-tenant") == NO_TENANT


@pytest.mark.parametrize("values", [["a", "b"], ["a b"], [""], ["*"], ["x" * 129], [b"bytes"]])
def test_an_invalid_tenant_name_is_rejected(values: list[str | bytes]) -> None:
    with pytest.raises(InvalidArgument, match="x-tenant"):
        tenant_of([("x-tenant", value) for value in values], "x-tenant")


def test_a_caller_without_a_tenant_aborts_no_tenants_request() -> None:
    assert Caller().label("alice\0r") != Caller("alice").label("r")
