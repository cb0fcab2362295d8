"""Holds vLLM's AsyncLLM and serves one `AsyncEngine`, as engine/core/loop.py serves the built-in engine.

    AddRequest ─▶ a task: constraint compiled ─▶ AsyncLLM.generate ─▶ TokensEvent … ─▶ ended
                    └─ AbortRequests: the task is cancelled, and vLLM aborts the request
    every 250 ms: is vLLM paused? ─answered between two steps▶ the load is reported

So the host is silent while vLLM computes a step, as the built-in core is, and for ever when vLLM hangs. When one of
vLLM's processes ends, this one does: its instance's streams are resumed elsewhere, and its supervisor starts it anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec
import zmq
import zmq.asyncio
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from engine.config import EngineConfig
from engine.core.messages import (
    AbortRequests,
    AddRequest,
    Command,
    CoreMessage,
    EngineInfo,
    EngineRequest,
    ErrorKind,
    Event,
    KVProgress,
    LeaseCommand,
    Outputs,
    Seed,
    Shutdown,
    TokensEvent,
)
from engine.errors import EngineError, InvalidRequest
from engine.identity import compute_identity
from engine.sampling.grammar import GrammarCompiler
from vllm_engine.arguments import engine_arguments, set_environment
from vllm_engine.failures import FailedRequests
from vllm_engine.load import LoadMeter
from vllm_engine.requests import check_supported, tokens_event, vllm_input, vllm_params
from vllm_engine.versions import require_vllm

HEARTBEAT_S = 0.25
_SHUTDOWN_S = 2.0
_WITHOUT_EFFECT = ("gpu_memory_utilization", "enable_log_requests", "use_tqdm_on_load", "log_level")
"""Arguments that do not change what vLLM computes."""


async def serve(config: EngineConfig, address: str) -> None:
    """Start vLLM and serve until `Shutdown`. Raises EngineError if vLLM does not start or ends by itself."""
    folder = Path(address.removeprefix("ipc://")).parent
    set_environment(config, folder)
    if config.kv_connector.class_path != "engine.kv_connector:NullKVConnector":
        raise EngineError("engine.kind is vllm, which does not hand KV over yet: set transfer.connector to null")
    meter, failed = LoadMeter(), FailedRequests(folder)
    engine = _start(config, meter)
    try:
        info = await _engine_info(config, engine)
        meter.num_blocks = info.num_blocks
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 1000)
        socket.set_hwm(0)
        socket.connect(address)
        grammars = GrammarCompiler(Path(config.model), info.vocab_size, lambda: None)
        host = Host(engine, socket, meter, failed, grammars)
        host.send(info)
        await host.serve()
        socket.close()
    finally:
        engine.shutdown(timeout=_SHUTDOWN_S)


def _start(config: EngineConfig, meter: LoadMeter) -> AsyncLLM:
    """Blocks for seconds to minutes. On the main thread: with the thread that starts them vLLM's processes end."""
    try:
        return AsyncLLM.from_engine_args(engine_arguments(config), stat_loggers=[lambda *_: meter])
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"vLLM does not start: {error}") from error


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    task: asyncio.Task[None]
    has_token: bool = False


