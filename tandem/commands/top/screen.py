"""The screen of `tandem top`, by textual.

    _watch   WatchPools, message by message ─▶ _show   table, panels, events
    _scrape  the router's /metrics, if given ─▶ _show_latencies
    keys     + - d ─▶ Confirm ─yes─▶ ResizePools, DrainInstance ─▶ a notification

The router's messages are the only state. When it does not answer, the last ones stay and the header says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
import grpc.aio
from rich.markup import escape
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Header, Label, RichLog, Sparkline, Static

from protos.tandem.v1 import pools_pb2, pools_pb2_grpc
from tandem.client.channel import ADMIN_OPTIONS, open_async_channel
from tandem.client.errors import explain
from tandem.client.registry import is_local
from tandem.commands.admin import CALL_TIMEOUT_S, admin_problem, pool_name
from tandem.commands.options import counted
from tandem.commands.pools import InstanceChanges, change_text, instance_row, pool_lines, restart_hint
from tandem.commands.top.rates import TPOT, TTFT, Latencies, TokenRates

if TYPE_CHECKING:
    from tandem.client.credentials import Credentials

_RETRY_S = 1.0
_COLUMNS = ("POOL", "INSTANCE", "STATE", "WAITING", "RUNNING", "LOADING", "KV USED", "OURS", "TOKENS/S", "ADDRESS")
_NUMBERS = 3
"""Columns from here on are flush right."""
_WORK = {"prefill": "prefilled", "decode": "generated"}


class Confirm(ModalScreen[bool]):
    """A question that y answers with yes, n and Escape with no; q and Ctrl-C quit, as on the screen below."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape", "dismiss(False)", "no"),
        Binding("q,ctrl+c", "app.quit", "quit"),
    ]
    CSS = """
    Confirm { align: center middle; }
    Confirm > Label { width: 72; max-width: 100%; padding: 1 2; background: $surface; border: round $warning; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Label(f"{escape(self._question)}\n\n[b]y[/b] yes   [b]n[/b] no")


class PoolPanel(Vertical):
    """One pool: its tokens per second, now and over time, and its lines as in `tandem pools`, as far as they fit."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.border_title = pool
        self.lines = Static(classes="lines")
        self._points = Sparkline(summary_function=max)

    def compose(self) -> ComposeResult:
        yield self.lines
        yield self._points

    def show(self, pool: pools_pb2.PoolStatus, rates: TokenRates) -> None:
        points = rates.history[pool_name(pool.role)]
        work = _WORK[pool_name(pool.role)]
        self.lines.update(escape("\n".join([f"{points[-1]:.0f} tokens/s {work}", *pool_lines(pool)])))
        self._points.data = list(points)


