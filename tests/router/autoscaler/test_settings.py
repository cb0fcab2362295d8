"""The autoscaler's settings: what contradicts itself is refused, with words that say what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from router.settings import RouterSettings
from serving.settings import SettingsError, leaves, load

ROUTER = ("router", "model")


def loaded(**flags: Any) -> RouterSettings:
    named = {("autoscaler", *name.split("__")): value for name, value in flags.items()}
    return load(RouterSettings, flags={ROUTER: "somewhere", **named})


def test_it_is_off_unless_asked_for() -> None:
    assert not loaded().autoscaler.enabled


def test_it_requires_an_owner_of_the_instances() -> None:
    with pytest.raises(SettingsError, match=r"set pools\.stack"):
        loaded(enabled=True)
    assert load(
        RouterSettings,
        flags={ROUTER: "somewhere", ("autoscaler", "enabled"): True, ("pools", "stack"): "unix:/s"},
    ).autoscaler.enabled


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"decode__min_size": 4, "decode__max_size": 2}, "max_size = 2 is below min_size = 4; set it to 4 or more"),
        ({"prefill__max_size": 65}, "less than or equal to 64"),
        ({"decode__min_size": 0}, "greater than or equal to 1"),
        ({"decode__scale_in_window_s": 2.0}, "must be below scale_in_window_s = 2"),
        ({"decode__warm_up_s": 400.0}, "must be below start_timeout_s = 300"),
        ({"decode__scale_in_margin": 1.0}, "less than or equal to 0.95"),
        ({"interval_s": 10.0}, "stale_s = 12 must be at least 2 times interval_s = 10"),
        ({"lead_ttl_s": 5.0}, "lead_ttl_s = 5 must be above interval_s = 5"),
        ({"lead_ttl_s": 3601.0}, "less than or equal to 3600"),
        ({"max_instances": 3, "decode__min_size": 3}, "max_instances = 3 is below"),
        ({"min_ratio": 2.0, "max_ratio": 1.0}, "min_ratio = 2 is above max_ratio = 1; swap them"),
        ({"max_ratio": 0.1}, "allow no pair of sizes: the bounds of the pools give ratios from 0.125 to 8"),
        ({"decode__target_score": float("nan")}, "a finite number"),
        ({"prefill__itl_objective_s": 1.0}, "did you mean autoscaler.prefill.ttft_objective_s"),
    ],
)
def test_what_contradicts_itself_is_refused_with_a_remedy(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        loaded(**flags)
    assert words in str(refused.value)


def test_every_setting_says_what_it_does() -> None:
    ours = [(path, field) for path, field in leaves(RouterSettings) if path[0] == "autoscaler"]
    assert len(ours) > 30
    for path, field in ours:
        assert (field.description or "").endswith("."), path
