"""`tandem top`: its rates and percentiles by themselves, its screen against a router whose pools have an owner."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector
from textual.pilot import Pilot
from textual.widgets import Label

from protos.tandem.v1 import instance_pb2, pools_pb2
from router.request.validation import ServedModel
from tandem.cli import main
from tandem.client.credentials import PLAINTEXT, Credentials
from tandem.commands.top import screen
from tandem.commands.top.screen import SPAN_S, TPOT, TTFT, Confirm, Latencies, TokenRates, TopApp
from tests.fakes.model_folder import write_model_folder
from tests.router.pools.owned import Owned, owned
from tests.router.rig import running
from tests.tandem.client.test_channel import frozen_server, notice_soon
from tests.tandem.commands.background import Background
from tests.tcp import TcpServer
from tests.waiting import until


def listed(num_tokens: int, epoch: str = "a", *, role: str = "decode") -> pools_pb2.ListPoolsResponse:
    wire = instance_pb2.ROLE_DECODE if role == "decode" else instance_pb2.ROLE_PREFILL
    load = instance_pb2.WatchLoadResponse(
        instance_epoch=epoch, num_generated_tokens=num_tokens, num_prefilled_tokens=10 * num_tokens
    )
    return pools_pb2.ListPoolsResponse(instances=[pools_pb2.PoolInstance(address="h:1", role=wire, load=load)])


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rates = TokenRates()
    for second in range(20):
        rates.update(100.0 + second, listed(second * 50 if second < 10 else 450))
        if second == 9:
            assert rates.of("h:1") == pytest.approx(50)
    assert SPAN_S < 9
    assert rates.of("h:1") == 0
    assert max(rates.history["decode"]) == pytest.approx(50)


def test_each_pool_counts_its_own_work() -> None:
    rates = TokenRates()
    for second in range(3):
        rates.update(float(second), listed(second, role="prefill"))
    assert rates.of("h:1") == pytest.approx(10)
    assert (rates.history["prefill"][-1], rates.history["decode"][-1]) == (pytest.approx(10), 0)


def test_a_restarted_instance_begins_anew() -> None:
    rates = TokenRates()
    rates.update(0.0, listed(1000))
    rates.update(1.0, listed(0, "b"))
    assert rates.of("h:1") == 0
    rates.update(2.0, listed(7, "b"))
    assert rates.of("h:1") == pytest.approx(7)
    rates.update(3.0, pools_pb2.ListPoolsResponse())
    with pytest.raises(KeyError):
        rates.of("h:1")


class RouterMetrics:
    """The router's two histograms, as prometheus_client serves them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        buckets = (0.1, 0.2, 0.4, math.inf)
        self.ttft, self.tpot = (
            Histogram(name, "text", ("path",), registry=self.registry, buckets=buckets) for name in (TTFT, TPOT)
        )
        for one in (self.ttft, self.tpot):
            one.labels("local")  # the router's begin with counts of 0

    def text(self) -> str:
        return generate_latest(self.registry).decode()


class Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def test_percentiles_are_those_of_the_last_minute() -> None:
    metrics, latencies = RouterMetrics(), Latencies()
    assert latencies.recent(TTFT).percentile(0.5) is None
    for _ in range(1000):
        metrics.ttft.labels("local").observe(0.35)
    latencies.update(0.0, metrics.text())
    assert latencies.recent(TTFT).percentile(0.5) is None, "what was before the first reading is not recent"
    for path in ("split", "local"):
        for _ in range(50):
            metrics.ttft.labels(path).observe(0.15)
    metrics.ttft.labels("split").observe(7)
    latencies.update(30.0, metrics.text())
    p50, p100 = map(latencies.recent(TTFT).percentile, (0.5, 1.0))
    assert p50 == pytest.approx(0.15, abs=0.001)
    assert p100 == 0.4, "the last bucket has no upper bound"
    assert latencies.recent(TPOT).percentile(0.5) is None
    for at_s in (100.0, 170.0):
        latencies.update(at_s, metrics.text())
    assert latencies.recent(TTFT).percentile(0.5) is None


