"""examples/node-backend against a router: it streams, keeps its deadline, cancels and comes again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.app import RouterApp
from router.request.validation import ServedModel
from serving.settings import parse_address
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_fakes_tokenizer, write_model_folder
from tests.fakes.tokens import text_of, token_at
from tests.router.conftest import Run
from tests.router.rig import Rig, running, settings_of, slow

EXAMPLE = Path(__file__).parents[2] / "examples/node-backend"


@asynccontextmanager
async def backend(rig: Rig, **env: str) -> AsyncIterator[httpx.AsyncClient]:
    """The example as a process, and a client of it."""
    installed = EXAMPLE / "node_modules/@grpc/grpc-js"
    assert installed.is_dir(), "the example's packages are missing: cd examples/node-backend && npm ci"
    process = await asyncio.create_subprocess_exec(
        "node",
        "server.js",
        cwd=EXAMPLE,
        env={**os.environ, "TANDEM_ADDRESS": rig.app.address, "PORT": "0", **env},
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
    decode = FakeInstance("decode", behaviour=slow(0.02))
    async with run(prefill=0, decode=[decode]) as rig, backend(rig) as client:
        async with client.stream("POST", "/ask", content="Who lives here?") as response:
            assert response.status_code == 200
            pieces = [piece async for piece in response.aiter_text()]
        assert len(pieces) > 20, "it came at once"
        assert "".join(pieces) == expected_text(decode, 256) + "\n"
        await rig.until_idle()


async def test_a_reader_that_hangs_up_ends_the_request(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run(prefill=0, decode=[decode]) as rig, backend(rig) as client:
        async with client.stream("POST", "/ask", content="hi") as response:
            await anext(response.aiter_text())
        await decode.until("decode cancelled")
        assert len(decode.recorded("token")) < 100
        await rig.until_idle()
        decode.behaviour.token_s = 0.0
        assert (await client.post("/ask", content="hi")).status_code == 200, "the backend lives on"


async def test_the_deadline_is_kept(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=Behaviour(prefill_s=60.0))
    async with run(prefill=0, decode=[decode]) as rig, backend(rig, DEADLINE_MS="500") as client:
        response = await client.post("/ask", content="hi")
        assert response.status_code == 504
        await rig.until_idle()


async def test_it_comes_again_when_nobody_was_there(run: Run) -> None:
    async with run(prefill=0) as rig, backend(rig) as client:
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
    async with run(prefill=0) as rig, backend(rig) as client:
        response = await client.post("/ask", content="x" * 1_000_000)
        assert (response.status_code, response.text) == (413, "the question is too long\n")
        async with asyncio.timeout(20):
            assert (await client.post("/ask", content="hi")).status_code == 200
        assert rig.app.service.metrics.num_received == 1


async def test_a_wrong_request_is_not_tried_again(run: Run) -> None:
    async with run(prefill=0) as rig, backend(rig) as client:
        response = await client.post("/ask", content="x" * 5000)
        assert response.status_code == 400
        assert "limit 4095" in response.text
        assert rig.app.service.metrics.num_received == 1


async def test_a_stream_whose_router_ends_goes_on_at_its_successor(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    write_fakes_tokenizer(folder)
    model = ServedModel.from_folder(folder, "fake")
    decode = FakeInstance("decode", behaviour=slow(0.02))
    async with running(model, folder, prefill=0, decode=[decode]) as rig, backend(rig) as client:
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


async def test_a_connection_that_breaks_behind_the_answer_costs_nothing(run: Run) -> None:
    class Breaking(generation_pb2_grpc.GenerationServiceServicer):
        num_calls = 0

        async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> Any:
            self.num_calls += 1
            if request.HasField("resume"):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "every choice has finished")
            chunk = common_pb2.TokenChunk(token_ids=[5], text="Yes.")
            chunk.finish.reason = common_pb2.FINISH_REASON_STOP
            yield generation_pb2.GenerateResponse(tokens=chunk, seed=3, model="scripted")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Connection dropped")

    server, breaking = grpc.aio.server(), Breaking()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(breaking, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with run(prefill=0) as rig, backend(rig, TANDEM_ADDRESS=address) as client:
        response = await client.post("/ask", content="hi")
    await server.stop(None)
    assert (response.text, breaking.num_calls) == ("Yes.\n", 1)
