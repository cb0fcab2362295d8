"""Both ends of the attach stream: an instance that holds KV, and one that reads it."""

from __future__ import annotations

import asyncio
import time

from engine.core.messages import KVProgress, LeaseCommand, TransferEvent
from engine.identity import ModelIdentity
from kv_transfer.transfer.client import TransferRequest, attach_to_transfer, identity_to_proto
from kv_transfer.transfer.lease import LeaseTable
from kv_transfer.transfer.server import TransferServer, TransferServerSettings
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub

EPOCH = "epoch-1"
IDENTITY = ModelIdentity(
    weights_digest="w" * 64,
    config_digest="c" * 64,
    tokenizer_digest="t" * 64,
    dtype="float32",
    block_size=16,
    layout_version=1,
    layout_digest="l" * 64,
)
NEVER_S = 250.0
"""A time that no test reaches; a lease may be at most 300 s."""
SETTINGS = TransferServerSettings(lease_s=NEVER_S, attach_wait_s=NEVER_S)


class ServerEndpoint:
    """A producing instance: the transfer server under test, and a core that is only a lease table."""

    def __init__(self, settings: TransferServerSettings = SETTINGS) -> None:
        self.lease_s = settings.lease_s
        self.leases = LeaseTable()
        self.commands: list[LeaseCommand] = []
        self.server = TransferServer(
            identity=IDENTITY,
            instance_epoch=EPOCH,
            send_command=self._apply_command,
            settings=settings,
        )

    def offer(self, transfer_id: str = "t") -> None:
        if self.leases.offer(transfer_id, lease_s=self.lease_s, now=time.monotonic()):
            self.server.on_event(TransferEvent(transfer_id, 0))
        self.step()

    def ready(self, num_ready_blocks: int, transfer_id: str = "t") -> None:
        self.server.on_event(TransferEvent(transfer_id, num_ready_blocks))

    def complete(self, num_ready_blocks: int, num_tokens: int, transfer_id: str = "t") -> None:
        self.server.on_event(TransferEvent(transfer_id, num_ready_blocks, num_tokens=num_tokens))

    def step(self, *, after_s: float = 0.0) -> None:
        """What the core does every now and then, as it would do in so many seconds."""
        self.leases.expire(time.monotonic() + after_s)
        for ended in self.leases.take_ended():
            self.server.on_event(ended)

    def actions(self, transfer_id: str = "t") -> list[str]:
        return [command.action for command in self.commands if command.transfer_id == transfer_id]

    def _apply_command(self, command: LeaseCommand) -> None:
        self.commands.append(command)
        now = time.monotonic()
        match command.action:
            case "attach":
                self.leases.attach(command.transfer_id, lease_s=command.lease_s, now=now)
            case "renew":
                self.leases.renew(command.transfer_id, lease_s=command.lease_s, now=now)
            case "release":
                self.leases.release(command.transfer_id, now=now)
        asyncio.get_running_loop().call_soon(self.step)


class ClientEndpoint:
    """A reading instance: the transfer client under test and the progress that it reported to its core."""

    def __init__(self, stub: KvTransferServiceStub, **fields: object) -> None:
        request = TransferRequest(
            **{  # type: ignore[arg-type]
                "request_id": "r",
                "transfer_id": "t",
                "instance_epoch": EPOCH,
                "num_local_blocks": 0,
                "lease_s": NEVER_S,
                "attach_timeout_s": NEVER_S,
                **{name: value for name, value in fields.items() if name != "identity"},
            }
        )
        identity = fields.get("identity", IDENTITY)
        assert isinstance(identity, ModelIdentity)
        self.progress: list[KVProgress] = []
        self.loaded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            attach_to_transfer(stub, request, identity=identity, on_progress=self.progress.append, loaded=self.loaded)
        )

    @property
    def failure(self) -> str | None:
        return self.progress[-1].failed if self.progress else None


def open_message(**fields: object) -> pb.AttachOpen:
    defaults = {
        "transfer_id": "t",
        "instance_epoch": EPOCH,
        "identity": identity_to_proto(IDENTITY),
        "min_protocol_version": 1,
        "max_protocol_version": 1,
    }
    return pb.AttachOpen(**{**defaults, **fields})  # type: ignore[arg-type]