def test_a_restarted_router_begins_anew() -> None:
    before, after, latencies = RouterMetrics(), RouterMetrics(), Latencies()
    for _ in range(3):
        before.ttft.labels("local").observe(0.3)
    after.ttft.labels("local").observe(0.15)
    latencies.update(0.0, before.text())
    latencies.update(1.0, after.text())
    after.ttft.labels("local").observe(0.15)
    latencies.update(2.0, after.text())
    assert latencies.recent(TTFT).percentile(1.0) == pytest.approx(0.2)


def of_workers(*workers: tuple[int, RouterMetrics]) -> str:
    """The metrics of a router with several workers."""
    merged = {TTFT: Metric(TTFT, "text", "histogram"), TPOT: Metric(TPOT, "text", "histogram")}
    for index, metrics in workers:
        for family in metrics.registry.collect():
            for sample in family.samples:
                merged[family.name].add_sample(sample.name, {**sample.labels, "worker": str(index)}, sample.value)
    registry = CollectorRegistry()
    registry.register(Fixed([*merged.values()]))
    return generate_latest(registry).decode()


def test_a_worker_that_misses_a_scrape_has_no_lifetime_in_the_last_minute() -> None:
    first, second, latencies = RouterMetrics(), RouterMetrics(), Latencies()
    for _ in range(5000):
        second.ttft.labels("local").observe(0.35)  # long ago
    latencies.update(0.0, of_workers((0, first), (1, second)))
    for at_s in (1.0, 2.0, 3.0):
        first.ttft.labels("local").observe(0.05)
        second.ttft.labels("local").observe(0.05)
        latencies.update(at_s, of_workers((0, first), (1, second)) if at_s != 2.0 else of_workers((0, first)))
        assert latencies.recent(TTFT).percentile(1.0) == pytest.approx(0.1)
    assert latencies.recent(TTFT).counts[0.1] == 6


def test_a_worker_that_restarts_begins_anew_and_others_go_on() -> None:
    first, second, latencies = RouterMetrics(), RouterMetrics(), Latencies()
    second.ttft.labels("local").observe(0.35)
    latencies.update(0.0, of_workers((0, first), (1, second)))
    first.ttft.labels("local").observe(0.15)
    latencies.update(1.0, of_workers((0, first), (1, RouterMetrics())))
    assert latencies.recent(TTFT).counts == {0.1: 0, 0.2: 1, 0.4: 1, math.inf: 1}
    for at_s in (50.0, 70.0):
        latencies.update(at_s, of_workers((1, RouterMetrics())))
    assert latencies.recent(TTFT).percentile(0.5) is None, "the first worker has been silent for a minute"


@asynccontextmanager
async def shown(folder: Path) -> AsyncIterator[tuple[Owned, TopApp, Pilot[None]]]:
    """A router with one prefill, one decode instance and spares, and the screen that shows it."""
    write_model_folder(folder)
    run = partial(running, ServedModel.from_folder(folder, "fake"), folder)
    async with owned(run, num_decode=1, num_spares=2) as stack:
        address = stack.rig.app.admin_address or ""
        app = alone(await stack.listed(), address=address)
        async with app.run_test(size=(110, 32)) as pilot:
            # A busy machine may have listed the pools before the router knew both instances, or the owner's sizes.
            await until(lambda: len(app._last.instances) == app.table.row_count == 2)
            await until(lambda: all(pool.HasField("size") for pool in app._last.pools))
            yield stack, app, pilot


def alone(first: pools_pb2.ListPoolsResponse, **options: Any) -> TopApp:
    """A screen without a router; `options` replace its own."""
    defaults = {"address": "127.0.0.1:1", "credentials": PLAINTEXT, "read_at_s": time.monotonic(), "metrics": None}
    return TopApp(first=first, interval_s=0.3, **{**defaults, **options})


def column(app: TopApp, name: str) -> list[str]:
    return [str(cell) for cell in app.table.get_column(name)]


def events(app: TopApp) -> str:
    return "\n".join(line.text for line in app.events.lines)


