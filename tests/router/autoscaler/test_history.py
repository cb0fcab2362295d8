"""What counts as a change of direction."""

from __future__ import annotations

from router.autoscaler.history import History


def test_the_first_change_is_no_reversal() -> None:
    assert History(0.0).after(5.0, "out") == History(5.0, 5.0, "out", None)


def test_a_change_the_other_way_is_one_and_is_remembered() -> None:
    turned = History(0.0).after(5.0, "out").after(7.0, "in")
    assert turned == History(7.0, 7.0, "in", 7.0)
    assert turned.after(9.0, "in") == History(9.0, 9.0, "in", 7.0)


def test_after_another_s_change_the_direction_is_open() -> None:
    theirs = History(0.0).after(5.0, "out").after(7.0, "in").after_another_s_change(8.0)
    assert theirs == History(8.0, 8.0, None, None)
    assert theirs.after(9.0, "out").reversed_s is None
