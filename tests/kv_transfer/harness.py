"""Engines without a model: KV memory, block tables and a connector each, so that only the transfer is tested."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.core.messages import EngineRequest, FinishReason, HoldKV, KVProgress, LeaseCommand, RemoteKV, TransferEvent
from engine.kv_connector import KVConnectorOutput, KVLoadResult
from engine.kv_layout import KVLayout
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.base import BlockStore
from kv_transfer.stores.connector import StoreConnector, StoreOptions
from tests.kv_transfer.memory_store import MemoryStore

BLOCK_SIZE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE, dtype="float32")
FINGERPRINT = hashlib.sha256(b"a model").digest()
LEASE_S = 2.0


def make_request(
    token_ids: Sequence[int],
    *,
    request_id: str = "request",
    transfer_id: str = "transfer",
    hold: bool = False,
    remote: bool = False,
    fingerprint: bytes = FINGERPRINT,
) -> Request:
    """A request that hands its KV over, or loads another one's."""
    spec = EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        params=SamplingParams(),
        hold_kv=HoldKV(transfer_id=transfer_id, lease_s=LEASE_S) if hold else None,
        remote_kv=RemoteKV(transfer_id=transfer_id, reservation_s=5.0) if remote else None,
    )
    return Request.from_spec(spec, arrival=0, fingerprint=fingerprint.hex())


def page_content(token_ids: Sequence[int], index: int) -> bytes:
    """What the KV of block `index` "computes" to: different for every prefix."""
    prefix = repr(list(token_ids[: (index + 1) * BLOCK_SIZE])).encode()
    return hashlib.shake_256(prefix).digest(LAYOUT.bytes_per_block)


