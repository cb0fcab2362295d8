"""Clients of the transfers that this instance reads: one task each, from the Decode call until the release.

    read_transfer ─▶ connecting ──blocks reserved──▶ loading ──all loaded──▶ releasing ─▶ ended
                         └──────────────────────────────┴──────release────────▲

A call never waits for the prefill instance: `release` returns at once, so that the blocks of a cancelled request are
freed here however slow or dead that instance is. The remaining task ends within two seconds; the server waits for it
when it stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass, field

import grpc.aio

from engine.core.messages import KVProgress, LoadedEvent
from engine.identity import ModelIdentity
from instance.convert import TransferSource
from kv_transfer.transfer.client import CONNECT_S, TransferRequest, attach_to_transfer
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving import tracing
from serving.channel import ChannelSettings, ip_target, is_ip, is_private, open_channel, resolve
from serving.errors import PermissionDenied, ServiceError, Unavailable
from serving.settings import format_address, parse_address
from serving.tls import TlsFiles

_log = logging.getLogger(__name__)
_MAX_IDLE = 32
_RELEASE_S = 1.0  # for a release on the open stream; the separate Release call that replaces it has as long


@dataclass(slots=True)
class _SharedChannel:
    channel: grpc.aio.Channel
    num_users: int = 0


class PeerChannels:
    """Channels to other instances, one per address, shared by transfers. Belongs to the server's event loop.

    A channel in use is never closed. The least recently used idle ones above 32 are closed: addresses change with the
    pool. Callers choose the addresses. With TLS that is harmless: nothing is sent to a peer without a certificate of
    the stack's CA. Without TLS, addresses outside private networks are rejected, and so is link-local, where clouds
    serve credentials. A name is resolved here and its private addresses dialled, so that the check holds for the
    connection.
    """

    def __init__(
        self,
        settings: ChannelSettings,
        *,
        tls: TlsFiles | None = None,
        peer_name: str | None = None,
        allow_public: bool = False,
    ) -> None:
        """`peer_name` is required of a peer's certificate instead of its address; `allow_public` permits plaintext
        outside private networks."""
        self._settings = settings
        self._tls = tls
        self._peer_name = peer_name
        self._private_only = tls is None and not allow_public
        self._by_target: dict[str, _SharedChannel] = {}  # least recently used first

    def check_address(self, address: str) -> None:
        """Raises PermissionDenied for a forbidden IP address. A name is checked when it is resolved."""
        host, port = parse_address(address)
        if self._private_only and is_ip(host):
            _private([host], port)

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The connecting channel to `address`, which has passed `convert.dial_address`. Raises PermissionDenied or
        Unavailable."""
        # With its scheme: gRPC would take unix:80, where `unix` may be a host, for a file.
        target = await self._resolved(address) if self._private_only else f"dns:///{address}"
        shared = self._by_target.pop(target, None) or _SharedChannel(self._dial(target))
        self._by_target[target] = shared
        shared.num_users += 1
        shared.channel.get_state(try_to_connect=True)
        try:
            yield shared.channel
        finally:
            shared.num_users -= 1
            await self._close_idle()

    async def close(self) -> None:
        while self._by_target:
            _, shared = self._by_target.popitem()
            await shared.channel.close()

    def _dial(self, target: str) -> grpc.aio.Channel:
        return open_channel(target, self._settings, tls=self._tls, peer_name=self._peer_name)

    async def _resolved(self, address: str) -> str:
        host, port = parse_address(address)
        try:
            async with asyncio.timeout(CONNECT_S):
                ips = [host] if is_ip(host) else await resolve(host)
        except TimeoutError:  # a request would wait for a resolver that hangs until its reservation ends
            raise Unavailable(f"transfer.address: {host} cannot be resolved within {CONNECT_S:g} s") from None
        except (OSError, RuntimeError):  # no thread could be started
            raise Unavailable(f"transfer.address: {host} cannot be resolved") from None
        return ip_target(_private(ips, port), port)

    async def _close_idle(self) -> None:
        idle = [target for target, shared in self._by_target.items() if shared.num_users == 0]
        for target in idle[: max(0, len(idle) - _MAX_IDLE)]:
            await self._by_target.pop(target).channel.close()


