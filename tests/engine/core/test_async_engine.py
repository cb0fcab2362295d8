"""AsyncEngine: the events of a core in its process; each notices the other's death."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import psutil
import pytest
import pytest_asyncio

from engine.config import EngineConfig, KVConnectorConfig
from engine.core.async_engine import AsyncEngine
from engine.core.messages import (
    STEP_TOKENS,
    CoreMessage,
    EngineLoad,
    EngineRequest,
    HoldKV,
    LeaseCommand,
    Outputs,
    TokensEvent,
    TransferEvent,
)
from engine.errors import EngineDeadError, EngineError, EngineStartError, InvalidRequest, may_pass
from engine.machine import usable_cores
from engine.sampling.params import SamplingParams
from kv_transfer.secret import ensure_secret
from tests.builders import lively_checkpoint
from tests.engine_under_test import PATIENCE
from tests.waiting import until

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    return EngineConfig(model=str(folder), dtype="float32", num_blocks=64, num_threads=1, block_size=BLOCK_SIZE)


on_module_loop = pytest.mark.asyncio(loop_scope="module")


class Step:
    """The failpoint of a step: while it is armed, the core stops in its next one."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "parked"
        self._go = folder / "parked.engine.step.go"
        self._num_before = 0
        self.release()

    @property
    def environment(self) -> dict[str, str]:
        """Of a core that stops there, and takes 50 ms for a step: a long request takes a minute, and so does not end
        before a test that is held up ends it."""
        return {
            "TANDEM_ENABLE_FAILPOINTS": "1",
            "TANDEM_FAILPOINTS": "engine.step=park;engine.step=sleep:0.05",
            "TANDEM_FAILPOINT_FILE": str(self._file),
        }

    def arm(self) -> None:
        self._num_before = self._num_arrivals()
        self._go.unlink()

    def parked(self) -> bool:
        """A step has begun since it was armed, and may have passed in that moment: it stops in the next one then."""
        return self._num_arrivals() > self._num_before

    def release(self) -> None:
        self._go.touch()

    def _num_arrivals(self) -> int:
        return self._file.read_text().count("\n") if self._file.exists() else 0


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    return Step(tmp_path_factory.mktemp("step"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    config: EngineConfig, step: Step, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncEngine]:
    """One engine for most tests of this module: starting a process takes seconds. It runs two requests at a time and
    has two stores. The last test kills its core."""
    folder = tmp_path_factory.mktemp("stores")
    ensure_secret(folder / "secret")
    stores = [
        {
            "class_path": "kv_transfer.stores.files:SharedStorageConnector",
            "options": {"path": str(folder / name), "kv_secret_file": str(folder / "secret")},
        }
        for name in ("first", "second")
    ]
    connector = KVConnectorConfig(
        class_path="kv_transfer.multi_connector:MultiConnector", options={"connectors": stores}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in step.environment.items():
            patch.setenv(name, value)
        engine = await AsyncEngine.start(
            msgspec.structs.replace(config, num_blocks=256, max_num_seqs=2, kv_connector=connector)
        )
    yield engine
    await engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def threaded_engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """Two threads, each with a core of its own where there are two. The last test that takes it stops its core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_WAIT_POLICY")
        engine = await AsyncEngine.start(
            msgspec.structs.replace(config, num_threads=2, cpu_cores=tuple(usable_cores()[:2]))
        )
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
    before = engine.load.num_generated_tokens
    stream = engine.add_request(make_request("long", [5] * 50, max_tokens=900))
    async with aclosing(stream):
        await anext(stream)
    await until_idle(engine)
    assert engine.load.running_blocks == 0
    assert engine.load.num_generated_tokens - before < 800


@on_module_loop
async def test_a_running_id_is_refused_and_the_running_request_unharmed(engine: AsyncEngine) -> None:
    stream = engine.add_request(make_request("same", [5, 6], max_tokens=4))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add_request(make_request("same", [7]))
    assert sum([len(event.token_ids) async for event in stream if isinstance(event, TokensEvent)]) == 4


@on_module_loop
async def test_an_id_that_is_used_again_at_once_gets_no_tokens_of_its_last_request(engine: AsyncEngine) -> None:
    prompt = list(range(60, 70))
    expected = await collect(engine, make_request("other", prompt))
    for _ in range(2):
        async with aclosing(engine.add_request(make_request("again", [5] * 40, max_tokens=900))) as stream:
            await anext(stream)  # the next step has begun, and its token is on the way
    assert await collect(engine, make_request("again", prompt)) == expected


@on_module_loop
async def test_load_is_reported_while_nothing_happens(engine: AsyncEngine) -> None:
    await asyncio.sleep(0.6)
    await until(lambda: engine.core_silence_s < 0.2)  # it only grows until the core reports


@on_module_loop
async def test_steps_are_counted_by_their_tokens(engine: AsyncEngine) -> None:
    await until_idle(engine)
    before = engine.load
    for name in ("first", "second"):
        await collect(engine, make_request(name, list(range(100, 120)), max_tokens=4))
    async with asyncio.timeout(60):
        while engine.load.num_generated_tokens < before.num_generated_tokens + 8:
            await engine.wait_load(0.5)
    load = engine.load
    num_hit = BLOCK_SIZE  # the second's first block
    assert load.num_step_tokens - before.num_step_tokens == 20 + 3 + (20 - num_hit) + 3
    counts = zip(STEP_TOKENS, load.steps_by_tokens, before.steps_by_tokens, strict=False)
    assert {bound: new - old for bound, new, old in counts if new > old} == {1: 6, 8: 1, 32: 1}
    assert load.num_steps - before.num_steps == 8
    assert sum(load.steps_by_tokens) == load.num_steps


@on_module_loop
async def test_every_token_says_how_long_its_request_waited_to_run(engine: AsyncEngine) -> None:
    began_s = time.monotonic()
    requests = [make_request(f"long-{index}", [20 + index] * 9, max_tokens=2000) for index in range(2)]
    long = [engine.add_request(request) for request in requests]
    first = [await anext(stream) for stream in long]
    longest_s = time.monotonic() - began_s
    waiting = engine.add_request(make_request("waiting", [31] * 9, max_tokens=4))
    async with asyncio.timeout(60):
        while not engine.load.num_waiting:
            await engine.wait_load(0.5)
    seen_s = time.monotonic()
    await asyncio.sleep(0.05)
    waited_s = time.monotonic() - seen_s
    await long[0].aclose()
    queued = {event.queue_s async for event in waiting if isinstance(event, TokensEvent)}
    await long[1].aclose()
    assert len(queued) == 1  # the same with every token
    assert queued.pop() >= waited_s
    assert all(isinstance(event, TokensEvent) and 0 < event.queue_s <= longest_s for event in first)


@on_module_loop
async def test_what_a_connector_moved_comes_up_from_the_core(engine: AsyncEngine) -> None:
    await until_idle(engine)
    before = engine.load.kv_totals[0].saved
    request = EngineRequest(
        request_id="held",
        prompt_token_ids=list(range(200, 240)),
        params=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        hold_kv=HoldKV(transfer_id="t1", lease_s=30.0),
    )
    async with asyncio.timeout(20):
        async for _ in engine.add_request(request):
            pass
        while engine.load.kv_totals[0].saved.num_blocks < before.num_blocks + 3:  # two full ones and the tail
            await engine.wait_load(0.5)
    assert [totals.connector for totals in engine.load.kv_totals] == ["shared_storage"] * 2
    saved = engine.load.kv_totals[0].saved
    assert saved.num_bytes - before.num_bytes >= 3 * engine.info.bytes_per_block
    assert saved.seconds > before.seconds
    assert saved.failures == {}
    report = Outputs([], engine.load)  # as it comes from a core in a process of its own
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=CoreMessage) == report
    assert engine.load.num_transfers == 1


@on_module_loop
async def test_a_connector_s_events_during_a_step_end_no_silence(engine: AsyncEngine, step: Step) -> None:
    ended: list[tuple[str, float]] = []

    def on_transfer_event(event: TransferEvent) -> None:
        if event.ended is not None and event.transfer_id == "t2":
            ended.append((event.ended, engine.core_silence_s))

    of_others, engine.on_transfer_event = engine.on_transfer_event, on_transfer_event
    held = msgspec.structs.replace(
        make_request("held", [5] * 40), hold_kv=HoldKV(transfer_id="t2", lease_s=PATIENCE * 60)
    )
    try:
        await collect(engine, held)
        await until_idle(engine)
        step.arm()
        hung = asyncio.create_task(collect(engine, make_request("hung", [7] * 9)))
        await until(step.parked)
        await until(lambda: engine.core_silence_s > 0.4)
        engine.send(LeaseCommand("t2", "release"))
        await until(lambda: ended)
        assert ended[0][0] == "released"
        assert ended[0][1] > 0.4
        step.release()
        assert len(await hung) == 8
    finally:
        step.release()
        engine.on_transfer_event = of_others


@on_module_loop
async def test_threads_of_an_idle_core_sleep_on_cores_of_their_own_too(threaded_engine: AsyncEngine) -> None:
    core = psutil.Process(threaded_engine.info.pid)

    def used_s() -> float:
        return core.cpu_times().user + core.cpu_times().system

    await collect(threaded_engine, make_request("one", [5, 6, 7] * 300))
    await until_idle(threaded_engine)
    async with asyncio.timeout(30 * PATIENCE):
        while True:
            before_s = used_s()
            await asyncio.sleep(1.0)
            if used_s() - before_s < 0.1:
                break


@on_module_loop
async def test_a_core_that_hangs_can_be_killed(threaded_engine: AsyncEngine) -> None:
    stream = threaded_engine.add_request(make_request("stuck", [5] * 9, max_tokens=900))
    await anext(stream)
    os.kill(threaded_engine.info.pid, signal.SIGSTOP)
    threaded_engine.kill("it hangs")
    with pytest.raises(EngineDeadError, match="it hangs") as ended:
        async for _ in stream:
            pass
    assert ended.value.crashed
    assert await threaded_engine.wait_dead() == "it hangs"
    await threaded_engine.shutdown()
    assert not psutil.pid_exists(threaded_engine.info.pid)


@on_module_loop
async def test_a_core_that_cannot_start_says_why(config: EngineConfig, capfd: pytest.CaptureFixture[str]) -> None:
    broken = EngineConfig(model="/nowhere")
    with pytest.raises(EngineStartError, match="status 2"):
        await AsyncEngine.start(broken)
    assert "config.json" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("end", "error"),
    [("kill -9 $$", EngineDeadError), ("exit 1", EngineDeadError), ("exit 2", EngineStartError)],
)
@on_module_loop
async def test_a_core_that_ends_while_it_loads_may_start_later_unless_its_status_says_otherwise(
    tmp_path: Path, end: str, error: type[EngineError]
) -> None:
    (script := tmp_path / "python").write_text(f"#!/bin/sh\n{end}\n")
    script.chmod(0o755)
    with pytest.raises(error, match="ended with status") as caught:
        await AsyncEngine.start(EngineConfig(model="m", python=str(script)))
    assert may_pass(caught.value) == (error is EngineDeadError)


def silent_core(folder: Path) -> EngineConfig:
    """Of a core that connects and sends something else than its introduction; the file `pid` there names it."""
    message = msgspec.msgpack.encode(Outputs([], EngineLoad()))
    (script := folder / "python").write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys, zmq\n"
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "socket = zmq.Context().socket(zmq.PAIR)\n"
        "socket.set(zmq.RCVTIMEO, 60_000)\n"
        "socket.connect(sys.argv[-1])\n"
        f"socket.send({message!r})\n"
        "socket.recv()\n"
        "os._exit(0)\n"
    )
    script.chmod(0o755)
    return EngineConfig(model="m", python=str(script))


@on_module_loop
async def test_a_core_that_does_not_introduce_itself_is_ended(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no EngineInfo first"):
        await AsyncEngine.start(silent_core(tmp_path))
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@on_module_loop
async def test_a_temporary_directory_whose_path_has_too_many_bytes_for_sockets_is_not_used(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = short_folder / ("é" * 40)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(EngineError, match="no EngineInfo first"):  # it has connected
        await AsyncEngine.start(silent_core(tmp_path))


@on_module_loop
async def test_a_number_that_no_message_has_is_an_error_that_leaves_nothing(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    connector = KVConnectorConfig(class_path="m:C", options={"capacity_bytes": 10**20})
    with pytest.raises(EngineError, match="an integer of more than 64 bits"):
        await AsyncEngine.start(EngineConfig(model="m", kv_connector=connector))
    assert not list(short_folder.iterdir())


@on_module_loop
async def test_a_start_that_is_cancelled_before_the_core_has_its_settings_leaves_nothing(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core reads none, and its pipe is full."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    (script := short_folder / "python").write_text(f"#!/bin/sh\necho $$ > {short_folder}/pid\nexec sleep 1000\n")
    script.chmod(0o755)
    starting = asyncio.ensure_future(AsyncEngine.start(EngineConfig(model="m" * (1 << 20), python=str(script))))
    await until(lambda: (short_folder / "pid").exists() and (short_folder / "pid").read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(int((short_folder / "pid").read_text()))
    assert not list(short_folder.glob("tandem-core-*"))


@on_module_loop
async def test_a_machine_without_room_for_a_process_is_no_error_of_the_settings(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", AsyncMock(side_effect=full))
    with pytest.raises(BlockingIOError, match="core's process cannot be started: Resource temporarily") as caught:
        await AsyncEngine.start(config)
    assert may_pass(caught.value)


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


@on_module_loop
async def test_a_killed_core_ends_its_streams_with_an_error(engine: AsyncEngine) -> None:
    """The last test that takes this engine, whose steps take so long that the stream does not end before."""
    await until_idle(engine)
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