class Core:
    """One engine core: KV memory, a connector, and what the connector has said."""

    def __init__(
        self,
        store: BlockStore,
        *,
        num_blocks: int = 64,
        clock: Callable[[], float] = time.monotonic,
        **options: object,
    ) -> None:
        self.kv = torch.zeros((num_blocks, *LAYOUT.page_shape), dtype=torch.float32)
        self.woken = threading.Event()
        settings = StoreOptions(**{"digest": "kv_secret_file" in options, **options})  # type: ignore[arg-type]
        self.connector = StoreConnector(store, settings, wake=self.woken.set, clock=clock)
        self.connector.register_kv_cache(self.kv, LAYOUT, FINGERPRINT)
        self.next_block = 0
        self.tables: dict[str, list[int]] = {}
        self.events: list[TransferEvent] = []
        self.loaded: list[KVLoadResult] = []
        self.freed: list[str] = []
        self.num_expired = 0

    def allocate(self, request: Request) -> list[int]:
        """Blocks for all tokens of the request."""
        num_blocks = -(-request.num_initial_tokens // BLOCK_SIZE)
        table = list(range(self.next_block, self.next_block + num_blocks))
        self.next_block += num_blocks
        self.tables[request.request_id] = table
        return table

    def page(self, block_id: int) -> memoryview:
        """The bytes of one block."""
        return self.kv[block_id].view(-1).view(torch.uint8).numpy().data

    def fill(self, request: Request, num_blocks: int | None = None) -> None:
        """Compute the KV of the request's first blocks."""
        table = self.tables[request.request_id]
        for index, block_id in enumerate(table[:num_blocks]):
            self.page(block_id)[:] = page_content(request.token_ids[: request.num_initial_tokens], index)

    def has(self, request: Request, num_tokens: int) -> bool:
        """Whether the KV of the first tokens is what computing them would give."""
        table = self.tables[request.request_id]
        token_ids = request.token_ids[: request.num_initial_tokens]
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        return all(bytes(self.page(table[index])) == page_content(token_ids, index) for index in range(num_blocks))

    def progress(self, request: Request, num_computed_tokens: int) -> None:
        """One chunk has been computed."""
        self.connector.request_progressed(request, self.tables[request.request_id], num_computed_tokens)
        self.step()

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """The request ends; True: its blocks are still in use."""
        request.finish_reason = reason
        held = self.connector.request_finished(request, self.tables.get(request.request_id, []))
        self.step()
        return held

    def prefill(self, request: Request) -> None:
        """The whole life of a hand-over request at once."""
        self.allocate(request)
        self.fill(request)
        self.progress(request, request.num_initial_tokens)
        self.finish(request, "hand_over")
        assert request.spec.hold_kv is not None
        transfer_id = request.spec.hold_kv.transfer_id
        self.wait(
            lambda: any(event.transfer_id == transfer_id and (event.num_tokens or event.ended) for event in self.events)
        )

    def reserve(self, request: Request, num_local_blocks: int = 0) -> list[int]:
        """Admit a request whose KV comes from elsewhere."""
        table = self.allocate(request)
        self.fill(request, num_local_blocks)
        num_local = num_local_blocks * BLOCK_SIZE
        assert self.connector.get_num_new_matched_tokens(request, num_local) == request.num_initial_tokens - num_local
        self.connector.update_state_after_alloc(request, table, num_local_blocks)
        return table

    def ready(self, request: Request, num_ready_blocks: int) -> None:
        """The producer announces full blocks."""
        self.connector.handle(KVProgress(request.request_id, num_ready_blocks))
        self.step()

    def complete(self, request: Request) -> KVLoadResult:
        """The producer announces the end; returns the result of the load."""
        num_full = request.num_initial_tokens // BLOCK_SIZE
        self.connector.handle(KVProgress(request.request_id, num_full, num_tokens=request.num_initial_tokens))
        return self.result(request)

    def result(self, request: Request) -> KVLoadResult:
        """The load's outcome, waited for."""
        self.wait(lambda: any(result.request_id == request.request_id for result in self.loaded))
        (result,) = [result for result in self.loaded if result.request_id == request.request_id]
        return result

    def release(self, transfer_id: str = "transfer") -> None:
        """The reader needs it no more."""
        self.connector.handle(LeaseCommand(transfer_id, "release"))
        self.step()

    @property
    def ended(self) -> str | None:
        """How the last transfer ended."""
        ended = [event.ended for event in self.events if event.ended is not None]
        return ended[-1] if ended else None

    def step(self) -> KVConnectorOutput:
        """What the core's loop does around a model's step."""
        self.woken.clear()
        output = self.connector.poll()
        self.events += [event for event in output.events if isinstance(event, TransferEvent)]
        self.loaded += output.loaded
        self.freed += output.freed_request_ids
        self.num_expired += output.num_expired_leases
        self.connector.start_io()
        return output

    def wait(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Step whenever the connector wakes, or its deadline comes, until the condition holds."""
        deadline = time.monotonic() + timeout_s
        self.step()
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            next_s = self.connector.next_deadline_s()
            self.woken.wait(0.05 if next_s is None else min(0.05, max(next_s, 0.001)))
            self.step()

    def shut_down_before(self, gate: threading.Event) -> None:
        """End the connector, whose threads wait at the gate; then open it, and wait for their end."""
        self.connector.shutdown()
        gate.set()
        for thread in self.connector._threads._threads:
            thread.join()

    def settle(self) -> None:
        """Let what is under way end."""
        time.sleep(0.02)
        self.step()


class GatedStore(MemoryStore):
    """A store whose reads and writes wait until the test opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.num_entered = 0

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        self.num_entered += 1
        assert self.gate.wait(5.0)
        super().put(key, buffers)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        self.num_entered += 1
        assert self.gate.wait(5.0)
        return super().get_into(key, buffers, check)


class BrokenStore(MemoryStore):
    """A store that can do nothing at the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True
        self.num_calls = 0

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        self._count_call()
        super().put(key, buffers)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        self._count_call()
        return super().get_into(key, buffers, check)

    def _count_call(self) -> None:
        self.num_calls += 1
        if self.broken:
            raise OSError(5, "Input/output error")


# A core that saves and one that loads, over one store: what the connector's tests begin with.

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 3))  # five full blocks and a tail of three tokens
NUM_FULL, NUM_PAGES = 5, 6


def pair(store: BlockStore) -> tuple[Core, Core]:
    """The one that saves, and the one that loads."""
    return Core(store), Core(store)


def reader_of(prompt: list[int] = PROMPT, **names: Any) -> Request:
    return make_request(prompt, remote=True, **names)


def writer_of(prompt: list[int] = PROMPT, **names: Any) -> Request:
    return make_request(prompt, hold=True, **names)
