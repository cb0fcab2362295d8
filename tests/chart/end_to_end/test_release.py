"""The whole life of a release under load, every pod a process: no request is lost and no token is wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helm_python import Chart

from engine import LLM, SamplingParams
from helm.rendering import CHART
from tests.chart.end_to_end.conftest import aggregated
from tests.chart.end_to_end.scene import RELEASE, WAIT_S, Release, Tide, cluster, install, values
from tests.system.load import Outcome
from tests.system.questions import Question, make_questions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_TOKENS = 120
"""Streams of four seconds, so that a pod that is told to go has one though few are asked for."""
FLOOD, TRICKLE = 12, 1
"""Clients of up to two streams: more than two decode instances carry, and no more than one does with room left."""


def same_questions(questions: Sequence[Question], llm: LLM) -> list[Question]:
    """With the answers of another model."""
    prompts = [list(question.prompt) for question in questions]
    samplings = [SamplingParams(**question.sampling) for question in questions]
    answers = llm.generate(prompts, samplings, use_tqdm=False)
    return [
        replace(question, expected=tuple(answer.outputs)) for question, answer in zip(questions, answers, strict=True)
    ]


class Models:
    """Which of the two models an answer is of, wholly."""

    def __init__(self, old: list[Question], new: list[Question]) -> None:
        self._old = old
        self._new = new

    def of(self, outcome: Outcome) -> str:
        """Raises AssertionError where it is neither's, or there is no answer."""
        question = self._new[self._old.index(outcome.question)]
        completion = outcome.completion
        if completion is not None and completion.choices[0].token_ids == tuple(question.expected[0].token_ids):
            question.assert_answered(completion)
            return "new"
        outcome.assert_exact()
        return "old"


async def replaced(release: Release, tide: Tide, chart: Chart | None) -> None:
    """An upgrade to the new model, or without a chart a rollback, while clients ask; every pod is another one after."""
    before, num_answered = release.names(), tide.num_answered
    if chart is None:
        await release.helm.rollback(RELEASE, timeout_s=WAIT_S)
    else:
        await release.helm.upgrade(chart, RELEASE, values("new"), timeout_s=WAIT_S)
    await release.until_settled()
    assert not release.names() & before
    assert tide.num_answered > num_answered
    num_answered = tide.num_answered
    await release.until(lambda: tide.num_answered >= num_answered + 2 * TRICKLE)


def num_streams_while_draining(release: Release) -> int:
    """Streams that decode instances ended after they had begun to drain."""
    logs = (log for pod, log in release.kube.processes.logs.items() if "-decode-" in pod)
    return sum(log.partition("draining: not ready")[2].count('"event": "finished"') for log in logs)


async def test_a_release_grows_shrinks_changes_its_model_and_loses_nothing(
    checkpoint: Path, other_checkpoint: Path
) -> None:
    old = make_questions(aggregated(checkpoint), 24, random.Random("release"), num_tokens=NUM_TOKENS)
    models = Models(old, same_questions(old, aggregated(other_checkpoint)))
    async with cluster(old=checkpoint, new=other_checkpoint) as release:
        await install(release, CHART, "old")
        await release.helm.test(RELEASE, timeout_s=WAIT_S)
        async with Tide(release.address, old, FLOOD) as tide:
            # STEP the autoscaler lets decode grow
            await release.until(lambda: release.size("decode") == 3)
            await release.until_settled()
            # STEP and, when the load has gone, drains two
            tide.num_asking = TRICKLE
            await release.until(lambda: release.size("decode") == 1)
            await release.until_settled()
            # STEP another model, and back
            with Chart.load(CHART) as chart:
                first_of_new = len(tide.outcomes)
                await replaced(release, tide, chart)
                assert models.of(await tide.next()) == "new"
            await replaced(release, tide, None)
            assert models.of(await tide.next()) == "old"
        served = [models.of(outcome) for outcome in tide.outcomes]
        assert set(served[:first_of_new]) == {"old"}
        assert "new" in served
        assert num_streams_while_draining(release) > 0
        assert release.kube.processes.num_restarts == 0
        # STEP nothing is left
        await release.helm.uninstall(RELEASE, timeout_s=WAIT_S)
        await release.assert_nothing_is_left()
