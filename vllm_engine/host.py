"""Holds vLLM's AsyncLLM and serves one `AsyncEngine`, as engine/core/process.py serves the built-in engine.

    AddRequest ─▶ a task: constraint compiled ─▶ AsyncLLM.generate ─▶ TokensEvent … ─▶ ended
                    └─ AbortRequests: the task is cancelled, and vLLM aborts the request
    AddRequest(remote_kv) ─▶ as above, and KVReport: ReservedEvent ─▶ Seed, KVProgress … passed on ─▶ LoadedEvent
                    └─ no room, KV or seed in time: an error;  KV given up: submitted anew, to be computed
    every 250 ms: is vLLM paused? ─answered between two steps▶ the load is reported

While vLLM computes a step, the host sends only reports that are not `answered`, as the built-in core does; when vLLM
hangs it sends no others. When one of its processes ends, this one does: others resume its streams, and it is restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
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
    LoadedEvent,
    Outputs,
    ReservedEvent,
    Seed,
    Shutdown,
    TokensEvent,
)
from engine.errors import InvalidRequest
from engine.sampling.constraints import Constraint
from vllm_engine.adapters import load_adapters, lora_requests
from vllm_engine.failures import FailedRequests
from vllm_engine.grammars import HostGrammars
from vllm_engine.kv_messages import Interrupt, KVLink
from vllm_engine.load import LoadMeter, RequestCounts
from vllm_engine.requests import tokens_event, vllm_input, vllm_params
from vllm_engine.start import connect, end_error, engine_info, has_connector, set_environment, start, warm_up

HEARTBEAT_S = 0.25
_SHUTDOWN_S = 2.0


async def serve(config: EngineConfig, address: str) -> None:
    """Start vLLM and serve until `Shutdown`. Raises EngineError if vLLM does not start or ends by itself."""
    folder = Path(address.removeprefix("ipc://")).parent
    set_environment(config, folder)
    meter, failed = LoadMeter(), FailedRequests(folder)
    engine = start(config, meter)
    try:
        info = await load_adapters(config.lora_adapters, engine, await engine_info(config, engine))
        link = KVLink(folder)
        if has_connector(config):
            info = await connect(config, engine, info, link.address)
        await warm_up(engine, info)
        meter.num_blocks = info.num_blocks
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 1000)
        socket.set_hwm(0)
        socket.connect(address)
        host = Host(
            engine,
            socket,
            meter,
            failed,
            link=link,
            info=info,
            grammar_s=config.grammar_s,
            lora_adapters=config.lora_adapters,
        )
        host.send(info)
        await host.serve()
        socket.close()
        link.close()
    except EngineDeadError as error:
        raise end_error(error) from error
    finally:
        engine.shutdown(timeout=_SHUTDOWN_S)


@dataclass(slots=True)
class _Load:
    """What is known of a request's KV that comes from elsewhere."""

    expires: asyncio.TimerHandle
    """Ends the wait for room, or for KV and seed."""
    reserved: ReservedEvent | None = None
    loaded: LoadedEvent | None = None
    seed: list[int] | None = None
    is_given_up: bool = False
    """It is computed here instead."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """It was loaded or given up. The worker reports it on a way of its own: vLLM's first token may come before."""


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    task: asyncio.Task[None] | None = None
    has_token: bool = False
    load: _Load | None = None
    constraint: Constraint | None = None


