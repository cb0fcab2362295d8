"""examples/node-backend against a router: it streams, keeps its deadline, cancels and comes again."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.app import RouterApp
from router.request.validation import ServedModel
from serving.errors import CutOff, InternalError, InvalidArgument, Overloaded, ServiceError, Unavailable, trailers
from serving.settings import parse_address
from tests.ending_proxy import ENDS, FREEZES, ending_proxy
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_fakes_tokenizer, write_model_folder
from tests.fakes.tokens import text_of, token_at
from tests.router.conftest import Run
from tests.router.rig import running, settings_of, slow
from tests.tcp import TcpServer

EXAMPLE = Path(__file__).parents[2] / "examples/node-backend"


@asynccontextmanager
async def backend(address: str, **env: str) -> AsyncIterator[httpx.AsyncClient]:
    """The example as a process that calls the router at `address`, and a client of it."""
    installed = EXAMPLE / "node_modules/@grpc/grpc-js"
    assert installed.is_dir(), "the example's packages are missing: cd examples/node-backend && npm ci"
    process = await asyncio.create_subprocess_exec(
        "node",
        "server.js",
        cwd=EXAMPLE,
        env={**os.environ, "TANDEM_ADDRESS": address, "PORT": "0", **env},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        async with httpx.AsyncClient(base_url=line.removeprefix("listening on ").strip(), timeout=60) as client:
            yield client
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0, "the backend did not end by itself"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def expected_text(fake: FakeInstance, num_tokens: int) -> str:
    """What a fault-free run answers to the request that `fake` got last."""
    wanted = fake.recorded("decode")[-1].detail.request
    ids = [token_at(wanted.prompt_token_ids, wanted.sampling.seed, 0, position) for position in range(num_tokens)]
    return text_of(ids)


async def test_an_answer_is_passed_on_as_it_is_written(run: Run) -> None:
    """The next tokens come once a piece is read: a backend that gathers them gets no more. All have text, since four
    without any would be no piece."""
    permits, pieces = asyncio.Semaphore(4), []
    text = "".join(f"é{position % 10} " for position in range(256))
    decode = FakeInstance("decode", behaviour=Behaviour(permits=permits, writes=text))
    async with run(prefill=0, decode=[decode]) as rig, backend(rig.app.address) as client:
        async with client.stream("POST", "/ask", content="Who lives here?") as response:
            assert response.status_code == 200
            async for piece in response.aiter_text():
                pieces.append(piece)
                for _ in range(4):
                    permits.release()
        assert len(pieces) > 20, "it came at once"
        assert "".join(pieces) == f"{text}\n"
        await rig.until_idle()


async def test_what_the_model_thinks_is_not_passed_on(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template="{{ messages[0].content }}{# </think> #}")
    decode = FakeInstance("decode", behaviour=Behaviour(writes="<think>\nTwo threes.\n</think>\n\nSix."))
    model = ServedModel.from_folder(folder, "fake")
    async with running(model, folder, prefill=0, decode=[decode]) as rig, backend(rig.app.address) as client:
        assert (await client.post("/ask", content="Factors of 6?")).text == "Six.\n"


async def test_a_reader_that_hangs_up_ends_the_request(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run(prefill=0, decode=[decode]) as rig, backend(rig.app.address) as client:
        async with client.stream("POST", "/ask", content="hi") as response:
            await anext(response.aiter_text())
        await decode.until("decode cancelled")
        assert len(decode.recorded("token")) < 100
        await rig.until_idle()
        decode.behaviour.token_s = 0.0
        assert (await client.post("/ask", content="hi")).status_code == 200, "the backend lives on"


async def test_the_deadline_is_kept(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=Behaviour(prefill_s=60.0))
    async with run(prefill=0, decode=[decode]) as rig, backend(rig.app.address, DEADLINE_MS="500") as client:
        response = await client.post("/ask", content="hi")
        assert response.status_code == 504
        await rig.until_idle()


async def test_it_comes_again_when_nobody_was_there(run: Run) -> None:
    async with run(prefill=0) as rig, backend(rig.app.address) as client:
        [decode] = rig.decode
        await decode.kill()
        await rig.until_ready(num_decode=0)
        asking = asyncio.create_task(client.post("/ask", content="hi"))
        async with asyncio.timeout(20):
            while not rig.app.service.metrics.ended["unavailable"]:
                await asyncio.sleep(0.01)
        await decode.restart()
        response = await asking
        assert response.status_code == 200
        assert response.text == expected_text(decode, 256) + "\n"
        assert rig.app.service.metrics.num_received > 1


async def test_a_question_that_is_too_long_is_rejected_and_its_connection_serves_the_next(run: Run) -> None:
    async with run(prefill=0) as rig, backend(rig.app.address) as client:
        response = await client.post("/ask", content="x" * 1_000_000)
        assert (response.status_code, response.text) == (413, "the question is too long\n")
        async with asyncio.timeout(20):
            assert (await client.post("/ask", content="hi")).status_code == 200
        assert rig.app.service.metrics.num_received == 1


async def test_a_wrong_request_is_not_tried_again(run: Run) -> None:
    async with run(prefill=0) as rig, backend(rig.app.address) as client:
        response = await client.post("/ask", content="x" * 5000)
        assert response.status_code == 400
        assert "limit 4095" in response.text
        assert rig.app.service.metrics.num_received == 1


async def test_a_stream_whose_router_ends_goes_on_at_its_successor(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    write_fakes_tokenizer(folder)
    model = ServedModel.from_folder(folder, "fake")
    decode = FakeInstance("decode", behaviour=slow(0.02))
    async with running(model, folder, prefill=0, decode=[decode]) as rig, backend(rig.app.address) as client:
        async with client.stream("POST", "/ask", content="Who lives here?") as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            await rig.app.stop()
            host, port = parse_address(rig.app.address)
            settings = settings_of(folder, [], [decode], server={"host": host, "port": port})
            successor = RouterApp(settings, model)
            await successor.start()
            try:
                text += "".join([piece async for piece in pieces])
            finally:
                await successor.stop()
        first, second = decode.recorded("decode")
        assert second.detail.request.emitted_token_ids, "it did not go on, it began again"
        assert first.detail.request.sampling.seed == second.detail.request.sampling.seed
        assert text == expected_text(decode, 256) + "\n"


TEXTS = ["Yes", ", we", " do."]
LOST = "Connection dropped"
RESET = "Received RST_STREAM with code 2 (Internal server error)"
"""What grpc-js says of a stream that a proxy resets."""


class ScriptedRouter(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each call as `calls` says, the last one for all that follow: how many messages come, and how it ends
    then. None: well."""

    def __init__(self, *calls: tuple[int, str | ServiceError | None], resumes: bool = True) -> None:
        self.calls = calls
        self._resumes = resumes
        self.num_calls = 0
        self.before_end: Callable[[], None] = lambda: None

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> Any:
        num_messages, end = self.calls[min(self.num_calls, len(self.calls) - 1)]
        self.num_calls += 1
        resumed = request.resume.choices if self._resumes else []
        num_before = len(resumed[0].token_ids) if resumed else 0
        for position in range(num_before, num_before + num_messages):
            chunk = common_pb2.TokenChunk(token_index=position, token_ids=[position], text=TEXTS[position])
            if position == len(TEXTS) - 1:
                chunk.finish.reason = common_pb2.FINISH_REASON_STOP
            yield generation_pb2.GenerateResponse(tokens=chunk, seed=3, model="scripted")
        self.before_end()
        if isinstance(end, ServiceError):
            await context.abort(end.code, end.message, trailers(end, end.message))
        if end is not None:
            code = grpc.StatusCode.INTERNAL if end == RESET else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, end)


