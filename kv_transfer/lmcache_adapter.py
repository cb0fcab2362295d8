"""Pages through an L2 adapter of LMCache's storage layer, in this process, without its L1: here our own, for Redis.

One task for each page, with a deadline of ours and a buffer of its own (kv_transfer/lmcache_tasks.py). An adapter says
that a load failed but not why; ours does (`take_error`), so that a Redis that is down opens the breaker and a value of
another length is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from kv_transfer.lmcache_names import ObjectName, import_lmcache
from kv_transfer.lmcache_tasks import Outcome, TaskRunner, gather, scatter
from kv_transfer.page import Buffer
from kv_transfer.store import BadValue, PageKey, StoreError

Kind = Literal["store", "lookup", "load"]
_ADAPTER_MODULE = "kv_transfer.lmcache_redis_adapter"


class LMCacheAdapter:
    """See the module. Implements kv_transfer.store.BlockStore over an L2AdapterInterface that knows `take_error`."""

    name = "lmcache"

    def __init__(self, adapter: Any, *, timeout_s: float = 1.0, min_bytes_per_s: float = 50e6) -> None:
        self._adapter = adapter
        self._timeout_s = timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        self._driver = _AdapterDriver(adapter)
        self.runner = TaskRunner(self._driver, "kv-lmcache-adapter")

    @classmethod
    def of_redis(cls, params: dict[str, object], *, timeout_s: float, min_bytes_per_s: float) -> LMCacheAdapter:
        """Over Redis, loaded as LMCache loads plugins. `params` are those of RedisL2Adapter."""
        # These modules and no others: asking LMCache by the type's name imports all adapters that it has.
        adapters = import_lmcache("lmcache.v1.distributed.l2_adapters")
        plugins = import_lmcache("lmcache.v1.distributed.l2_adapters.plugin_l2_adapter")
        import_lmcache(_ADAPTER_MODULE)
        plugin = {"module_path": _ADAPTER_MODULE, "class_name": "RedisL2Adapter", "adapter_params": params}
        adapter = adapters.create_l2_adapter(plugins.PluginL2AdapterConfig.from_dict(plugin))
        return cls(adapter, timeout_s=timeout_s, min_bytes_per_s=min_bytes_per_s)

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        num_bytes = sum(len(buffer) for buffer in buffers)
        with self.runner.lend(num_bytes) as task:
            gather(task.buffer, buffers)
            keys, objects = [_object_key(key)], [_memory_object(task.buffer)]
            submit = self._driver.ticket("store", lambda: self._adapter.submit_store_task(keys, objects))
            if not self.runner.run(task, submit, self._limit_s(num_bytes)):
                raise StoreError("write")

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        num_bytes = sum(len(buffer) for buffer in buffers)
        with self.runner.lend(num_bytes) as task:
            keys, objects = [_object_key(key)], [_memory_object(task.buffer)]
            submit = self._driver.ticket("load", lambda: self._adapter.submit_load_task(keys, objects))
            if not self.runner.run(task, submit, self._limit_s(num_bytes)):
                return False
            scatter(task.buffer, buffers, check)
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        keys, layouts = [_object_key(key)], {0: _layout(num_bytes)}
        submit = self._driver.ticket("lookup", lambda: self._adapter.submit_lookup_and_lock_task(keys, layouts))
        with self.runner.lend(0) as task:
            try:
                found = self.runner.run(task, submit, self._timeout_s)
            except BadValue:
                return False
        if found:
            self._adapter.submit_unlock(keys)
        return found

    def delete(self, key: PageKey) -> None:
        self._adapter.delete([_object_key(key)])  # by the thread that calls, within Redis's time-outs

    def close(self) -> None:
        self.runner.close()

    def _limit_s(self, num_bytes: int) -> float:
        return self._timeout_s + num_bytes / self._min_bytes_per_s


class _AdapterDriver:
    """Implements kv_transfer.lmcache_tasks.Driver over an L2 adapter, with tasks of one page each.

    All but `fds` and `close` run under the runner's lock, which is what makes `_open` safe.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._open: dict[Kind, set[int]] = {"lookup": set(), "load": set()}

    def ticket(self, kind: Kind, submit: Callable[[], int]) -> Callable[[], tuple[Kind, int]]:
        """`submit` with its kind: ids may be the same for two kinds, and only stores tell theirs when they end."""

        def begin() -> tuple[Kind, int]:
            task_id = submit()
            if kind != "store":
                self._open[kind].add(task_id)
            return kind, task_id

        return begin

    def fds(self) -> list[int]:
        adapter = self._adapter
        return [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]

    def ended(self) -> Iterator[tuple[tuple[Kind, int], Outcome]]:
        from lmcache.v1.platform.event_notifier import consume_fd

        for descriptor in self.fds():
            consume_fd(descriptor)
        for task_id, result in self._adapter.pop_completed_store_tasks().items():
            yield ("store", task_id), self._outcome(task_id, result.is_successful())
        for kind in ("lookup", "load"):
            query = self._adapter.query_load_result if kind == "load" else self._adapter.query_lookup_and_lock_result
            for task_id in tuple(self._open[kind]):
                if (bitmap := query(task_id)) is not None:
                    self._open[kind].discard(task_id)
                    yield (kind, task_id), self._outcome(task_id, bitmap.test(0))

    def close(self) -> None:
        self._adapter.close()

    def _outcome(self, task_id: int, is_done: bool) -> Outcome:
        error: Exception | None = self._adapter.take_error(task_id)
        return is_done if error is None else error


def _object_key(key: PageKey) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    name = ObjectName.of(key)
    return ObjectKey(name.chunk_hash, name.model_name, 0, 0, name.cache_salt)


def _layout(num_bytes: int) -> Any:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size([num_bytes])], [torch.uint8])


def _memory_object(buffer: bytearray) -> Any:
    """LMCache's view of a buffer; it owns nothing."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    metadata = MemoryObjMetadata(
        shape=tensor.shape,
        dtype=torch.uint8,
        address=0,
        phy_size=len(buffer),
        ref_count=1,
        fmt=MemoryFormat.BINARY_BUFFER,
    )
    return TensorMemoryObj(tensor, metadata, None)
