"""The front's handle: the same events from a core in its own process and from one in a thread, and each notices the
other's death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import EngineDeadError, InvalidRequest
from engine.messages import EngineRequest, TokensEvent
from engine.sampling_params import SamplingParams
from tests.builders import lively_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    return EngineConfig(model=str(folder), dtype="float32", num_blocks=64, num_threads=1)


@pytest.fixture(params=["process", "thread"])
async def engine(request: pytest.FixtureRequest, config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(config, in_process=request.param == "thread")
    yield engine
    await engine.shutdown()


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params)


async def collect(engine: AsyncEngine, request: EngineRequest) -> list[int]:
    token_ids: list[int] = []
    async for event in engine.add_request(request):
        assert isinstance(event, TokensEvent)
        token_ids += event.token_ids
    return token_ids


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(5.0):
        while engine.load.num_running or engine.load.running_blocks:
            await engine.wait_load(0.3)


async def test_concurrent_requests_get_their_own_tokens(engine: AsyncEngine) -> None:
    prompts = [[5, 6, 7], [9] * 40, [11, 12]]
    alone = [await collect(engine, make_request(f"a{i}", prompt)) for i, prompt in enumerate(prompts)]
    together = await asyncio.gather(
        *(collect(engine, make_request(f"b{i}", prompt)) for i, prompt in enumerate(prompts))
    )
    assert alone == together
    assert all(len(token_ids) == 8 for token_ids in alone)


async def test_closing_a_stream_early_frees_its_blocks(engine: AsyncEngine) -> None:
    stream = engine.add_request(make_request("long", [5] * 50, max_tokens=900))
    async with stream:
        await anext(stream)
    await until_idle(engine)
    assert engine.load.running_blocks == 0


async def test_a_running_id_is_refused_and_the_running_request_unharmed(engine: AsyncEngine) -> None:
    stream = engine.add_request(make_request("same", [5, 6], max_tokens=4))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add_request(make_request("same", [7]))
    assert sum([len(event.token_ids) async for event in stream if isinstance(event, TokensEvent)]) == 4


async def test_load_is_reported_while_nothing_happens(engine: AsyncEngine) -> None:
    await asyncio.sleep(0.6)
    assert engine.core_silence_s < 0.5


async def test_a_killed_core_ends_its_streams_with_an_error(config: EngineConfig) -> None:
    engine = await AsyncEngine.start(config)
    stream = engine.add_request(make_request("doomed", [5] * 9, max_tokens=900))
    await anext(stream)
    os.kill(engine.info.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="status -9"):
        async for _ in stream:
            pass
    assert "status -9" in await asyncio.wait_for(engine.wait_dead(), 1.0)
    with pytest.raises(EngineDeadError):
        engine.add_request(make_request("late", [5]))
    await engine.shutdown()


async def test_a_core_that_cannot_start_says_why(config: EngineConfig, capfd: pytest.CaptureFixture[str]) -> None:
    broken = EngineConfig(model="/nowhere")
    with pytest.raises(EngineDeadError, match="status 1"):
        await AsyncEngine.start(broken)
    assert "config.json" in capfd.readouterr().err


FRONT = """
import asyncio, sys, msgspec
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig

async def main():
    engine = await AsyncEngine.start(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    print(engine.info.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_core_ends_with_its_killed_front_and_leaves_no_file(config: EngineConfig, tmp_path: Path) -> None:
    import msgspec

    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, msgspec.json.encode(config).decode()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with front:
        assert front.stdout is not None
        core = psutil.Process(int(front.stdout.readline()))
        assert list(tmp_path.iterdir())
        front.kill()
    core.wait(timeout=3.0)
    deadline = time.monotonic() + 1.0
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_the_front_imports_no_torch() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'numba'}"
    code = f"import sys, engine, engine.async_engine; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