@asynccontextmanager
async def served(router: ScriptedRouter) -> AsyncIterator[str]:
    """The address of `router`."""
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def scripted(router: ScriptedRouter, **env: str) -> AsyncIterator[httpx.AsyncClient]:
    """The backend, with `router` in place of a real one."""
    async with served(router) as address, backend(address, **env) as client:
        yield client


@pytest.mark.parametrize("end", [LOST, RESET])
async def test_a_connection_that_breaks_behind_the_answer_costs_nothing(end: str) -> None:
    router = ScriptedRouter((3, end))
    async with scripted(router) as client:
        assert (await client.post("/ask", content="hi")).text == "Yes, we do.\n"
    assert router.num_calls == 1


@pytest.mark.parametrize("status", [Overloaded("the router is full", 0.01), Unavailable("no instance", 0.01)])
async def test_a_stream_that_broke_asks_again_until_a_router_has_room(status: ServiceError) -> None:
    router = ScriptedRouter((1, LOST), *[(0, status)] * 6, (2, None))
    async with scripted(router) as client:
        assert (await client.post("/ask", content="hi")).text == "Yes, we do.\n"
    assert router.num_calls == 8


async def test_a_stream_that_a_proxy_resets_goes_on() -> None:
    router = ScriptedRouter((1, RESET), (0, RESET), (2, None))
    async with scripted(router) as client:
        assert (await client.post("/ask", content="hi")).text == "Yes, we do.\n"
    assert router.num_calls == 3


@pytest.mark.parametrize("end", ENDS)
async def test_a_stream_that_a_proxy_ends_in_http2_goes_on(end: str) -> None:
    router, has_read, text = ScriptedRouter((1, LOST), (2, None)), asyncio.Event(), ""
    async with (
        served(router) as address,
        ending_proxy(address, end, has_read) as proxy,
        backend(proxy.address) as client,
        client.stream("POST", "/ask", content="hi") as response,
    ):
        async for piece in response.aiter_text():
            text += piece
            has_read.set()
    assert text == "Yes, we do.\n"
    assert router.num_calls == 2


