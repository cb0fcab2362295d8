"""A router that dies under a request: both clients go on behind what they have. Real deaths are in
tests/system/test_killed_routers.py; here a server ends calls with what gRPC reports of them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from serving.errors import CutOff, ServiceError, Unavailable, trailers
from tandem import AsyncClient, Client, Completion, StreamError, TandemError
from tandem.client import resumption
from tests.engine_under_test import PATIENCE
from tests.waiting import until, wait_until

TEXTS = ["Once", " upon", " a", " time", " there"]
NUM = len(TEXTS)
LOST = "Socket closed"
Call = tuple[int, str | ServiceError | None]
"""One call: how many messages come, and how it ends then. None: well."""


class Reset(ServiceError):
    """What gRPC says where a proxy in between ends a stream whose router has died."""

    def __init__(self) -> None:
        super().__init__("Received RST_STREAM with error code 2")


class ScriptedRouter(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each call as `calls` says, the last entry for all that follow, and goes on behind what is resumed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.first_epoch = 1
        self.resumes = True
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.may_end = threading.Event()
        """The last message of each call waits for it."""
        self.may_end.set()
        self.prompts = [1]
        """The length of the prompt in each call, as `calls`."""
        # Bound to the port and not listening: no other process gets it between two starts.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._port.getsockname()[1]}"

    def close(self) -> None:
        self.stop()
        self._port.close()

    def start(self) -> None:
        self._server: Any = grpc.server(ThreadPoolExecutor(4))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)  # type: ignore[arg-type]
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        """grpcio 1.78 crashes if a client connects at this moment."""
        if (server := self._server) is not None:
            self._server = None
            server.stop(None).wait()

    def Generate(self, request: Any, context: Any) -> Iterator[generation_pb2.GenerateResponse]:  # type: ignore[override]
        self.may_answer.wait(60.0)
        num_messages, end = self.calls[min(len(self.requests), len(self.calls) - 1)]
        self.requests.append(request)
        responses = [*self._responses(request)][:num_messages]
        yield from responses[:-1]
        self.may_end.wait(60.0)
        yield from responses[-1:]
        if isinstance(end, ServiceError):
            context.set_trailing_metadata(trailers(end, end.message))
            context.abort(end.code, end.message)
        if end is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, end)

    def GetModelInfo(self, request: Any, context: Any) -> Any:
        self.may_answer.wait(60.0)
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def _responses(self, request: generation_pb2.GenerateRequest) -> Iterator[generation_pb2.GenerateResponse]:
        known = {choice.choice: choice for choice in request.resume.choices} if self.resumes else {}
        for position in range(NUM):
            for index in range(request.sampling.n or 1):
                choice = known.get(index, generation_pb2.ResumedChoice())
                if choice.finished or position < len(choice.token_ids):
                    continue
                chunk = common_pb2.TokenChunk(
                    choice=index,
                    stream_epoch=self.first_epoch,
                    token_index=position,
                    token_ids=[position],
                    text=TEXTS[position],
                    text_offset=len("".join(TEXTS[:position])),
                )
                if position == NUM - 1:
                    chunk.finish.reason = common_pb2.FINISH_REASON_LENGTH
                num_prompt_tokens = self.prompts[min(len(self.requests), len(self.prompts)) - 1]
                fingerprint = f"f{index}" if position == 0 else ""
                yield generation_pb2.GenerateResponse(
                    request_id=request.request_id or f"drawn-{len(self.requests)}",
                    tokens=chunk,
                    seed=3,
                    prompt_tokens=num_prompt_tokens,
                    model="scripted",
                    fingerprint=fingerprint,
                )


@pytest.fixture(scope="module")
def routers() -> Iterator[list[ScriptedRouter]]:
    """They stop when no client connects any more: grpcio 1.78 crashes where a server stops while it accepts."""
    routers: list[ScriptedRouter] = []
    yield routers
    for router in routers:
        router.close()


@pytest.fixture
def router(routers: list[ScriptedRouter]) -> ScriptedRouter:
    routers.append(ScriptedRouter())
    routers[-1].start()
    return routers[-1]


Generate = Callable[..., Completion]


@pytest.fixture(params=["blocking", "async"])
def generate(request: pytest.FixtureRequest, router: ScriptedRouter) -> Generate:
    """Generates with a client of one kind."""

    def blocking(max_resumptions: int = 3, **options: Any) -> Completion:
        with Client(router.address, max_resumptions=max_resumptions) as client:
            return client.generate("go", **options)

    def on_loop(max_resumptions: int = 3, **options: Any) -> Completion:
        async def call() -> Completion:
            async with AsyncClient(router.address, max_resumptions=max_resumptions) as client:
                return await client.generate("go", **options)

        return asyncio.run(call())

    return blocking if request.param == "blocking" else on_loop


@pytest.mark.parametrize(
    "lost",
    [
        LOST,
        "recvmsg:Connection reset by peer",
        "GOAWAY received",
        "Cancelling all calls",
        CutOff("ended", 0.25),
        Reset(),
    ],
)
def test_what_has_arrived_is_sent_again_and_the_rest_comes(
    router: ScriptedRouter, generate: Generate, lost: str | ServiceError
) -> None:
    router.calls, router.first_epoch = [(2, lost), (NUM, None)], 5
    completion = generate(temperature=0.7, request_id="mine", lora="poet")
    assert completion.text == "".join(TEXTS)
    assert (completion.token_ids, completion.seed) == (tuple(range(NUM)), 3)
    first, again = router.requests
    assert not first.HasField("resume")
    assert (again.text, again.request_id, again.sampling.temperature) == ("go", "mine", first.sampling.temperature)
    assert (first.lora, again.lora) == ("poet", "poet")
    assert again.sampling.seed == 3, "that of the first message"
    [choice] = again.resume.choices
    assert (choice.choice, list(choice.token_ids), choice.finished, choice.fingerprint) == (0, [0, 1], False, "f0")


def test_an_abort_by_the_id_of_the_answer_finds_it_at_the_next_router(
    router: ScriptedRouter, generate: Generate
) -> None:
    router.calls = [(2, LOST), (NUM, None)]
    assert generate().request_id == "drawn-1"
    assert [request.request_id for request in router.requests] == ["", "drawn-1"]


def test_the_next_router_may_count_its_epochs_from_the_beginning(router: ScriptedRouter, generate: Generate) -> None:
    router.calls, router.first_epoch = [(2, LOST), (NUM, None)], 5

    class Later(list[generation_pb2.GenerateRequest]):
        def append(self, request: generation_pb2.GenerateRequest) -> None:
            router.first_epoch = 5 - 4 * len(self)
            super().append(request)

    router.requests = Later()
    assert generate().token_ids == tuple(range(NUM))


def test_it_may_break_again_and_again(router: ScriptedRouter, generate: Generate) -> None:
    router.calls = [(1, LOST), (2, LOST), (1, LOST), (NUM, None)]
    assert generate().token_ids == tuple(range(NUM))
    counts = [len(request.resume.choices[0].token_ids) for request in router.requests[1:]]
    assert counts == [1, 3, 4]


def test_each_choice_goes_on_where_it_was(router: ScriptedRouter, generate: Generate) -> None:
    router.calls = [(3, LOST), (NUM * 3, None)]
    completion = generate(n=3)
    assert [choice.token_ids for choice in completion.choices] == [tuple(range(NUM))] * 3
    router.requests.clear()
    router.calls = [(1, LOST), (NUM * 3 - 3, LOST), (NUM * 3, None)]
    assert [choice.token_ids for choice in generate(n=3).choices] == [tuple(range(NUM))] * 3
    _, second, third = router.requests
    assert [choice.choice for choice in second.resume.choices] == [0], "the others have not begun"
    assert [choice.finished for choice in third.resume.choices] == [True, False, False]
    assert [choice.fingerprint for choice in third.resume.choices] == ["f0", "f1", "f2"]


def test_a_request_that_has_not_begun_is_sent_again_as_it_was(router: ScriptedRouter, generate: Generate) -> None:
    router.calls = [(0, LOST), (0, CutOff("ended", 0.01)), (0, "Cancelling all calls"), (NUM, None)]
    assert generate().token_ids == tuple(range(NUM))
    first, *again = router.requests
    assert again == [first] * 3


def test_while_no_router_can_go_on_it_asks_again(router: ScriptedRouter, generate: Generate) -> None:
    soon = Unavailable("no decode instance is available", 0.01)
    router.calls = [
        (2, LOST),
        (0, "failed to connect to all addresses"),
        (0, soon),
        (0, Reset()),
        (0, soon),
        (NUM, None),
    ]
    assert generate(max_resumptions=1).token_ids == tuple(range(NUM))
    assert len(router.requests) == 6


_GENERATE = """
import sys
from tandem import Client
with Client(sys.argv[1]) as client:
    print(client.generate("go").text)