class Host:
    """One vLLM and its unfinished requests. Belongs to the event loop."""

    def __init__(
        self,
        engine: AsyncLLM,
        socket: zmq.asyncio.Socket,
        meter: LoadMeter,
        failed: FailedRequests,
        *,
        link: KVLink,
        info: EngineInfo,
        grammar_s: float,
        lora_adapters: Mapping[str, str] = {},
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._meter = meter
        self._failed = failed
        self._grammars = HostGrammars(engine, grammar_s, self._constraints, self._interrupt)
        self._begin_limits = BeginLimits(engine, self._interrupt, self._end_unbegun, self._end_with)
        self._link = link
        self._info = info
        self._has_connector = info.kv_connector != "null"
        self._adapters = {"": None, **lora_requests(lora_adapters)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._running: dict[str, _Running] = {}
        self._events: list[Event] = []
        self._answered = False
        """Whether vLLM has answered since the last report."""
        self._num_added = 0
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: CoreMessage) -> None:
        """Queue a message. Does not block."""
        self._socket.send(self._encoder.encode(message))

    async def serve(self) -> None:
        """Until `Shutdown`; raises EngineError when vLLM has ended."""
        commands = asyncio.create_task(self._receive())
        heartbeat = asyncio.create_task(self._report_until_cancelled())
        reports = asyncio.create_task(self._receive_kv_reports())
        try:
            waited: list[asyncio.Future[None]] = [commands, heartbeat, reports, self._dead]
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        except EngineDeadError as error:
            raise end_error(error) from error
        finally:
            self._begin_limits.close()
            for task in (commands, heartbeat, reports, *(running.task for running in self._running.values())):
                if task is not None:
                    task.cancel()

    async def _receive(self) -> None:
        while True:
            command: Command = self._decoder.decode(await self._socket.recv())
            match command:
                case AddRequest(request):
                    self._add(request)
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        self._cancel(request_id)
                case Shutdown():
                    return
                case Seed(request_id, token_ids):
                    self._seed(request_id, token_ids)
                case KVProgress() | LeaseCommand():
                    self._link.send(command)
                case _:
                    assert_never(command)

    async def _report_until_cancelled(self) -> None:
        while True:
            await self._engine.is_paused()
            self._answered = True
            self._flush()
            await asyncio.sleep(HEARTBEAT_S)

    def _add(self, request: EngineRequest) -> None:
        if self._events:  # an earlier request may have had the same id
            self._flush()
        self._num_added += 1
        running = self._running[request.request_id] = _Running(request)
        if request.remote_kv is not None:
            grammar_s = self._grammars.timeout_s if request.params.is_constrained else 0.0
            running.load = _Load(self._expire_in(grammar_s + request.remote_kv.reservation_s, running))
        self._begin_limits.add(request)
        self._start(running)

    def _start(self, running: _Running) -> None:
        running.task = asyncio.create_task(self._run(running, running.request))
        running.task.add_done_callback(lambda task: self._ended(running, task))

    def _ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._forget_unless_resubmitted(running, task)  # if that was before its first step, it has run nothing
        self._end_with(task)

    def _end_with(self, task: asyncio.Task[None]) -> None:
        """An unexpected error ends the host, so that its streams continue elsewhere."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._dead.done():
            self._dead.set_exception(error)

    def _cancel(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None and running.task is not None:
            running.task.cancel()
            self._interrupt()

    async def _run(self, running: _Running, request: EngineRequest) -> None:
        try:
            moves_kv = request.hold_kv is not None or request.remote_kv is not None
            if moves_kv and not self._has_connector:
                problem = "this instance's vLLM has no KV connector"
                raise InvalidRequest("transfer", problem, "requests without a transfer")
            running.constraint = request.params.constraint
            if running.constraint and (failure := await self._grammars.compile(running.constraint)):
                return self._fail(request, *failure)
            if running.constraint and running.load is not None:  # the wait for room begins
                self._restart_wait(running, running.load)
            await self._generate(running, request)
        except InvalidRequest as error:
            self._fail(request, str(error), "invalid_constraint")
        except (VLLMClientError, ValueError) as error:
            self._fail(request, f"vLLM rejects the request: {error}", "invalid_constraint")
        except EngineGenerateError as error:
            self._fail(request, f"vLLM gave up the request: {error.__cause__ or error}", None)
        finally:
            self._forget_unless_resubmitted(running, asyncio.current_task())

    def _constraints(self) -> set[Constraint]:
        return {one.constraint for one in self._running.values() if one.constraint is not None}

    def _forget_unless_resubmitted(self, running: _Running, task: asyncio.Task[None] | None) -> None:
        if running.task is not task:
            return
        request_id = running.request.request_id
        if running.load is not None:
            running.load.expires.cancel()
        if self._running.get(request_id) is running:
            del self._running[request_id]
            self._begin_limits.remove(request_id)
        self._failed.forget(request_id)
        if not self._running:
            self._meter.idle()

    async def _generate(self, running: _Running, request: EngineRequest) -> None:
        outputs = self._engine.generate(
            vllm_input(request),
            vllm_params(request),
            request.request_id,
            lora_request=self._adapters[request.lora],
            priority=-request.priority,
        )
        self._interrupt()
        async with aclosing(outputs):
            async for output in outputs:
                if failure := self._failed.take(request.request_id, self._running):
                    return self._fail(request, *failure)
                if running.load is not None:
                    await running.load.ended.wait()
                is_first, max_model_len = not running.has_token, self._info.max_model_len
                event = tokens_event(request, output, is_first=is_first, max_model_len=max_model_len)
                self._answered = True
                self._emit(event if running.load is None else _with_origin(event, running))
                running.has_token = True
                self._begin_limits.remove(request.request_id)
        return None

    def _interrupt(self) -> None:
        """vLLM is about to get a message, which it reads between two steps."""
        if self._has_connector:
            self._link.send(Interrupt())

    # KV from elsewhere

    async def _receive_kv_reports(self) -> None:
        while True:
            report = await self._link.receive()
            for event in report.events:
                self._apply_kv_event(event)
            for request_id in report.given_up:
                running = self._running.get(request_id)
                if running is not None and running.load is not None:
                    running.load.is_given_up = True
                    running.load.ended.set()
                    self._pass_seed(running)
            self._flush()

    def _apply_kv_event(self, event: Event) -> None:
        if isinstance(event, ReservedEvent | LoadedEvent):
            running = self._running.get(event.request_id)
            if running is None or running.load is None:
                return  # it has ended meanwhile
            if isinstance(event, ReservedEvent):
                self._reserved(running, running.load, event)
            else:
                running.load.loaded = event
                running.load.ended.set()
                self._stop_waiting_if_complete(running.load)
        self._emit(event)

    def _reserved(self, running: _Running, load: _Load, event: ReservedEvent) -> None:
        """The wait for room takes nothing from the time in which the prompt is computed elsewhere."""
        load.reserved = event
        self._restart_wait(running, load)
        self._pass_seed(running)

    def _restart_wait(self, running: _Running, load: _Load) -> None:
        load.expires.cancel()
        if (remote_kv := running.request.remote_kv) is not None:  # else it was submitted anew, and waits for nothing
            load.expires = self._expire_in(remote_kv.reservation_s, running)

    def _seed(self, request_id: str, token_ids: list[int]) -> None:
        running = self._running.get(request_id)
        if running is not None and running.load is not None and running.load.seed is None:
            running.load.seed = token_ids
            self._pass_seed(running)
            self._stop_waiting_if_complete(running.load)

    def _pass_seed(self, running: _Running) -> None:
        """Once the worker knows the request. vLLM has room for one token: with several, and with KV that was given
        up, the request is submitted anew."""
        request, load = running.request, running.load
        if load is None or load.seed is None or request.remote_kv is None:
            return
        if load.is_given_up or len(load.seed) > 1:
            load.is_given_up = True
            load.ended.set()
            load.expires.cancel()  # it waits for nothing more
            emitted = [*request.output_token_ids, *load.seed]
            running.request = msgspec.structs.replace(request, output_token_ids=emitted, remote_kv=None)
            self._cancel(request.request_id)
            self._start(running)
        elif load.reserved is not None:
            self._link.send(Seed(request.request_id, load.seed))

    def _stop_waiting_if_complete(self, load: _Load) -> None:
        if load.seed is not None and load.loaded is not None:
            load.expires.cancel()

    def _expire_in(self, seconds: float, running: _Running) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._expire, running)

    def _expire(self, running: _Running) -> None:
        load = running.load
        assert load is not None
        if load.reserved is None:
            self._fail(running.request, "no room within the reservation time", "no_room")
        else:
            missing = "seed" if load.seed is None else "KV"
            self._fail(running.request, f"no {missing} within the reservation time", "timeout")
        self._cancel(running.request.request_id)

    def _end_unbegun(self, request: EngineRequest) -> None:
        self._fail(request, f"no step began the prompt within {request.begin_s:.3g} s", "no_room")
        self._cancel(request.request_id)

    def _fail(self, request: EngineRequest, error: str, kind: ErrorKind | None) -> None:
        self._emit(TokensEvent(request.request_id, [], finish_reason="error", error=error, error_kind=kind))

    def _emit(self, event: Event) -> None:
        """Events of one step leave in one message."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        answered, self._answered = self._answered, False
        load = self._meter.load(self._count_requests(), self._link.load)
        self.send(Outputs(events, load, answered, self._num_added))

    def _count_requests(self) -> RequestCounts:
        counts = RequestCounts(num_unfinished=len(self._running))
        for running in self._running.values():
            request, load = running.request, running.load
            if running.has_token:
                counts.num_streams += 1
            elif load is None or load.is_given_up:
                counts.num_waiting_tokens += len(request.prompt_token_ids) + len(request.output_token_ids)
            elif load.reserved is None:
                counts.num_without_room += 1
            elif load.seed is None or load.loaded is None:
                counts.num_loading += 1
        return counts


def _with_origin(event: TokensEvent, running: _Running) -> TokensEvent:
    """vLLM counts KV of its prefix cache and of elsewhere as one."""
    load, request = running.load, running.request
    assert load is not None
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    if load.is_given_up:
        num_initial = num_tokens - len(load.seed or [])
        return msgspec.structs.replace(event, num_recomputed_tokens=max(0, num_initial - event.num_cached_tokens))
    assert load.reserved is not None
    assert load.loaded is not None
    num_cached, num_external = load.reserved.num_cached_tokens, load.loaded.num_external_tokens
    return msgspec.structs.replace(
        event,
        num_cached_tokens=num_cached,
        num_external_tokens=num_external,
        num_recomputed_tokens=num_tokens - num_cached - num_external,
    )


_OUTPUTS_S = 0.05
"""In which the outputs that came before the workers' answer reach their requests: the answer knows no ended request."""


class BeginLimits:
    """Requests that no step of vLLM has begun within their `begin_s`: they end, as at the built-in engine.

    request ─begin_s─▶ late ─▶ in the next question to the workers ─▶ a step has computed some of it: it continues
       └─ a token, or the end: no limit any more                         └─ none has: an error

    vLLM reports nothing of a prompt before its first token. Its workers know which requests were in a step; they answer
    between two steps, so a request that begins after its time and before the answer is computed. Belongs to the host's
    event loop.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        interrupt: Callable[[], None],
        end: Callable[[EngineRequest], None],
        answered: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`interrupt` is called before each question, `end` for each request that has not begun, `answered` when a
        question has its answer or an error."""
        self._engine = engine
        self._interrupt = interrupt
        self._end = end
        self._answered = answered
        self._limited: dict[str, tuple[EngineRequest, asyncio.TimerHandle]] = {}
        """They have no token yet."""
        self._late: list[EngineRequest] = []
        """For the next question."""
        self._question: asyncio.Task[None] | None = None
        """The last one."""

    def add(self, request: EngineRequest) -> None:
        """What was begun elsewhere has no limit."""
        if request.begin_s is not None and request.remote_kv is None and not request.output_token_ids:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(request.begin_s, self._is_late, request)
            self._limited[request.request_id] = request, timer

    def remove(self, request_id: str) -> None:
        """Idempotent."""
        if limited := self._limited.pop(request_id, None):
            limited[1].cancel()

    def close(self) -> None:
        if self._question is not None:
            self._question.cancel()

    def _is_late(self, request: EngineRequest) -> None:
        self._late.append(request)
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask())
            self._question.add_done_callback(self._answered)

    async def _ask(self) -> None:
        while self._late:
            late, self._late = self._late, []
            self._interrupt()
            begun, *_ = await self._engine.collective_rpc("tandem_begun")
            await asyncio.sleep(_OUTPUTS_S)
            for request in late:
                limited = self._limited.get(request.request_id)
                if limited is not None and limited[0] is request and request.request_id not in begun:
                    self._end(request)