class Host:
    """One vLLM and its unfinished requests. Belongs to the event loop."""

    def __init__(
        self,
        engine: AsyncLLM,
        socket: zmq.asyncio.Socket,
        meter: LoadMeter,
        failed: FailedRequests,
        grammars: GrammarCompiler,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._meter = meter
        self._failed = failed
        self._grammars = grammars
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._running: dict[str, _Running] = {}
        self._events: list[Event] = []
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: CoreMessage) -> None:
        """Queue a message. Does not block."""
        self._socket.send(self._encoder.encode(message))

    async def serve(self) -> None:
        """Until `Shutdown`; raises EngineError when vLLM has ended."""
        commands = asyncio.create_task(self._receive())
        heartbeat = asyncio.create_task(self._report_until_cancelled())
        try:
            waited: list[asyncio.Future[None]] = [commands, heartbeat, self._dead]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for ended in waited:
                if ended.done():
                    ended.result()
        except EngineDeadError as error:
            raise EngineError(f"vLLM has ended: {error}") from error
        finally:
            for task in (commands, heartbeat, *(running.task for running in self._running.values())):
                task.cancel()

    async def _receive(self) -> None:
        while True:
            command: Command = self._decoder.decode(await self._socket.recv())
            match command:
                case AddRequest(request):
                    task = asyncio.create_task(self._run(request))
                    self._running[request.request_id] = _Running(request, task)
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        if (running := self._running.get(request_id)) is not None:
                            running.task.cancel()
                case Shutdown():
                    return
                case Seed() | KVProgress() | LeaseCommand():
                    pass  # of transfers that have ended: this engine has none
                case _:
                    assert_never(command)

    async def _report_until_cancelled(self) -> None:
        while True:
            await self._engine.is_paused()
            self._flush()
            await asyncio.sleep(HEARTBEAT_S)

    async def _run(self, request: EngineRequest) -> None:
        try:
            check_supported(request)
            if (constraint := request.params.constraint) is not None:
                await asyncio.wrap_future(self._grammars.compiled(constraint))  # the worker's cannot answer an error
            await self._generate(request)
        except InvalidRequest as error:
            self._fail(request, str(error), "invalid_constraint")
        except (VLLMClientError, ValueError) as error:
            self._fail(request, f"vLLM rejects the request: {error}", "invalid_constraint")
        except EngineGenerateError as error:
            self._fail(request, f"vLLM gave up the request: {error.__cause__ or error}", None)
        except EngineDeadError as error:
            if not self._dead.done():
                self._dead.set_exception(error)
        finally:
            self._running.pop(request.request_id, None)
            self._failed.forget(request.request_id)
            if not self._running:
                self._meter.idle()

    async def _generate(self, request: EngineRequest) -> None:
        running = self._running[request.request_id]
        outputs = self._engine.generate(
            vllm_input(request), vllm_params(request), request.request_id, priority=-request.priority
        )
        async with aclosing(outputs):
            async for output in outputs:
                if self._failed.take(request.request_id):
                    what = "its parameters exclude every token, or the model's logits are not finite"
                    return self._fail(request, what, "nothing_allowed")
                self._emit(tokens_event(request, output, is_first=not running.has_token))
                running.has_token = True
        return None

    def _fail(self, request: EngineRequest, error: str, kind: ErrorKind | None) -> None:
        self._emit(TokensEvent(request.request_id, [], finish_reason="error", error=error, error_kind=kind))

    def _emit(self, event: Event) -> None:
        """Events of one step leave in one message."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        waiting = [running.request for running in self._running.values() if not running.has_token]
        num_waiting_tokens = sum(len(request.prompt_token_ids) + len(request.output_token_ids) for request in waiting)
        load = self._meter.load(num_requests=len(self._running), num_waiting_tokens=num_waiting_tokens)
        self.send(Outputs(events, load))


@dataclass(frozen=True, slots=True)
class _Layout:
    block_size: int
    digest: bytes


async def _engine_info(config: EngineConfig, engine: AsyncLLM) -> EngineInfo:
    vllm_config = engine.vllm_config
    cache, model, scheduler = vllm_config.cache_config, vllm_config.model_config, vllm_config.scheduler_config
    facts = (await engine.collective_rpc("tandem_facts"))[0]
    num_blocks = cache.num_gpu_blocks - 1  # vLLM keeps one for itself
    shape = json.dumps([facts["kv_shape"][0][1:], facts["kv_dtype"], len(facts["kv_shape"]), cache.block_size])
    layout = _Layout(cache.block_size, hashlib.sha256(shape.encode()).digest())
    attention, kv_dtype = "+".join(facts["attention"]), "+".join(facts["kv_dtype"])
    text = f"vllm {require_vllm()}, {facts['runner']}, {attention}, KV {kv_dtype}"
    if given := {name: value for name, value in config.vllm_args.items() if name not in _WITHOUT_EFFECT}:
        text += f", {json.dumps(given, sort_keys=True)}"
    identity = await asyncio.to_thread(
        compute_identity,
        config.model,
        dtype=str(model.dtype).removeprefix("torch."),
        layout=layout,
        load_format=config.load_format,
        seed=config.seed,
        engine=text,
    )
    return EngineInfo(
        model_identity=identity,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        num_blocks=num_blocks,
        bytes_per_block=facts["kv_bytes"] // cache.num_gpu_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_connector="null",
        attention_backend=attention,
        pid=os.getpid(),
    )