def _private(ips: Sequence[str], port: int) -> list[str]:
    """Those in private networks. Raises PermissionDenied where there are none."""
    if not (private := [ip for ip in ips if is_private(ip)]):
        shown = ", ".join(format_address(ip, port) for ip in ips)
        raise PermissionDenied(f"transfer.address: {shown} is not in a private network, and TLS is off")
    return private


class TransferClient:
    """One transfer that a request of this instance reads. Made by `TransferClients`; its methods do not block."""

    def __init__(self, spans: tracing.StageSpans, block_size: int) -> None:
        loop = asyncio.get_running_loop()
        self._spans = spans
        self._block_size = block_size
        self._task_ended = False
        self.reserved: asyncio.Future[int] = loop.create_future()
        self.loaded: asyncio.Future[bool] = loop.create_future()

    def blocks_reserved(self, num_local_blocks: int) -> None:
        """The request has its blocks, the first `num_local_blocks` of them filled: attach to the transfer."""
        if not self.reserved.done():
            self.reserved.set_result(num_local_blocks)
            self._spans.next("kv.load")

    def load_finished(self, event: LoadedEvent) -> None:
        """The core has all the KV it will get: release the transfer."""
        self._spans.note(
            {
                "tandem.num_blocks": -(-event.num_external_tokens // self._block_size),
                "tandem.num_external_tokens": event.num_external_tokens,
                "tandem.num_recomputed_blocks": event.num_recomputed_blocks,
                "tandem.reason": event.reason or "",
            }
        )
        self._release(complete=event.num_recomputed_blocks == 0)

    def release(self) -> None:
        """The request needs the KV no longer. Ignored where the transfer is released already."""
        self._release(complete=False, failure="no longer needed by the request")

    def _release(self, *, complete: bool, failure: str | None = None) -> None:
        if self.loaded.done():
            return
        if not self.reserved.done():
            self.reserved.set_result(0)
        self.loaded.set_result(complete)
        self._spans.next("kv.release", failure)
        if self._task_ended:
            self._spans.end()

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """The transfer is released or unreachable, possibly long before the request releases it."""
        self._task_ended = True
        if self.loaded.done():
            self._spans.end("the transfer was not released in time" if task.cancelled() else None)


@dataclass(eq=False)
class TransferClients:
    """Owns the tasks. Belongs to the server's event loop."""

    peers: PeerChannels
    identity: ModelIdentity
    on_progress: Callable[[KVProgress], None]
    _: KW_ONLY
    lease_s: float
    attach_timeout_s: float
    connector: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def read_transfer(self, source: TransferSource, request_id: str) -> Iterator[TransferClient]:
        """A client for the duration of a call; the transfer is released when the block ends, however it ends. Raises
        PermissionDenied for a forbidden address."""
        self.peers.check_address(source.address)
        attributes = {
            "gen_ai.request.id": request_id,
            "tandem.transfer_id": source.transfer_id,
            "tandem.connector": self.connector,
        }
        client = TransferClient(tracing.StageSpans("kv.transfer", "kv.reserve", attributes), self.identity.block_size)
        task = asyncio.create_task(self._read(client, source, request_id), name=f"transfer {source.transfer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(client.task_ended)
        try:
            yield client
        finally:
            client.release()
            asyncio.get_running_loop().call_later(_RELEASE_S, task.cancel)

    async def close(self) -> None:
        """Wait until every transfer is released or given up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * _RELEASE_S)
        for task in self._tasks:
            task.cancel()

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The request continues: without progress the core's own deadline ends its wait.
            _log.error("%s failed", task.get_name(), exc_info=error)

    async def _read(self, client: TransferClient, source: TransferSource, request_id: str) -> None:
        try:
            async with self.peers.channel(source.address) as channel:
                request = TransferRequest(
                    request_id=request_id,
                    transfer_id=source.transfer_id,
                    instance_epoch=source.instance_epoch,
                    num_local_blocks=await client.reserved,
                    lease_s=self.lease_s,
                    attach_timeout_s=self.attach_timeout_s,
                )
                await attach_to_transfer(
                    KvTransferServiceStub(channel),
                    request,
                    identity=self.identity,
                    on_progress=self.on_progress,
                    loaded=client.loaded,
                )
        except ServiceError as error:
            await client.reserved  # the core ignores progress of a request that has no blocks
            self.on_progress(KVProgress(request_id, 0, failed=error.message))
