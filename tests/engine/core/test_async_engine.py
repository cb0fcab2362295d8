"""AsyncEngine: the events of a core in its process; each notices the other's death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineRequest, TokensEvent
from engine.errors import EngineDeadError, InvalidRequest
from engine.sampling.params import SamplingParams
from tests.builders import lively_checkpoint
from tests.waiting import until


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    return EngineConfig(model=str(folder), dtype="float32", num_blocks=64, num_threads=1)


on_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """One engine for all tests of this module: starting a process takes seconds."""
    engine = await AsyncEngine.start(config)
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
    async with asyncio.timeout(20):
        while engine.load.num_running or engine.load.running_blocks:
            await engine.wait_load(0.3)


@on_module_loop
async def test_concurrent_requests_get_their_own_tokens(engine: AsyncEngine) -> None:
    prompts = [[5, 6, 7], [9] * 40, [11, 12]]
    alone = [await collect(engine, make_request(f"a{i}", prompt)) for i, prompt in enumerate(prompts)]
    together = await asyncio.gather(
        *(collect(engine, make_request(f"b{i}", prompt)) for i, prompt in enumerate(prompts))
    )
    assert alone == together
    assert all(len(token_ids) == 8 for token_ids in alone)


@on_module_loop
async def test_closing_a_stream_early_frees_its_blocks(engine: AsyncEngine) -> None:
    stream = engine.add_request(make_request("long", [5] * 50, max_tokens=900))
    async with aclosing(stream):
        await anext(stream)
    await until_idle(engine)
    assert engine.load.running_blocks == 0


@on_module_loop
async def test_a_running_id_is_refused_and_the_running_request_unharmed(engine: AsyncEngine) -> None:
    stream = engine.add_request(make_request("same", [5, 6], max_tokens=4))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add_request(make_request("same", [7]))
    assert sum([len(event.token_ids) async for event in stream if isinstance(event, TokensEvent)]) == 4


@on_module_loop
async def test_load_is_reported_while_nothing_happens(engine: AsyncEngine) -> None:
    await asyncio.sleep(0.6)
    await until(lambda: engine.core_silence_s < 0.2)  # it only grows until the core reports


@on_module_loop
async def test_a_killed_core_ends_its_streams_with_an_error(config: EngineConfig) -> None:
    engine = await AsyncEngine.start(config)
    stream = engine.add_request(make_request("doomed", [5] * 9, max_tokens=900))
    await anext(stream)
    os.kill(engine.info.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="status -9"):
        async for _ in stream:
            pass
    assert "status -9" in await asyncio.wait_for(engine.wait_dead(), 20)
    with pytest.raises(EngineDeadError):
        engine.add_request(make_request("late", [5]))
    await engine.shutdown()


@on_module_loop
async def test_a_core_that_cannot_start_says_why(config: EngineConfig, capfd: pytest.CaptureFixture[str]) -> None:
    broken = EngineConfig(model="/nowhere")
    with pytest.raises(EngineDeadError, match="status 1"):
        await AsyncEngine.start(broken)
    assert "config.json" in capfd.readouterr().err


PARENT = """
import asyncio, sys, msgspec
from engine.core.async_engine import AsyncEngine
from engine.config import EngineConfig

async def main():
    engine = await AsyncEngine.start(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    print(engine.info.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_core_ends_with_its_killed_parent_and_leaves_no_file(config: EngineConfig, short_folder: Path) -> None:
    import msgspec

    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, msgspec.json.encode(config).decode()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short_folder)},
    )
    with parent:
        assert parent.stdout is not None
        core = psutil.Process(int(parent.stdout.readline()))
        assert list(short_folder.iterdir())
        parent.kill()
    core.wait(timeout=30.0)
    deadline = time.monotonic() + 30.0
    while list(short_folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(short_folder.iterdir()) == []
