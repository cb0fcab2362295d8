"""The executor of several ranks: one in the core's process, a worker process for every other.

    Start ─▶ all load ─▶ Ready of each ─▶ AllocateKV ─▶ Ready ─▶ steps ─▶ shutdown: the pipes end, the workers exit
      └─ at any time from here on: a worker ends or is stopped ─▶ all are killed ─▶ RankLost, with its error if any

A step goes to all ranks at once. Each stage waits for the hidden states of the one before it, and the core's rank, of
the last stage, ends the step: then every rank has written its keys and values. A large step is divided into
micro-batches, on which the stages work side by side; in a small one they compute one after the other.

On CPU everything that the ranks share has no name: sockets, pipes and memory are inherited descriptors and go with the
processes. The KV memory is one for all ranks, each of which computes its layers and heads of every page. So a page is
the same for connectors, whatever the number of ranks: instances with different numbers of ranks and stages exchange KV.
On GPUs each rank has the KV of its layers and heads on its own device, and no connector can read it yet.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig, KVConnectorConfig
from engine.errors import CapacityError, EngineError, UnsupportedModel
from engine.executor.executor import Executor, OneProcessExecutor, check_gpu, no_kv_memory
from engine.executor.process import Ready, Start
from engine.executor.step import AllocateKV, Int64, Logits, Message, Step, StepInputs
from engine.executor.worker import forward_part, load_distributed_part, load_part, map_kv, own_kv, rank_view
from engine.imports import child_environment
from engine.kv_layout import KVLayout
from engine.machine import available_bytes, free_host_memory_for_kv
from engine.models import check_ranks
from engine.models.config import DecoderConfig, ModelConfig
from engine.ranks import Ends, RankLost, SharedMemoryRanks, close_all, connect_all

_WATCH_S = 0.25
_SHUTDOWN_S = 3.0


def make_executor(config: EngineConfig, model_config: DecoderConfig, wake: Callable[[], None]) -> Executor:
    """The executor for the configured number of ranks. `wake` is called from a thread if a rank is lost.
    Raises EngineError."""
    check_ranks(model_config, config.parallelism)
    if config.parallelism.num_ranks == 1 or not isinstance(model_config, ModelConfig):
        check_gpu(config.device)
        return OneProcessExecutor(config, model_config)
    if not shares_memory(config):
        _check_devices(config)
    check_gpu(config.device)
    return MultiprocessExecutor(config, model_config, wake)


def shares_memory(config: EngineConfig) -> bool:
    """Whether the ranks have one KV memory and exchange through memory. GPUs do not."""
    return config.device == "cpu"


def _check_devices(config: EngineConfig) -> None:
    """Raises UnsupportedModel where ranks on devices of their own cannot run."""
    num_ranks, name = config.parallelism.num_ranks, config.parallelism.name
    if config.device == "cuda" and (num_gpus := torch.cuda.device_count()) < num_ranks:
        raise UnsupportedModel(f"{name} above 1: {num_ranks} ranks need {num_ranks} GPUs, torch sees {num_gpus}")
    if config.kv_connector != KVConnectorConfig():
        raise UnsupportedModel(
            f"{name} above 1 is supported without a KV connector on {config.device}, not with "
            f"{config.kv_connector.class_path}; set it to 1"
        )


@dataclass(slots=True)
class _Worker:
    """The core's end of one worker."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    was_stopped: bool = False

    def answer(self) -> Ready | None:
        """To the last message. None: the process has ended without one."""
        try:
            return msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Ready)
        except (EOFError, OSError):
            return None

    def error(self) -> str | None:
        """With which it has ended a step. None: it has not, or without one."""
        answer = self.answer() if self.pipe.poll() else None
        return None if answer is None else answer.error

    def kill(self) -> None:
        """Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def problem(self) -> str | None:
        """Why this rank computes no more. Stopped counts at the second look: a group that continues does so one by
        one."""
        if (status := self.process.poll()) is not None:
            return f"rank {self.rank} (process {self.process.pid}) ended with status {status}"
        was_stopped, self.was_stopped = self.was_stopped, _is_stopped(self.process.pid)
        if was_stopped and self.was_stopped:
            return f"rank {self.rank} (process {self.process.pid}) is stopped"
        return None


class MultiprocessExecutor:
    """See the module. Its ranks end with it, at the latest."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, wake: Callable[[], None]) -> None:
        """Starts the workers and loads the model on all ranks. Raises EngineError."""
        parallelism = config.parallelism
        self._wake = wake
        self._lost: str | None = None
        self._closing = threading.Event()
        self._device = torch.device(config.device)
        self._dtype = getattr(torch, model_config.resolve_dtype(config.dtype))
        self._part = parallelism.part(parallelism.core_rank, model_config)
        self._kv_fd = os.memfd_create("tandem-kv")
        self._slots_fd = os.memfd_create("tandem-slots")
        slots_bytes = SharedMemoryRanks.memory_bytes(parallelism.tensor_parallel_size)
        os.ftruncate(self._slots_fd, parallelism.pipeline_parallel_size * slots_bytes)
        self._groups_fd = None if shares_memory(config) else os.memfd_create("tandem-groups")
        self._workers: list[_Worker] = []
        all_ends = connect_all(parallelism)
        self._ends = all_ends[parallelism.core_rank]
        # The groups' file stays open: torch's store writes to it once more when it is destroyed, whenever that is, and
        # would write to what has its number by then, or abort the process.
        fds = [self._kv_fd, self._slots_fd]
        self._end = weakref.finalize(self, _end_ranks, self._closing, self._workers, self._ends, fds)
        try:
            self._start_workers(config, all_ends)
            watched = (weakref.ref(self), self._closing)
            threading.Thread(target=_watch, args=watched, name="rank-watch", daemon=True).start()
            if self._groups_fd is None:
                self._model = load_part(config, model_config, self._part, self._ends, self._slots_fd)
            else:
                check = partial(_check, weakref.ref(self))
                self._model = load_distributed_part(config, model_config, self._part, self._groups_fd, check)
            self._wait_ready()
        except BaseException:
            self.shutdown()
            raise
        self.attention_name = self._model.attention_name
        self.warm_up_sizes: Sequence[int] = ()
        self._kv_cache: torch.Tensor

    def free_for_kv(self, layout: KVLayout, max_model_len: int) -> int:
        del layout, max_model_len
        if self._groups_fd is not None:
            raise CapacityError("the free memory of several GPUs is not measured: set kv_cache_bytes or num_blocks")
        return free_host_memory_for_kv()

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        if self._groups_fd is not None:
            self._send(AllocateKV(num_blocks), self._workers)
            self._kv_cache = own_kv(self._part, layout, num_blocks, self._dtype, self._device)
            self._wait_ready()  # the first exchange would wait for ever for a rank that never connects
            return self._kv_cache
        num_bytes = num_blocks * layout.bytes_per_block
        num_free = available_bytes()
        if num_bytes > num_free:  # shared memory is not refused, but ends the process that writes to it
            raise no_kv_memory(num_bytes, num_free)
        os.ftruncate(self._kv_fd, num_bytes)
        whole = map_kv(self._kv_fd, layout, num_blocks, self._dtype)
        self._kv_cache = rank_view(whole, self._part)
        self._send(AllocateKV(num_blocks), self._workers)
        self._wait_ready()
        return whole

    def _wait_ready(self) -> None:
        """Raises EngineError: a rank's own, or else RankLost. A rank that fails ends, and the watcher ends the others:
        the wait for their answers is short."""
        answers = [(worker, worker.answer()) for worker in self._workers]
        for worker, answer in answers:
            if answer is not None and answer.error is not None:
                raise (RankLost if answer.may_pass else EngineError)(f"rank {worker.rank}: {answer.error}")
        for worker, answer in answers:
            if answer is None:
                worker.process.wait()
                raise RankLost(f"{self._lost or worker.problem()} while the engine starts")

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        with self._in_step():
            self._send(Step.of(inputs), self._workers)
            return forward_part(self._model, inputs, self._kv_cache, self._part, self._device)

    def compute_logits(self, hidden: torch.Tensor, rows: Int64) -> torch.Tensor:
        with self._in_step():
            self._send(Logits(rows.tobytes()), [worker for worker in self._workers if worker.rank > self._part.rank])
            return self._model.compute_logits(hidden[torch.from_numpy(rows).to(self._device)])

    def check(self) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """What the core's rank leaves in the middle, as by Ctrl-C, the others continue with: they would exchange
        tensors of this step with those of the next one. Raises RankLost, with the error of a rank that has one."""
        try:
            yield
        except RankLost as error:
            errors = [f"rank {worker.rank}: {text}" for worker in self._workers if (text := worker.error()) is not None]
            self._lost = errors[0] if errors else self._lost or str(error)
            raise RankLost(self._lost) from error
        except BaseException as error:
            self._lost = self._lost or f"a step has ended with {error!r}; start the engine again"
            raise

    def shutdown(self) -> None:
        self._end()

    def find_loss(self) -> bool:
        """Called by the watcher. True: a rank computes no more, and all are killed."""
        problems = [problem for worker in self._workers if (problem := worker.problem()) is not None]
        if not problems or self._closing.is_set():
            return False
        self._lost = self._lost or problems[0]
        for worker in self._workers:
            worker.kill()
        self._wake()
        return True

    def _start_workers(self, config: EngineConfig, all_ends: Sequence[Ends]) -> None:
        """Start a process for every other rank."""
        is_main = threading.current_thread() is threading.main_thread()
        others = {rank: ends for rank, ends in enumerate(all_ends) if ends is not self._ends}
        try:
            for rank, ends in others.items():
                start = Start(
                    config=config,
                    rank=rank,
                    peer_fds={peer: sock.fileno() for peer, sock in ends.peers.items()},
                    before_fd=None if ends.before is None else ends.before.fileno(),
                    after_fd=None if ends.after is None else ends.after.fileno(),
                    slots_fd=self._slots_fd,
                    kv_fd=self._kv_fd,
                    groups_fd=self._groups_fd,
                    parent_pid=os.getpid() if is_main else None,
                )
                self._workers.append(_start_worker(start, ends.sockets))
        finally:
            close_all(others.values())

    def _send(self, message: Message, workers: Sequence[_Worker]) -> None:
        encoded = msgspec.msgpack.encode(message)
        for worker in workers:
            try:
                worker.pipe.send_bytes(encoded)
            except OSError as error:
                raise RankLost(self._lost or f"rank {worker.rank} has ended: {error.strerror}") from error


