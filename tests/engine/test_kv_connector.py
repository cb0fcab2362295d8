"""A connector of a third party: what is wrong with its class is said before the engine computes with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import KVConnector, NullKVConnector, make_connector


class WithOptions(NullKVConnector):
    """Takes two options."""

    def __init__(self, *, wake: Callable[[], None], folder: str, size: int = 1) -> None:
        super().__init__(wake=wake)
        self.given = folder, size


class WithoutWake(NullKVConnector):
    def __init__(self) -> None:
        super().__init__(wake=lambda: None)


class Faulty(KVConnector):
    def __init__(self, *, wake: Callable[[], None]) -> None:
        raise TypeError("a fault of its own")


class Nameless(KVConnector):
    def __init__(self, *, wake: Callable[[], None]) -> None:
        del wake


class Duck:
    """Has what the start calls, and not what the step loop calls."""

    name = "duck"

    def __init__(self, *, wake: Callable[[], None]) -> None:
        del wake

    def register_kv_cache(self, *_: object) -> None:
        pass

    def self_test(self) -> None:
        pass


def nothing(*, wake: Callable[[], None]) -> None:
    del wake


NUMBER = 3


def made(name: str, **options: str | int | float | bool) -> KVConnector:
    return make_connector(KVConnectorConfig(class_path=f"{__name__}:{name}", options=options), wake=lambda: None)


def test_options_are_the_arguments_of_the_class() -> None:
    connector = made("WithOptions", folder="here")
    assert isinstance(connector, WithOptions)
    assert connector.given == ("here", 1)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("WithOptions", {"foldr": "here"}, r"must take wake, foldr: missing a required .*'folder'"),
        ("WithOptions", {"folder": "here", "sise": 2}, r"must take wake, folder, sise: .*unexpected .*'sise'"),
        ("WithoutWake", {}, r"must take wake: .*unexpected .*'wake'"),
        ("NUMBER", {}, r"must take wake: 3 is not a callable object"),
        ("Nameless", {}, r"has no name; derive the class from engine\.kv_connector:KVConnector"),
        ("Duck", {}, r"has no get_num_new_matched_tokens, handle, .*poll, .*; derive the class"),
        ("nothing", {}, r"has no get_num_new_matched_tokens, .*; derive the class"),
        ("Missing", {}, r"cannot import .*has no attribute 'Missing'"),
    ],
)
def test_a_class_that_is_no_connector_or_does_not_take_its_options_is_named(
    name: str, options: dict[str, str | int | float | bool], problem: str
) -> None:
    with pytest.raises(EngineError, match=f"^kv_connector: .*{problem}"):
        made(name, **options)


def test_an_error_of_its_own_code_keeps_its_type() -> None:
    with pytest.raises(TypeError, match="a fault of its own"):
        made("Faulty")
