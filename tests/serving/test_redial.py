"""How often a channel to a name that reaches no peer is replaced."""

from __future__ import annotations

from serving.waits import Redial


def replaced_s(redial: Redial, times_s: range) -> list[int]:
    """When it is, of a channel that fails at all these times."""
    return [now_s for now_s in times_s if redial.is_due(now_s, is_ready=False, is_failed=True)]


def test_in_an_outage_each_replacement_waits_twice_as_long() -> None:
    assert replaced_s(Redial(1.0), range(100)) == [0, 1, 3, 7, 15, 31, 61, 91]


def test_a_channel_that_connects_is_not_replaced() -> None:
    assert not Redial(1.0).is_due(0.0, is_ready=False, is_failed=False)


def test_the_first_wait_returns_once_a_peer_is_reached() -> None:
    redial = Redial(1.0)
    assert replaced_s(redial, range(16)) == [0, 1, 3, 7, 15]
    assert not redial.is_due(15.5, is_ready=True, is_failed=False)
    assert replaced_s(redial, range(16, 20)) == [16, 18]


def test_the_first_wait_returns_where_the_end_of_an_outage_was_not_seen() -> None:
    """Calls alone look at the channel: between two outages there may be none, or one long stream."""
    redial = Redial(1.0)
    assert replaced_s(redial, range(100)) == [0, 1, 3, 7, 15, 31, 61, 91]
    assert replaced_s(redial, range(152, 160)) == [152, 153, 155, 159]
