"""The checker finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.tandem.v1 import instance_pb2
from tandem.client.completion import Choice, Completion, Usage
from tests.system.checker import assert_same_answer, assert_usage, busy, private_files
from tests.system.reference import Answer, request_digest


def completion(
    ids: tuple[int, ...], text: str = "abc", reason: str = "length", usage: Usage | None = None
) -> Completion:
    usage = usage or Usage(prompt_tokens=4, completion_tokens=len(ids))
    return Completion("r", "m", 1, 4, (Choice(text, ids, reason, usage),))


EXPECTED = Answer((1, 2, 3), "abc", "length")


def test_the_same_answer_passes() -> None:
    assert_same_answer(completion((1, 2, 3)), EXPECTED)
    assert_same_answer(completion((1, 2, 3), text="?"), Answer((1, 2, 3), None, "length"))


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (completion((1, 9, 3)), "token 1 differs"),
        (completion((1, 2)), "token 2 differs"),
        (completion((1, 2, 3, 4)), "token 3 differs"),
        (completion((1, 2, 3), text="abd"), "abd"),
        (completion((1, 2, 3), reason="stop"), "stop"),
    ],
)
def test_any_difference_is_reported(got: Completion, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_answer(got, EXPECTED)


def test_usage_that_does_not_add_up_is_found() -> None:
    assert_usage(completion((1, 2, 3)))
    with pytest.raises(AssertionError):
        assert_usage(completion((1, 2, 3), usage=Usage(prompt_tokens=4, completion_tokens=2)))
    counts = {"prompt_tokens": 4, "completion_tokens": 1}
    assert_usage(completion((1,), usage=Usage(**counts, cached_tokens=3, external_tokens=4, stored_tokens=2)))
    for wrong in ({"cached_tokens": 5}, {"stored_tokens": 1}, {"external_tokens": 3, "recomputed_tokens": 2}):
        with pytest.raises(AssertionError):
            assert_usage(completion((1,), usage=Usage(**counts, **wrong)))


def test_an_idle_instance_is_idle_whatever_it_has_cached() -> None:
    idle = instance_pb2.WatchLoadResponse(num_steps=9, blocks=instance_pb2.BlockUsage(free=3, cached=5))
    assert busy(idle) == {}
    held = instance_pb2.WatchLoadResponse(num_transfers=1, blocks=instance_pb2.BlockUsage(free=3, held=5))
    assert busy(held) == {"transfers": 1, "held blocks": 5}


def test_files_of_single_transfers_and_unfinished_ones_are_private(tmp_path: Path) -> None:
    for name in ("v1/ab/cd/full", "v1/ab/transfers/ef/tail", "v1/ab/cd/.tmp-12"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(private_files(tmp_path)) == ["v1/ab/cd/.tmp-12", "v1/ab/transfers/ef/tail"]


def test_a_request_is_known_by_its_content() -> None:
    assert request_digest([1, 2], {"seed": 1, "n": 2}) == request_digest((1, 2), {"n": 2, "seed": 1})
    assert request_digest([1, 2], {"seed": 1}) != request_digest([1, 2], {"seed": 2})
