"""`--autoscale decode=1..3`: the router's flags, and the answers to mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from router.settings import RouterSection, RouterSettings
from serving.settings import settings_options
from tandem.cli import main
from tandem.local_stack.settings import MAX_ROUTER_WORKERS, Bounds, StackSettings, autoscaled, parse_bounds


def settings(**fields: Any) -> StackSettings:
    return StackSettings(model=Path("/m"), model_name="m", **fields)


def test_the_router_takes_the_flags_as_they_are() -> None:
    scaled = autoscaled(settings(num_prefill=2, router_args=("--log-level", "debug")), parse_bounds(["decode=1..3"]))
    found: list[RouterSettings] = []
    command = settings_options(RouterSettings)(found.append)
    result = CliRunner().invoke(command, ["--model", "/m", "--stack", "unix:/s", *scaled.router_args])
    assert result.exit_code == 0, result.output
    scaling = found[0].autoscaler
    assert scaling.enabled
    assert (scaling.decode.min_size, scaling.decode.max_size) == (1, 3)
    assert (scaling.prefill.min_size, scaling.prefill.max_size) == (2, 2), "not named: it keeps its size"
    assert (scaled.max_prefill, scaled.max_decode, scaled.num_planned) == (0, 3, 5)
    assert scaled.router_args[-2:] == ("--log-level", "debug"), "what is given by hand comes last and wins"


def test_a_stack_may_have_as_many_router_workers_as_the_router_allows() -> None:
    allowed = RouterSection.model_fields["workers"].metadata
    assert [limit.le for limit in allowed if hasattr(limit, "le")] == [MAX_ROUTER_WORKERS]


def test_without_bounds_nothing_changes() -> None:
    assert autoscaled(settings(), {}) == settings()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("decode", "write decode=1..3"),
        ("decode=3", "write decode=1..3"),
        ("decode=1-3", "write decode=1..3"),
        ("decod=1..3", "did you mean decode?"),
        ("=1..3", "the pools are prefill and decode"),
        ("decode=3..1", "MIN <= MAX"),
        ("decode=0..1", "1 <= MIN"),
        ("prefill=1..65", "MAX <= 64"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint.replace("..", r"\.\.").replace("?", r"\?")):
        parse_bounds([text])
    result = CliRunner().invoke(main, ["up", "--autoscale", text])
    assert result.exit_code != 0
    assert hint in result.output


def test_a_pool_is_named_once_and_begins_within_its_bounds() -> None:
    with pytest.raises(ValueError, match="named twice"):
        parse_bounds(["decode=1..3", "decode=2..3"])
    with pytest.raises(ValueError, match=r"the decode pool starts with 1 instances, outside 2\.\.3: set --decode too"):
        autoscaled(settings(), {"decode": Bounds(2, 3)})
    with pytest.raises(ValueError, match=r"the prefill pool starts with 0 instances, outside 1\.\.64"):
        autoscaled(settings(num_prefill=0), {"decode": Bounds(1, 3)})
