"""The host's end of the socket to the connector in vLLM's worker."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from vllm_engine.kv_messages import SOCKET, HostCommand, KVLoad, KVReport


class KVLink:
    """Belongs to the event loop. Without a worker at the other end nothing is ever received."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder / SOCKET}"
        self.load = KVLoad()
        """As last reported."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(KVReport)

    def send(self, command: HostCommand) -> None:
        """Queue a command. Does not block."""
        self._socket.send(self._encoder.encode(command))

    async def receive(self) -> KVReport:
        report = self._decoder.decode(await self._socket.recv())
        self.load = report.load
        return report

    def close(self) -> None:
        self._socket.close()
