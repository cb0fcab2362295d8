"""The screen of `tandem top`, by textual. Tokens per second are from the counters of successive load reports,
percentiles from the router's histograms.

    _watch   WatchPools, message by message ─▶ _show   table, panels, events
    _scrape  the router's /metrics, if given ─▶ the line of TTFT and TPOT
    keys     + - d ─▶ Confirm ─yes─▶ ResizePools, DrainInstance ─▶ a notification

The router's messages are the only state. When it does not answer, the last ones stay and the header says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

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
from tandem.commands.pools import InstanceChanges, change_text, instance_row, place_of, pool_lines, restart_hint

if TYPE_CHECKING:
    from tandem.client.credentials import Credentials

T = TypeVar("T")
SPAN_S = 5.0
"""A rate is the mean over this time."""
LATENCY_SPAN_S = 60.0
_NUM_POINTS = 120
TTFT = "tandem_router_time_to_first_token_seconds"
TPOT = "tandem_router_time_per_output_token_seconds"
_RETRY_S = 1.0
_COLUMNS = ("POOL", "INSTANCE", "STATE", "WAITING", "RUNNING", "LOADING", "KV USED", "OURS", "TOKENS/S", "ADDRESS")
_NUMBERS = 3
"""Columns from here on are flush right."""
_WORK = {"prefill": "prefilled", "decode": "generated"}


@dataclass(slots=True)
class _Counter:
    """One process' counter of tokens over the last SPAN_S."""

    epoch: str
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    """Seconds and count; the first may be older than the span."""

    def add(self, at_s: float, count: int) -> None:
        _append(self.samples, at_s, count, SPAN_S)

    @property
    def rate(self) -> float:
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class TokenRates:
    """Tokens per second of instances and pools: prefilled ones at prefill, generated ones at decode instances."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}
        self.history = {pool: deque([0.0], maxlen=_NUM_POINTS) for pool in ("prefill", "decode")}
        """Of each pool, one point for each update."""

    def update(self, at_s: float, answer: pools_pb2.ListPoolsResponse) -> None:
        """Takes the reports that were read at `at_s` (seconds of a monotonic clock)."""
        totals = dict.fromkeys(self.history, 0.0)
        for one in answer.instances:
            if not one.HasField("load"):
                continue
            pool, load = pool_name(one.role), one.load
            counter = self._counters.get(one.address)
            if counter is None or counter.epoch != load.instance_epoch:
                counter = self._counters[one.address] = _Counter(load.instance_epoch)
            counter.add(at_s, load.num_prefilled_tokens if pool == "prefill" else load.num_generated_tokens)
            totals[pool] = totals.get(pool, 0.0) + counter.rate
        for address in self._counters.keys() - {one.address for one in answer.instances}:
            del self._counters[address]
        for pool, points in self.history.items():
            points.append(totals[pool])

    def of(self, address: str) -> float:
        """Of one instance that the last update had."""
        return self._counters[address].rate


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound in seconds, as Prometheus has them."""

    counts: dict[float, float]

    def since(self, earlier: Histogram) -> Histogram:
        return Histogram({bound: count - earlier.counts.get(bound, 0.0) for bound, count in self.counts.items()})

    def percentile(self, share: float) -> float | None:
        """Interpolated within its bucket, in seconds; None without observations."""
        bounds = [(0.0, 0.0), *sorted(self.counts.items())]
        wanted = share * bounds[-1][1]
        if wanted <= 0:
            return None
        for (low, before), (high, count) in pairwise(bounds):
            if count >= wanted:
                return low if high == float("inf") else low + (high - low) * (wanted - before) / (count - before)
        return None


@dataclass(slots=True)
class _Process:
    """The histograms of one worker, or of a router without workers, over the last LATENCY_SPAN_S."""

    samples: deque[tuple[float, dict[str, Histogram]]] = field(default_factory=deque)
    """Seconds and histograms; the first may be older than the span."""

    def add(self, at_s: float, read: dict[str, Histogram]) -> None:
        if self.samples and any(_total(read[name]) < _total(self.samples[-1][1][name]) for name in read):
            self.samples.clear()
        _append(self.samples, at_s, read, LATENCY_SPAN_S)

    def recent(self, name: str) -> Histogram:
        return self.samples[-1][1][name].since(self.samples[0][1][name])


class Latencies:
    """TTFT and TPOT of the last minute, from texts of the router's /metrics. A worker that does not answer a scrape is
    absent from that text."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}

    def update(self, at_s: float, text: str) -> None:
        """Takes the text that was read at `at_s`; a restarted process begins anew. Raises ValueError for others."""
        for worker, read in _histograms(text, (TTFT, TPOT)).items():
            self._processes.setdefault(worker, _Process()).add(at_s, read)
        silent = [key for key, one in self._processes.items() if one.samples[-1][0] <= at_s - LATENCY_SPAN_S]
        for worker in silent:
            del self._processes[worker]

    def recent(self, name: str) -> Histogram:
        """TTFT or TPOT, of all processes."""
        counts: defaultdict[float, float] = defaultdict(float)
        for process in self._processes.values():
            for bound, count in process.recent(name).counts.items():
                counts[bound] += count
        return Histogram(dict(counts))


def _append(samples: deque[tuple[float, T]], at_s: float, value: T, span_s: float) -> None:
    """And drops the samples that are not needed for the `span_s` seconds before `at_s`."""
    samples.append((at_s, value))
    while len(samples) > 2 and samples[1][0] <= at_s - span_s:
        samples.popleft()


def _total(histogram: Histogram) -> float:
    return max(histogram.counts.values(), default=0.0)


def _histograms(text: str, names: Sequence[str]) -> dict[str, dict[str, Histogram]]:
    """By worker, empty without workers, and name, summed over the other labels."""
    from prometheus_client.parser import text_string_to_metric_families

    read: dict[str, dict[str, Histogram]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket") and family.name in names:
                of_worker = read.setdefault(sample.labels.get("worker", ""), {name: Histogram({}) for name in names})
                counts, bound = of_worker[family.name].counts, float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return read


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
        self._channel = open_async_channel(self._address, ADMIN_OPTIONS, self._credentials)
        self._stub: Any = pools_pb2_grpc.PoolsServiceStub(self._channel)
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
        rows = {place_of(one): self._row(one) for one in self._last.instances}
        if [key.value for key in table.rows] != list(rows):
            selected = self._selected()
            table.clear()
            for key, row in rows.items():
                table.add_row(*row, key=key)
            if selected is not None and place_of(selected) in rows:
                table.move_cursor(row=table.get_row_index(place_of(selected)))
            return
        for key, row in rows.items():
            for column, cell in zip(table.columns, row, strict=True):
                if table.get_cell(key, column) != cell:
                    table.update_cell(key, column, cell)

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
            values = map(self._latencies.recent(name).percentile, (0.5, 0.95))
            p50, p95 = ("-" if value is None else f"{value * 1e3:.0f} ms" for value in values)
            parts.append(f"{label} p50 {p50}, p95 {p95}")
        return "   ".join(parts) + "   (last minute)"

    # Keys.

    def _selected(self) -> pools_pb2.PoolInstance | None:
        table = self.table
        if not table.row_count:
            return None
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        return next((one for one in self._last.instances if place_of(one) == key), None)

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