async def test_it_follows_load_and_sizes_and_resizes_after_a_question(tmp_path: Path) -> None:
    async with shown(tmp_path) as (stack, app, pilot):
        assert column(app, "INSTANCE") == ["prefill-0", "decode-0"]
        stack.rig.decode[0].behaviour.num_waiting = 7
        await until(lambda: column(app, "WAITING") == ["0", "7"])
        await pilot.press("down", "plus")
        assert "Resize the decode pool from 1 to 2?" in str(app.screen.query_one(Label).content)
        await pilot.press("n")
        await pilot.press("plus", "y")
        await until(lambda: column(app, "INSTANCE") == ["prefill-0", "decode-0", "decode-1"])
        await until(lambda: column(app, "STATE") == ["ready"] * 3)
        assert "2 of 2 ready" in str(app.panels["decode"].lines.content)
        assert "decode: 1 → 2 by the operator" in events(app)
        assert "decode-1 is ready" in events(app)
        assert app.table.cursor_row == 1, "the cursor stays on its instance"
        assert stack.desired.snapshot.pool("decode")[1].name


async def test_a_refusal_is_shown_and_nothing_happens(tmp_path: Path) -> None:
    async with shown(tmp_path) as (stack, app, pilot):
        await pilot.press("down", "minus", "y")
        await until(lambda: app._notifications)
        assert "decode" in next(iter(app._notifications)).message
        await pilot.press("d")
        question = str(app.screen.query_one(Label).content)
        assert "Drain decode-0" in question
        assert "started again" in question, "the pool keeps its size"
        await pilot.press("escape")
        assert not isinstance(app.screen, Confirm)
        assert stack.decode_names() == ["decode-0"]
        assert not (await stack.listed()).instances[1].load.draining


async def test_a_pool_of_size_zero_becomes_no_smaller() -> None:
    """Its last instance still drains."""
    instance = pools_pb2.PoolInstance(address="h:1", instance_id="prefill-0", role=instance_pb2.ROLE_PREFILL)
    pool = pools_pb2.PoolStatus(role=instance_pb2.ROLE_PREFILL, size=0)
    first = pools_pb2.ListPoolsResponse(pools=[pool], instances=[instance])
    app = alone(first)
    async with app.run_test(size=(110, 32)) as pilot:
        await pilot.press("minus")
        assert not isinstance(app.screen, Confirm)
        assert [one.message for one in app._notifications] == ["the prefill pool has size 0 already"]
        await pilot.press("plus")
        assert "Resize the prefill pool from 0 to 1?" in str(app.screen.query_one(Label).content)


async def test_an_address_that_is_given_for_both_pools_has_a_row_in_each() -> None:
    def both(num_tokens: int) -> pools_pb2.ListPoolsResponse:
        foreign = pools_pb2.PoolInstance(address="h:1", role=instance_pb2.ROLE_PREFILL, out="its role is decode")
        return pools_pb2.ListPoolsResponse(instances=[foreign, *listed(num_tokens).instances])

    app = alone(both(0), read_at_s=time.monotonic() - 2)
    async with app.run_test(size=(110, 32)):
        app._show(both(1000), time.monotonic())
        assert [
            (pool, rate > "0") for pool, rate in zip(column(app, "POOL"), column(app, "TOKENS/S"), strict=True)
        ] == [
            ("prefill", False),
            ("decode", True),
        ]


async def test_one_running_request_is_not_several() -> None:
    instance = pools_pb2.PoolInstance(address="h:1", role=instance_pb2.ROLE_DECODE, num_running_here=1)
    app = alone(pools_pb2.ListPoolsResponse(instances=[instance]))
    async with app.run_test(size=(110, 32)) as pilot:
        await pilot.press("d")
        assert "Drain h:1, 1 running request?" in str(app.screen.query_one(Label).content)


def one_pool() -> pools_pb2.ListPoolsResponse:
    """A decode pool of one instance, with an autoscaler that says much."""
    status = pools_pb2.AutoscalerStatus(
        min_size=1, max_size=48, leads=True, desired_size=30,
        reason="load 0.62 of 0.80, KV 0.41 of 0.85, ITL 31 ms of 50 ms; the last change was 50 s ago, 60 s must pass",
    )  # fmt: skip
    change = pools_pb2.PoolChange(previous_size=28, size=30, cause="autoscaler", reason="load 0.91 of 0.80 wants 32")
    pool = pools_pb2.PoolStatus(role=instance_pb2.ROLE_DECODE, size=1, autoscaler=status, last_change=change)
    return pools_pb2.ListPoolsResponse(pools=[pool], instances=listed(1000).instances)


