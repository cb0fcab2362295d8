"""A prompt that vLLM does not begin in time ends as at the built-in engine; one that it has begun continues."""

from __future__ import annotations

import time

import pytest

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import TokensEvent
from tests.vllm.engine_pair import prompt_of, request
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)

STEP_S, NUM_STEPS, BEGIN_S = 0.5, 12, 3.0


async def test_a_prompt_that_no_step_has_begun_in_time_ends_and_one_of_many_steps_does_not(
    vllm_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_ENABLE_FAILPOINTS", "1")
    monkeypatch.setenv("TANDEM_FAILPOINTS", f"engine.step=sleep:{STEP_S}")
    engine = await AsyncEngine.start(vllm_config)
    try:
        sent_s = time.monotonic()
        long = prompt_of(NUM_STEPS * vllm_config.max_num_batched_tokens)
        first = engine.add_request(request(long, begin_s=BEGIN_S, params={"max_tokens": 2}))
        behind = engine.add_request(request(prompt_of(40), begin_s=0.2))  # every step is full
        [late] = [event async for event in behind]
        assert isinstance(late, TokensEvent)
        assert (late.finish_reason, late.error_kind) == ("error", "no_room")
        assert late.error == "no step began the prompt within 0.2 s"
        found = [event async for event in first]
        assert time.monotonic() - sent_s > BEGIN_S, "it was asked about in the middle of its prompt"
        assert [event.error for event in found if isinstance(event, TokensEvent)] == [None, None]
        await until(lambda: engine.load.num_running + engine.load.num_waiting + engine.load.running_blocks == 0, 60)
    finally:
        await engine.shutdown()
