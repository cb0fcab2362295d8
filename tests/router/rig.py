"""A router and fake instances in one process, over real sockets, with short times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.app import RouterApp
from router.request.validation import ServedModel
from router.settings import RouterSettings
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids, text_of
from tests.waiting import until

PROMPT = list(range(20, 120))
"""Longer than what stays local in auto."""
SHORT = list(range(20, 30))
SEED = 7
TIMEOUT_S = 20.0


@dataclass
class Answer:
    """Everything that came of one Generate call, checked to arrive exactly once."""

    responses: list[generation_pb2.GenerateResponse] = field(default_factory=list)
    trailers: dict[str, str] = field(default_factory=dict)
    first_token_s: float = 0.0

    def ids(self, choice: int = 0) -> list[int]:
        ids: list[int] = []
        for chunk in self.chunks(choice):
            assert chunk.token_index == len(ids)
            ids.extend(chunk.token_ids)
        return ids

    def text(self, choice: int = 0) -> str:
        text = ""
        for chunk in self.chunks(choice):
            assert chunk.text_offset == len(text)
            text += chunk.text
        return text

    def chunks(self, choice: int = 0) -> list[common_pb2.TokenChunk]:
        return [response.tokens for response in self.responses if response.tokens.choice == choice]

    def finish(self, choice: int = 0) -> common_pb2.Finish:
        finishes = [chunk.finish for chunk in self.chunks(choice) if chunk.HasField("finish")]
        assert len(finishes) == 1
        assert self.chunks(choice)[-1].HasField("finish")
        return finishes[0]

    def is_exactly(self, num_tokens: int, *, prompt: list[int] = PROMPT, seed: int = SEED, choice: int = 0) -> bool:
        """Whether ids and text are those of a fault-free run."""
        ids = expected_ids(prompt, seed, num_tokens, choice)
        assert self.ids(choice) == ids
        assert self.text(choice) == text_of(ids)
        return True


class Rig:
    """The router, its fakes, and a client."""

    def __init__(self, app: RouterApp, prefill: list[FakeInstance], decode: list[FakeInstance]) -> None:
        self.app = app
        self.prefill = prefill
        self.decode = decode
        self.channel = grpc.aio.insecure_channel(app.address)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def call(self, request: generation_pb2.GenerateRequest | None = None, **fields: Any) -> Any:
        """One Generate call; `fields` as `request_of` takes them."""
        timeout = fields.pop("timeout", TIMEOUT_S)
        return self.stub.Generate(request or request_of(**fields), timeout=timeout)

    async def generate(
        self,
        request: generation_pb2.GenerateRequest | None = None,
        *,
        permits: asyncio.Semaphore | None = None,
        **fields: Any,
    ) -> Answer:
        """A whole answer. `permits` are those of an instance: each token that the client reads releases one."""
        call, answer = self.call(request, **fields), Answer()
        async for response in call:
            answer.responses.append(response)
            if permits is not None:
                for _ in response.tokens.token_ids:
                    permits.release()
        answer.trailers = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
        return answer

    async def until_ready(self, num_prefill: int | None = None, num_decode: int | None = None) -> None:
        """Waits until the router sees that many ready instances; all by default."""
        wanted = (
            len(self.prefill) if num_prefill is None else num_prefill,
            len(self.decode) if num_decode is None else num_decode,
        )
        await until(lambda: (self.app.pools.prefill.num_ready(), self.app.pools.decode.num_ready()) == wanted)

    async def until_idle(self, timeout_s: float = 30.0) -> None:
        """Waits until nothing runs anywhere and no prefill instance holds KV."""
        async with asyncio.timeout(timeout_s):
            while self._is_router_busy() or any(fake.is_busy for fake in [*self.prefill, *self.decode]):
                await asyncio.sleep(0.005)

    async def until_router_is_idle(self) -> None:
        """Waits until the router has let go of every request."""
        await until(lambda: not self._is_router_busy())

    def _is_router_busy(self) -> bool:
        return bool(
            self.app.admission.in_use.num_requests
            or self.app.admission.in_use.num_tokens
            or self.app.service.abort_registry.num_requests
        )


def request_of(
    prompt: list[int] = PROMPT, *, max_tokens: int = 12, seed: int = SEED, **fields: Any
) -> generation_pb2.GenerateRequest:
    """A request for ids; `n` goes into its sampling, everything else beside."""
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, n=fields.pop("n", None))
    return generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=prompt), sampling=sampling, **fields)


NOTICED_BY_BEATS = {"beat_timeout_s": 0.5, "core_silence_timeout_s": 60.0}
"""Settings of pools in which nothing but missing load reports ends a frozen instance's calls within a test's time."""


def settings_of(
    model_folder: Path, prefill: list[FakeInstance], decode: list[FakeInstance], **sections: Any
) -> RouterSettings:
    """Settings with short times; `sections` are laid over them field by field."""
    values: dict[str, dict[str, Any]] = {
        "router": {"model": str(model_folder), "model_name": "fake"},
        "server": {"drain_accept_s": 0.0, "drain_grace_s": 2.0},
        "pools": {
            "prefill": ",".join(fake.address for fake in prefill),
            "decode": ",".join(fake.address for fake in decode),
            "beat_timeout_s": 10.0,  # a busy machine delays reports; tests of silence set less
            "core_silence_timeout_s": 10.0,
            "min_backoff_s": 0.02,
            "max_backoff_s": 0.1,
        },
        "failover": {"resume_wait_s": 1.0},
        # Fakes run in this process: a ping that they do not answer in time is a stall of its own, not a dead instance.
        "channel": {"ping_timeout_ms": 20_000},
        # By length alone: the speeds of fakes say nothing, and a test is to know where its request goes. A busy machine
        # delays reservations; tests of lost ones set less.
        "disaggregation": {"reserve_timeout_s": 20.0, "speed_smoothing": 0.0},
    }
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return RouterSettings.model_validate(values)


@asynccontextmanager
async def running(
    model: ServedModel,
    model_folder: Path,
    *,
    prefill: list[FakeInstance] | int = 1,
    decode: list[FakeInstance] | int = 1,
    wait: bool = True,
    **sections: Any,
) -> AsyncIterator[Rig]:
    """A rig with these fakes (or that many), ready; checks at the end that nothing is left anywhere."""
    prefill = [FakeInstance("prefill", f"prefill-{i}") for i in range(prefill)] if isinstance(prefill, int) else prefill
    decode = [FakeInstance("decode", f"decode-{i}") for i in range(decode)] if isinstance(decode, int) else decode
    async with AsyncExitStack() as stack:
        for fake in [*prefill, *decode]:
            await stack.enter_async_context(fake)
        app = RouterApp(settings_of(model_folder, prefill, decode, **sections), model, rng=random.Random(0))
        await app.start()
        stack.push_async_callback(app.stop)
        rig = Rig(app, prefill, decode)
        stack.push_async_callback(rig.channel.close)
        if wait:
            await rig.until_ready()
        yield rig
        await rig.until_router_is_idle()


def slow(token_s: float = 0.02, **fields: Any) -> Behaviour:
    """An instance that takes its time, so that something can happen meanwhile."""
    return Behaviour(token_s=token_s, **fields)
