from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from engine.config import EngineConfig, KVConnectorConfig
from engine.core.messages import EngineRequest, RemoteKV, Seed
from engine.kv_connector import KVConnectorOutput, KVLoadResult, NullKVConnector
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from tests.waiting import wait_until

_BLOCK_SIZE = 4


class LoadingConnector(NullKVConnector):
    """Each load has all of its KV at once."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.finished: list[tuple[str, list[int]]] = []
        self._loaded: list[KVLoadResult] = []

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        del block_ids, num_local_blocks
        num_tokens = request.num_initial_tokens
        self._loaded.append(KVLoadResult(request.request_id, num_tokens, num_tokens, 0))

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        self.finished.append((request.request_id, [*block_ids]))
        return False

    def poll(self) -> KVConnectorOutput:
        loaded, self._loaded = self._loaded, []
        return KVConnectorOutput(loaded=loaded)


@pytest.fixture
def messages(names_of_vllm: None) -> Any:
    return importlib.import_module("vllm_engine.kv_messages")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context.instance().socket(zmq.PAIR) as socket:
        socket.set(zmq.LINGER, 0)
        socket.bind(f"ipc://{tmp_path}/kv")
        yield socket


@pytest.fixture
def worker(messages: Any, host: zmq.Socket[bytes], tmp_path: Path) -> Iterator[Any]:
    connector = KVConnectorConfig(class_path=f"{__name__}:{LoadingConnector.__name__}")
    config = EngineConfig(model="none", kv_connector=connector)
    setup = messages.KVSetup(
        config=config,
        address=f"ipc://{tmp_path}/kv",
        fingerprint=hashlib.sha256(b"a model").hexdigest(),
        block_size=_BLOCK_SIZE,
        bytes_per_block=64,
        digest=bytes(32),
    )
    module = importlib.import_module("vllm_engine.kv_worker")
    half = module.WorkerHalf([torch.zeros(8, 16)], 8, setup)
    yield half
    half.shutdown()


def test_a_load_that_succeeds_ends_in_the_connector_too(worker: Any, messages: Any, host: zmq.Socket[bytes]) -> None:
    """Or the connector keeps what it knows of the load for ever."""
    sampled = importlib.import_module("vllm_engine.requests").SampledRequest
    remote = RemoteKV(transfer_id="t1", reservation_s=30.0)
    spec = EngineRequest(request_id="r1", prompt_token_ids=[], params=SamplingParams(), remote_kv=remote)
    new = messages.NewTransfer("vllm-1", sampled(spec, 8), [*range(8)])
    worker.begin_step(messages.KVStep(new=[new], reserved=[messages.Reservation("vllm-1", [2, 5], 0)]))
    host.send(msgspec.msgpack.encode(Seed("r1", [7])))
    results: list[Any] = []

    def is_received() -> bool:
        results.append(worker.take_results(messages.KVStep(is_empty=True)))
        return bool(results[-1])

    wait_until(is_received)
    assert (results[-1].received, results[-1].seeds) == ({"vllm-1"}, {"vllm-1": 7})
    assert worker._connector.finished == [("vllm-1", [2, 5])]
