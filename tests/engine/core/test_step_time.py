"""Long steps are predicted as long, so that they are not mistaken for a hung model."""

from __future__ import annotations

import pytest

from engine.core.core import StepTimeEstimator


def test_a_big_chunk_is_predicted_long_before_any_was_computed() -> None:
    estimator = StepTimeEstimator(token_s=0.002)
    estimator.predict(2048)
    assert estimator.predicted_s == pytest.approx(4.096)


def test_prediction_follows_what_steps_took() -> None:
    estimator = StepTimeEstimator(token_s=0.002)
    for _ in range(50):
        estimator.predict(512)
        estimator.record(0.5, 512)
        estimator.predict(4)
        estimator.record(0.03, 4)
    estimator.predict(512)
    assert estimator.predicted_s == pytest.approx(0.5, rel=0.01)
    estimator.predict(1)
    assert estimator.predicted_s == pytest.approx(0.03, rel=0.01)


def test_an_idle_turn_keeps_the_prediction() -> None:
    estimator = StepTimeEstimator(token_s=0.01)
    estimator.predict(100)
    estimator.predict(0)
    assert estimator.predicted_s == pytest.approx(1.0)


def test_a_short_prompt_is_predicted_by_its_tokens_too() -> None:
    estimator = StepTimeEstimator(token_s=0.04)
    estimator.predict(50)
    assert estimator.predicted_s == pytest.approx(2.0), "before any step"
    for _ in range(50):
        estimator.record(0.4, 1)
    estimator.predict(50)
    assert estimator.predicted_s == pytest.approx(2.0), "single tokens say little about it"
    estimator.predict(1)
    assert estimator.predicted_s == pytest.approx(0.4, rel=0.01)
