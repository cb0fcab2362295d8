"""Small work that outlives its request: bounded in time, counted, and waited for at the end.

So far that is the release of KV which nobody will fetch: sent on every path on which the decode instance may never
have heard of the transfer, since otherwise the prefill instance would hold it until its lease runs out.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from protos.tandem.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

_log = logging.getLogger(__name__)
_TIMEOUT_S = 1.0


class Releases:
    """Sends releases. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        return len(self._tasks)

    def send(self, channel: grpc.aio.Channel, transfer_id: str) -> None:
        """Gives up `transfer_id` at the instance behind `channel`. Returns at once; release is idempotent."""
        task = asyncio.create_task(self._release(channel, transfer_id), name=f"release {transfer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Returns when all that were sent have been answered or given up."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _release(self, channel: grpc.aio.Channel, transfer_id: str) -> None:
        request = kv_transfer_pb2.ReleaseRequest(transfer_id=transfer_id)
        try:
            await kv_transfer_pb2_grpc.KvTransferServiceStub(channel).Release(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.info("release of %s not answered (%s): its lease will run out", transfer_id, error.code().name)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # else the channel was closed under the call