"""


def test_a_router_that_is_back_is_found_at_once(router: ScriptedRouter) -> None:
    """The client is a process of its own, since a server of the same one reads the client's sockets as well."""
    router.calls = [(2, LOST), (0, "failed to connect to all addresses")]
    command = [sys.executable, "-c", _GENERATE, router.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as generating:
        wait_until(lambda: len(router.requests) >= 4, "it does not ask again")  # its connection is no new one
        router.stop()
        time.sleep(1.0)  # connections are refused meanwhile
        router.calls = [(NUM, None)]
        router.start()
        assert generating.communicate(timeout=20 * PATIENCE)[0].strip() == "".join(TEXTS), "it took longer, unwatched"


def test_it_gives_up_in_time(router: ScriptedRouter, generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "RESUME_WAIT_S", 0.5)
    router.calls = [(2, LOST), (0, "failed to connect to all addresses")]
    with pytest.raises(TandemError, match="no router answers"):
        generate()
    assert 1 < len(router.requests) < 12


def test_the_requests_own_time_limit_holds(router: ScriptedRouter, generate: Generate) -> None:
    router.calls = [(2, LOST), (0, "failed to connect to all addresses")]
    with pytest.raises(TandemError):
        generate(timeout_s=0.3)
    assert len(router.requests) < 8


FINAL: dict[str, list[Call]] = {
    "the router's own answer": [(2, Unavailable("no instance can serve the request now", 1.0))],
    "a status that no death has": [(2, ServiceError("a bug"))],
    "a router that is not there": [(0, "failed to connect to all addresses")],
    "a proxy without routers": [(0, "no healthy upstream")],
    "a proxy that says nothing certain": [(0, Reset())],
}


@pytest.mark.parametrize("name", FINAL)
def test_other_errors_are_the_callers(router: ScriptedRouter, generate: Generate, name: str) -> None:
    router.calls = [*FINAL[name], (NUM, None)]
    with pytest.raises(TandemError):
        generate()
    assert len(router.requests) == 1


def test_no_more_than_so_many_resumptions(router: ScriptedRouter, generate: Generate) -> None:
    router.calls = [(1, LOST), (1, LOST), (NUM, None)]
    with pytest.raises(TandemError, match=LOST):
        generate(max_resumptions=1)
    assert len(router.requests) == 2
    router.requests.clear()
    with pytest.raises(TandemError, match=LOST):
        generate(max_resumptions=0)
    assert len(router.requests) == 1
    with pytest.raises(ValueError, match="max_resumptions: is -1"):
        generate(max_resumptions=-1)


@pytest.mark.parametrize("num_messages", [0, 2])
def test_routers_that_die_of_it_are_counted_without_a_token_too(
    router: ScriptedRouter, generate: Generate, num_messages: int
) -> None:
    router.calls = [(num_messages, LOST), (0, LOST), (0, CutOff("ended", 0.01)), (0, LOST), (NUM, None)]
    with pytest.raises(TandemError, match=LOST):
        generate()
    assert len(router.requests) == 4


@pytest.mark.parametrize("num_messages", [0, 2])
def test_a_router_that_ends_long_after_it_was_asked_is_a_break_of_its_own(
    router: ScriptedRouter, generate: Generate, num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0

    class Long(list[generation_pb2.GenerateRequest]):
        def append(self, request: generation_pb2.GenerateRequest) -> None:
            nonlocal now_s
            now_s += 2 * resumption.RESUME_WAIT_S
            super().append(request)

    monkeypatch.setattr(resumption, "time", SimpleNamespace(monotonic=lambda: now_s))
    router.requests = Long()
    router.calls = [(num_messages, LOST), (0, LOST), (0, CutOff("ended", 0.01)), (NUM, None)]
    assert generate().token_ids == tuple(range(NUM))


def test_the_time_limit_begins_with_the_iteration(router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(resumption, "time", SimpleNamespace(monotonic=lambda: now_s))
    router.calls = [(NUM, None)]
    with Client(router.address) as client:
        stream = client.stream("go", timeout_s=60.0)
        now_s += 100.0
        assert len(list(stream)) == NUM


def test_closing_a_client_that_waits_for_a_router_ends_its_streams(router: ScriptedRouter) -> None:
    router.calls = [(2, LOST), (0, Unavailable("soon", 1.0))]
    client = Client(router.address)

    def close_waiting() -> None:
        wait_until(lambda: len(router.requests) >= 2, "it does not ask again")
        client.close()

    closing = threading.Thread(target=close_waiting)
    closing.start()
    with pytest.raises(TandemError) as raised:
        client.generate("go")
    closing.join()
    assert raised.value.status == "CANCELLED"


def test_closing_an_asynchronous_client_does_so_as_well(router: ScriptedRouter) -> None:
    router.calls = [(2, LOST), (0, Unavailable("soon", 1.0))]

    async def on_loop() -> None:
        client = AsyncClient(router.address)
        generating = asyncio.create_task(client.generate("go"))
        await until(lambda: len(router.requests) >= 2)
        await client.close()
        with pytest.raises(TandemError) as raised:
            await generating
        assert raised.value.status == "CANCELLED"

    asyncio.run(on_loop())


@pytest.mark.parametrize("num_turns", range(6))
def test_closing_a_client_while_a_call_begins_is_no_cancellation(router: ScriptedRouter, num_turns: int) -> None:
    """Of the task that waits for the answer."""
    router.calls = [(0, Unavailable("soon", 1.0))]
    router.may_answer.clear()

    async def on_loop() -> None:
        client = AsyncClient(router.address)
        generating = asyncio.create_task(client.generate("go"))
        asking = asyncio.create_task(client.model_info())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await client.close()
        for task in (generating, asking):
            with pytest.raises(TandemError) as raised:
                await task
            assert raised.value.status == "CANCELLED"

    try:
        asyncio.run(on_loop())
    finally:
        router.may_answer.set()


_CLOSED_BEHIND_THE_CHECK = """
import sys
from contextlib import contextmanager
from tandem import Client, TandemError
client = Client(sys.argv[1])
connection = client._channel.connection
@contextmanager
def closed_behind_it(timeout_s):
    with connection(timeout_s) as checked:
        client.close()
        yield checked
client._channel.connection = closed_behind_it
try:
    eval(sys.argv[2])
except TandemError as error:
    print(error)
"""


@pytest.mark.parametrize("call", ["client.generate('go')", "client.model_info()"])
def test_closing_a_blocking_client_while_another_thread_begins_a_call_cancels_it(
    router: ScriptedRouter, call: str
) -> None:
    """The client is a process of its own, since gRPC may crash."""
    command = [sys.executable, "-c", _CLOSED_BEHIND_THE_CHECK, router.address, call]
    calling = subprocess.run(command, capture_output=True, text=True)
    assert (calling.stdout, calling.returncode) == ("CANCELLED: the client has been closed\n", 0), calling.stderr


def test_a_call_of_a_closed_client_says_so(router: ScriptedRouter) -> None:
    client = Client(router.address)
    client.close()
    for call in (lambda: client.generate("go"), client.model_info):
        with pytest.raises(TandemError, match="CANCELLED: the client has been closed"):
            call()


def test_a_connection_that_breaks_behind_the_answer_costs_nothing(router: ScriptedRouter, generate: Generate) -> None:
    router.calls = [(NUM, LOST)]
    assert generate().token_ids == tuple(range(NUM))
    assert len(router.requests) == 1


def test_a_router_that_does_not_know_resume_is_noticed(router: ScriptedRouter, generate: Generate) -> None:
    router.calls, router.resumes = [(2, LOST), (NUM, None)], False
    with pytest.raises(StreamError, match="token_index 0 where 2 was expected"):
        generate()


def test_a_prompt_that_is_no_longer_the_same_is_noticed(router: ScriptedRouter, generate: Generate) -> None:
    router.calls, router.prompts = [(2, LOST), (NUM, None)], [7, 8]
    with pytest.raises(StreamError, match="the prompt has 8 tokens, 7 where the answer began"):
        generate()


def test_leaving_a_stream_that_waits_for_a_router_ends_it(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.calls = [(2, LOST), (0, "failed to connect to all addresses")]
    waits, delay_s = asyncio.Event(), resumption.Resumption.delay_s

    def observed(self: resumption.Resumption, error: TandemError) -> float | None:
        if len(router.requests) == 2:
            waits.set()
        return delay_s(self, error)

    monkeypatch.setattr(resumption.Resumption, "delay_s", observed)

    async def leave() -> None:
        async with AsyncClient(router.address) as client:
            asking = asyncio.create_task(client.generate("go"))
            await waits.wait()  # no call is under way, so the router has recorded all of them
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.sleep(0.3)

    asyncio.run(leave())
    assert len(router.requests) == 2
