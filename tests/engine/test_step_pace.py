"""A long step is announced as long, so that nobody takes it for a wedged model."""

from __future__ import annotations

import pytest

from engine.step_pace import StepPace


def test_a_big_chunk_is_predicted_long_before_any_was_computed() -> None:
    pace = StepPace(token_s=0.002)
    pace.step_begins(2048)
    assert pace.predicted_s == pytest.approx(4.096)


def test_prediction_follows_what_steps_took() -> None:
    pace = StepPace(token_s=0.002)
    for _ in range(50):
        pace.step_begins(512)
        pace.step_took(0.5, 512)
        pace.step_begins(4)
        pace.step_took(0.03, 4)
    pace.step_begins(512)
    assert pace.predicted_s == pytest.approx(0.5, rel=0.01)
    pace.step_begins(1)
    assert pace.predicted_s == pytest.approx(0.03, rel=0.01)


def test_an_idle_turn_keeps_the_prediction() -> None:
    pace = StepPace(token_s=0.01)
    pace.step_begins(100)
    pace.step_begins(0)
    assert pace.predicted_s == pytest.approx(1.0)