class TopApp(App[None]):
    """The screen of one router. `first` is an answer of ListPools, read at `read_at_s` (seconds of the monotonic
    clock) and shown until the first message of the watch."""

    TITLE = "tandem top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "resize(1)", "Grow pool", key_display="+"),
        Binding("minus", "resize(-1)", "Shrink pool", key_display="-"),
        Binding("d", "drain", "Drain instance"),
        Binding("q,ctrl+c", "quit", "Quit", key_display="q"),
    ]
    CSS = """
    #pools { height: 9; }
    PoolPanel { border: round $primary; padding: 0 1; }
    PoolPanel > .lines { height: 1fr; }
    PoolPanel > Sparkline { height: 2; }
    #latencies { height: 1; padding: 0 2; }
    DataTable { height: 1fr; }
    RichLog { height: 8; border: round $primary; }
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        first: pools_pb2.ListPoolsResponse,
        *,
        read_at_s: float,
        interval_s: float,
        metrics: str | None,
    ) -> None:
        super().__init__()
        self.sub_title = self._address = address
        self._credentials = credentials
        self._interval_s = interval_s
        self._metrics = metrics
        self._last = first
        self._read_at_s = read_at_s
        self._rates = TokenRates()
        self._latencies = Latencies()
        self._changes = InstanceChanges(first, lambda line: self._event(line.strip()))
        self._shown_changes: dict[int, str] = {}
        # By reference: a query finds nothing while a question covers the screen.
        self.panels = {pool: PoolPanel(pool) for pool in _WORK}
        self.latency_line = Static(id="latencies")
        self.table: DataTable[Text] = DataTable(cursor_type="row", zebra_stripes=True)
        self.events = RichLog(max_lines=500)

    def compose(self) -> ComposeResult:
        yield Header(show_clock=True, icon="")
        yield Horizontal(*self.panels.values(), id="pools")
        yield self.latency_line
        yield self.table
        yield self.events
        yield Footer()

    def on_mount(self) -> None:
        for name in _COLUMNS:
            self.table.add_column(Text(name), key=name)
        self.events.border_title = "events"
        self.table.focus()
        channel = open_async_channel(self._address, ADMIN_OPTIONS, self._credentials)
        self._stub: Any = pools_pb2_grpc.PoolsServiceStub(channel)
        self._channel = channel
        self._show(self._last, self._read_at_s)
        self.run_worker(self._watch(), exclusive=False)
        if self._metrics is None:
            self.latency_line.update("TTFT and TPOT: give --metrics HOST:PORT of the router")
        else:
            self.run_worker(self._scrape(self._metrics), exclusive=False)

    async def on_unmount(self) -> None:
        await self._channel.close()

    # What the router sends.

    async def _watch(self) -> None:
        request = pools_pb2.WatchPoolsRequest(interval_s=self._interval_s)
        while True:
            problem = "the router stopped"
            try:
                async for answer in self._stub.WatchPools(request, metadata=self._credentials.metadata()):
                    self.sub_title = self._address
                    self._show(answer.pools, time.monotonic())
            except grpc.aio.AioRpcError as error:
                problem = await self._problem(error)
            except ValueError as error:  # the token's file cannot be read just now
                problem = str(error)
            self.sub_title = f"{self._address}: no answer"
            self._event(problem)
            await asyncio.sleep(_RETRY_S)

    async def _problem(self, error: grpc.aio.AioRpcError) -> str:
        return admin_problem(await asyncio.to_thread(explain, error, self._address, self._credentials), self._address)

    def _show(self, answer: pools_pb2.ListPoolsResponse, at_s: float) -> None:
        """Shows the reports that were read at `at_s`."""
        self._last = answer
        self._rates.update(at_s, answer)
        self._changes.update(answer)
        for pool in answer.pools:
            self.panels[pool_name(pool.role)].show(pool, self._rates)
            self._log_decision(pool)
        self._fill_table()

    def _fill_table(self) -> None:
        """Writes the cells that changed; builds all rows when the instances did, with the cursor on the same one."""
        table = self.table
        rows = {one.address: self._row(one) for one in self._last.instances}
        if [key.value for key in table.rows] != list(rows):
            selected = self._selected()
            table.clear()
            for address, row in rows.items():
                table.add_row(*row, key=address)
            if selected is not None and selected.address in rows:
                table.move_cursor(row=table.get_row_index(selected.address))
            return
        for address, row in rows.items():
            for column, cell in zip(table.columns, row, strict=True):
                if table.get_cell(address, column) != cell:
                    table.update_cell(address, column, cell)

    def _row(self, one: pools_pb2.PoolInstance) -> list[Text]:
        *cells, _, address = instance_row(one)
        cells[2] = cells[2].partition(":")[0]  # the events have the rest
        rate = f"{self._rates.of(one.address):.0f}" if one.HasField("load") else "-"
        numbers = [Text(cell, justify="right") for cell in (*cells[_NUMBERS:], rate)]
        return [*map(Text, cells[:_NUMBERS]), *numbers, Text(address)]

    def _log_decision(self, pool: pools_pb2.PoolStatus) -> None:
        """A resize, once."""
        text = f"{pool_name(pool.role)}: {change_text(pool.last_change)}"
        if pool.HasField("last_change") and self._shown_changes.get(pool.role) != text:
            self._shown_changes[pool.role] = text
            self._event(text)

    def _event(self, line: str) -> None:
        self.events.write(f"{time.strftime('%H:%M:%S')} {line}")

    # The router's metrics.

    async def _scrape(self, address: str) -> None:
        import httpx

        async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S, trust_env=not is_local(address)) as client:
            while True:
                try:
                    response = await client.get(f"http://{address}/metrics")
                    self._latencies.update(time.monotonic(), response.raise_for_status().text)
                    self.latency_line.update(self._latency_line())
                except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                    self.latency_line.update(
                        escape(f"no metrics at {address} ({error}); `python -m router --metrics-listen` sets it")
                    )
                await asyncio.sleep(self._interval_s)

    def _latency_line(self) -> str:
        parts = []
        for label, name in (("TTFT", TTFT), ("TPOT", TPOT)):
            values = self._latencies.percentiles(name, (0.5, 0.95))
            p50, p95 = ("-" if value is None else f"{value * 1e3:.0f} ms" for value in values)
            parts.append(f"{label} p50 {p50}, p95 {p95}")
        return "   ".join(parts) + "   (last minute)"

    # Keys.

    def _selected(self) -> pools_pb2.PoolInstance | None:
        table = self.table
        if not table.row_count:
            return None
        address = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        return next((one for one in self._last.instances if one.address == address), None)

    def action_resize(self, by: int) -> None:
        selected = self._selected()
        pool = next((pool for pool in self._last.pools if selected is not None and pool.role == selected.role), None)
        if pool is None or not pool.HasField("size"):
            self.notify("select an instance of a pool that has an owner which can resize it", severity="warning")
            return
        name, size = pool_name(pool.role), pool.size + by
        if size < 0:
            self.notify(f"the {name} pool has size 0 already", severity="warning")
            return
        request = pools_pb2.ResizePoolsRequest(sizes=[pools_pb2.PoolSize(role=pool.role, size=size)])
        self._ask(
            f"Resize the {name} pool from {pool.size} to {size}?",
            lambda: self._stub.ResizePools(request, metadata=self._credentials.metadata(), timeout=CALL_TIMEOUT_S),
            f"{name}: {pool.size} → {size}",
        )

    def action_drain(self) -> None:
        selected = self._selected()
        if selected is None:
            self.notify("there is no instance to drain", severity="warning")
            return
        name, running = selected.instance_id or selected.address, counted(selected.num_running_here, "running request")
        request = pools_pb2.DrainInstanceRequest(instance=selected.address)
        self._ask(
            f"Drain {name}, {running}? They finish, then its process ends. "
            + restart_hint(self._last, selected.instance_id).strip(),
            lambda: self._stub.DrainInstance(request, metadata=self._credentials.metadata(), timeout=CALL_TIMEOUT_S),
            f"{name} is draining",
        )

    def _ask(self, question: str, call: Callable[[], Awaitable[object]], done: str) -> None:
        async def act() -> None:
            try:
                await call()
            except grpc.aio.AioRpcError as error:
                self.notify(await self._problem(error), severity="error", timeout=15, markup=False)
            except ValueError as error:
                self.notify(str(error), severity="error", timeout=15, markup=False)
            else:
                self.notify(done, markup=False)

        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self.run_worker(act(), exclusive=False)

        self.push_screen(Confirm(question), answered)
