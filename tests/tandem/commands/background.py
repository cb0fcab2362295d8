"""A router and its fake instances, for commands that block their thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from router.app import RouterApp
from router.request.validation import ServedModel
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_model_folder
from tests.router.rig import settings_of

WEIGHTS = "3f9a2c" + "0" * 58


class Background:
    """A router with an admin listener and its fakes, on a loop of its own: the command line blocks its thread."""

    def __init__(self, folder: Path, **model: Any) -> None:
        self.model_folder = write_model_folder(folder, **model)
        identity = {"weights_digest": WEIGHTS, "dtype": "bfloat16+int8"}
        self.prefill = [FakeInstance("prefill", "prefill-0", identity=identity)]
        self.decode = [FakeInstance("decode", f"decode-{number}", identity=identity) for number in (0, 1)]
        for fake in (*self.prefill, self.decode[1]):
            fake.behaviour.lora_adapters = ["poet"]
        self.decode[1].behaviour.num_waiting, self.decode[1].behaviour.num_running = 1, 2
        self._fakes = AsyncExitStack()
        self.address = self.admin_address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router and fakes")

    def start(self) -> None:
        self._thread.start()
        self.call(self._start())

    def stop(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def slow_down(self, token_s: float) -> None:
        """Of every token after a request's first, in seconds."""
        for fake in self.decode:
            fake.behaviour.token_s = token_s

    def write(self, text: str) -> None:
        """The text of every answer from now on; empty: that of its tokens."""
        for fake in [*self.prefill, *self.decode]:
            fake.behaviour.writes = text
            fake.records.clear()

    def adapters(self) -> list[str]:
        """Of the requests since the last change of the text; empty ones for those without."""
        return [record.detail.request.lora for fake in self.decode for record in fake.recorded("decode")]

    def structural_tags(self) -> list[str]:
        """Of the requests since the last change of the text; empty ones for those without."""
        records = [record for fake in self.decode for record in fake.recorded("decode")]
        return [record.detail.request.sampling.structural_tag for record in records]

    async def _start(self) -> None:
        for fake in [*self.prefill, *self.decode]:
            await self._fakes.enter_async_context(fake)
        router = {"admin_listen": "127.0.0.1:0"}
        settings = settings_of(self.model_folder, self.prefill, self.decode, router=router)
        self._app = RouterApp(settings, ServedModel.from_folder(self.model_folder, "fake"))
        await self._app.start()
        while not self._app.pools.all_ready():
            await asyncio.sleep(0.01)
        self.address, self.admin_address = self._app.address, self._app.admin_address or ""

    async def _stop(self) -> None:
        await self._app.stop()
        await self._fakes.aclose()
