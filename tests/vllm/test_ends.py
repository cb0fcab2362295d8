"""Whatever process of a vLLM engine is killed, none of the others survives it, and nothing else is left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineRequest
from engine.errors import EngineDeadError
from engine.sampling.params import SamplingParams
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)


def _named(processes: list[psutil.Process], part: str) -> psutil.Process:
    [found] = [process for process in processes if part in " ".join([process.name(), *process.cmdline()])]
    return found


def _shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """What they have mapped; other tests have memory there, too."""
    paths = (Path(mapped.path) for process in processes for mapped in process.memory_maps())
    return {path for path in paths if path.is_relative_to("/dev/shm") and path.exists()}


@pytest.mark.parametrize("victim", ["host", "EngineCore", "Worker"])
async def test_sigkill_of_one_process_ends_all_and_leaves_nothing(victim: str, vllm_config: EngineConfig) -> None:
    engine = await AsyncEngine.start(vllm_config)
    host = psutil.Process(engine.info.pid)
    processes = [host, *host.children(recursive=True)]
    folder = next(Path(arg.removeprefix("ipc://")).parent for arg in host.cmdline() if arg.startswith("ipc://"))
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    stream = engine.add_request(EngineRequest(request_id="r", prompt_token_ids=[5, 6, 7], params=params))
    await anext(stream)
    shared_memory = _shared_memory(processes)
    assert shared_memory

    (host if victim == "host" else _named(processes, victim)).kill()

    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    await until(lambda: not any(process.is_running() and process.status() != "zombie" for process in processes), 5)
    await engine.shutdown()
    await until(lambda: not any(path.exists() for path in shared_memory), 5)
    assert not folder.exists()