def seen(app: TopApp) -> str:
    """The screen's text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in strips)


async def test_the_first_rate_counts_from_when_the_first_answer_was_read() -> None:
    app = alone(one_pool(), read_at_s=time.monotonic() - 10)
    async with app.run_test(size=(110, 32)):
        app._show(listed(1100), time.monotonic())
        assert 0 < max(app._rates.history["decode"]) <= 10


async def test_a_pool_with_an_autoscaler_shows_its_rate() -> None:
    app = alone(one_pool())
    async with app.run_test(size=(80, 32)) as pilot:
        await pilot.pause()
        assert "0 tokens/s generated" in seen(app)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_a_question_does_not_keep_from_quitting(key: str) -> None:
    app = alone(one_pool())
    async with app.run_test(size=(110, 32)) as pilot:
        await pilot.press("d")
        assert isinstance(app.screen, Confirm)
        await pilot.press(key)
        await until(lambda: not app.is_running)


async def test_a_narrow_terminal_shows_the_whole_question() -> None:
    app = alone(one_pool())
    async with app.run_test(size=(40, 32)) as pilot:
        await pilot.press("plus")
        await pilot.pause()
        lines = [line.strip(" │") for line in seen(app).splitlines()]
        assert "Resize the decode pool from 1 to 2?" in " ".join(lines)
        box = app.screen.query_one(Label).region
        assert (box.x, box.right) == (0, 40)


async def test_a_router_that_stops_is_named_and_its_last_message_stays(tmp_path: Path) -> None:
    async with shown(tmp_path) as (stack, app, _):
        await until(lambda: column(app, "STATE") == ["ready", "ready"])
        await stack.rig.app.stop()
        await until(lambda: "no answer" in app.sub_title)
        await until(lambda: "--admin-listen" in events(app))
        assert column(app, "INSTANCE") == ["prefill-0", "decode-0"]


async def test_a_router_that_freezes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    notice_soon(monkeypatch, screen, "ADMIN_OPTIONS")
    with frozen_server(1) as address:
        app = alone(pools_pb2.ListPoolsResponse(), address=address)
        async with app.run_test(size=(110, 32)):
            await until(lambda: "ping timeout" in events(app))
            assert "no answer" in app.sub_title


async def test_a_token_that_cannot_be_read_is_an_event_and_not_the_end(tmp_path: Path) -> None:
    credentials = Credentials(token_file=tmp_path / "none")
    app = alone(pools_pb2.ListPoolsResponse(), credentials=credentials)
    async with app.run_test(size=(110, 32)):
        await until(lambda: "token_file:" in events(app))
        assert "no answer" in app.sub_title


async def test_an_error_with_brackets_is_shown_as_it_is() -> None:
    app = alone(one_pool(), credentials=Credentials(token_file=Path("[b]/[/token]")))
    async with app.run_test(size=(110, 32), notifications=True) as pilot:
        await pilot.press("plus", "y")
        await until(lambda: "▌ token_file: [b]/[/token]" in seen(app))


async def test_metrics_of_this_machine_are_read_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with TcpServer(answer) as server:
        app = alone(pools_pb2.ListPoolsResponse(), metrics=server.address)
        async with app.run_test(size=(110, 32)):
            await until(lambda: str(app.latency_line.content))
            assert "last minute" in str(app.latency_line.content)


def test_mistakes_are_answered_before_the_screen_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert "tandem up" in CliRunner().invoke(main, ("top",)).output
    assert "--admin-listen" in CliRunner().invoke(main, ("top", "--admin", "127.0.0.1:1")).output


def test_without_a_terminal_it_names_the_table(stack: Background) -> None:
    result = CliRunner().invoke(main, ("top", "--admin", stack.admin_address))
    assert result.exit_code != 0
    assert "needs a terminal; `tandem pools`" in result.output


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_no_terminal(
    stack: Background, stream: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
    monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit):
        main(("top", "--admin", stack.admin_address))
    assert capsys.readouterr().err.startswith("Error: tandem top needs a terminal")


def test_without_textual_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ("top",))
    assert result.exit_code != 0
    assert "-e '.[top]'" in result.output
