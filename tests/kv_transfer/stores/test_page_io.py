"""A dead store costs one try now and then."""

from __future__ import annotations

from kv_transfer.stores.page_io import CircuitBreaker


def test_breaker_opens_tries_again_and_closes() -> None:
    now = 0.0
    breaker = CircuitBreaker(max_failures=3, retry_s=2.0, clock=lambda: now)
    for _ in range(2):
        breaker.record(ok=False)
    assert breaker.allows()
    breaker.record(ok=False)
    assert breaker.is_open
    assert not breaker.allows()
    # STEP one try per retry_s
    now = 2.0
    assert breaker.allows()
    assert not breaker.allows()
    breaker.record(ok=False)
    assert not breaker.allows()
    # STEP one success closes it
    now = 4.0
    assert breaker.allows()
    breaker.record(ok=True)
    assert breaker.allows()
    assert not breaker.is_open


def test_failures_must_follow_each_other() -> None:
    breaker = CircuitBreaker(max_failures=2)
    for good in (False, True, False, True):
        breaker.record(ok=good)
    assert not breaker.is_open