def _check(reference: weakref.ref[MultiprocessExecutor]) -> None:
    """For the wait of the core's rank, which keeps no executor alive. Raises RankLost."""
    if (executor := reference()) is not None:
        executor.check()


def _watch(reference: weakref.ref[MultiprocessExecutor], closing: threading.Event) -> None:
    """In a thread of its own, which keeps no executor alive. A killed rank closes its sockets, which ends the step that
    waits for it."""
    while not closing.wait(_WATCH_S):
        executor = reference()
        if executor is None or executor.find_loss():
            return
        del executor


def _end_ranks(closing: threading.Event, workers: Sequence[_Worker], ends: Ends, fds: Sequence[int]) -> None:
    """End the workers and close what the ranks share; called once."""
    closing.set()
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + _SHUTDOWN_S
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        worker.kill()
    close_all([ends])
    for fd in fds:
        os.close(fd)


def _start_worker(start: Start, sockets: Sequence[socket.socket]) -> _Worker:
    ours, theirs = Pipe()
    groups = () if start.groups_fd is None else (start.groups_fd,)
    fds = (theirs.fileno(), start.slots_fd, start.kv_fd, *groups, *(sock.fileno() for sock in sockets))
    argv = (sys.executable, "-m", "engine.executor.process", str(theirs.fileno()))
    env = {**os.environ, **child_environment()}
    process = subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.DEVNULL, env=env)
    theirs.close()
    ours.send_bytes(msgspec.msgpack.encode(start))
    return _Worker(start.rank, process, ours)


def _is_stopped(pid: int) -> bool:
    """By a signal or a debugger (Linux)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] in (b"T", b"t")