GENERATE = """
import { connect } from "./tandem.js";
const tandem = await connect(process.argv[1]);
for await (const { tokens } of tandem.generate(JSON.parse(process.argv[2]))) process.stdout.write(tokens.text);
tandem.close();
"""


async def generated(address: str, request: dict[str, Any]) -> str:
    """The text that tandem.js gets for `request`."""
    node = ("node", "--input-type=module", "-e", GENERATE, address, json.dumps(request))
    process = await asyncio.create_subprocess_exec(*node, cwd=EXAMPLE, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return output.decode()


async def test_a_backend_that_has_kept_the_ids_goes_on_after_its_own_restart() -> None:
    router = ScriptedRouter((0, Unavailable("no instance", 0.01)), (1, LOST), (1, None))
    resume = {"choices": [{"token_ids": [0], "fingerprint": "f"}]}
    async with served(router) as address:
        assert await generated(address, {"text": "hi", "sampling": {"seed": 3}, "resume": resume}) == ", we do."
    assert router.num_calls == 3


async def test_a_number_of_choices_may_be_text_as_int64_is_in_javascript() -> None:
    router = ScriptedRouter((3, LOST), (0, InvalidArgument("resume: every choice has finished")))
    async with served(router) as address:
        assert await generated(address, {"text": "hi", "sampling": {"n": "1"}}) == "Yes, we do."
    assert router.num_calls == 1


@pytest.mark.slow
async def test_a_stream_whose_router_is_frozen_goes_on_after_fifteen_seconds() -> None:
    router, has_read = ScriptedRouter((1, LOST), (2, None)), asyncio.Event()
    has_read.set()
    async with (
        served(router) as address,
        ending_proxy(address, FREEZES, has_read) as proxy,
        backend(proxy.address, DEADLINE_MS="40000") as client,
    ):
        assert (await client.post("/ask", content="hi")).text == "Yes, we do.\n"
    assert router.num_calls == 2


async def test_a_router_that_was_away_for_long_is_found_at_once() -> None:
    """A twelfth attempt to connect would come after minutes if each waited longer than the one before."""
    num_attempts, has_tried_often = 0, asyncio.Event()

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts == 12:
            has_tried_often.set()
        writer.close()

    async with TcpServer(fail) as absent, backend(absent.address) as client, asyncio.timeout(60):
        while not has_tried_often.is_set():
            assert (await client.post("/ask", content="hi")).status_code == 503


async def test_a_router_on_this_machine_is_called_without_a_proxy() -> None:
    async with scripted(ScriptedRouter((3, None)), http_proxy="http://127.0.0.1:9", no_proxy="") as client:
        assert (await client.post("/ask", content="hi")).text == "Yes, we do.\n"


async def test_a_router_of_a_version_that_begins_again_ends_the_stream_and_repeats_nothing() -> None:
    router, pieces = ScriptedRouter((1, LOST), (3, None), resumes=False), list[str]()

    async def read(response: httpx.Response) -> None:
        async for piece in response.aiter_text():
            pieces.append(piece)

    async with scripted(router) as client, client.stream("POST", "/ask", content="hi") as response:
        with pytest.raises(httpx.RemoteProtocolError):
            await read(response)
    assert "Yes".startswith("".join(pieces))
    assert router.num_calls == 2


async def test_an_internal_error_of_a_router_is_final() -> None:
    router = ScriptedRouter((1, InternalError("a fault")), (2, None))
    async with scripted(router) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/ask", content="hi")
    assert router.num_calls == 1


@pytest.mark.parametrize("end", [CutOff("the router ended", 0.01), LOST])
async def test_each_router_that_dies_counts_as_a_resumption(end: str | ServiceError) -> None:
    router = ScriptedRouter((1, LOST), (0, end))
    async with scripted(router) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/ask", content="hi")
    assert router.num_calls == 4


async def test_a_router_that_dies_after_long_silence_starts_the_wait_anew(tmp_path: Path) -> None:
    """The process's clock jumps while the second router has the stream."""
    jumped, clock = tmp_path / "jumped", tmp_path / "clock.mjs"
    clock.write_text(
        'import { existsSync } from "node:fs";\n'
        "const now = Date.now;\n"
        "Date.now = () => now() + (existsSync(process.env.JUMPED) ? 31_000 : 0);\n"
    )
    router = ScriptedRouter(
        (1, LOST), (0, CutOff("ended", 0.01)), *[(0, Unavailable("no instance", 0.01))] * 6, (2, None)
    )

    def jump() -> None:
        if router.num_calls == 2:
            jumped.touch()

    router.before_end = jump
    env = {"NODE_OPTIONS": f"--import={clock}", "JUMPED": str(jumped), "DEADLINE_MS": "600000"}
    async with scripted(router, **env) as client:
        assert (await client.post("/ask", content="hi")).text == "Yes, we do.\n"
    assert router.num_calls == 9
