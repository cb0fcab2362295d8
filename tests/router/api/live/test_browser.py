"""The live page in a browser. Needs Debian's chromium and npm's playwright-core: `make test-slow` installs both."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.api.live.state import Reading
from router.autoscaler.resizer import Change
from router.request.request_log import RequestSummary
from tests.router.api.live.synthetic import Synthetic, serving
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.test_security import ALICE, OPERATOR, write_tokens
from tests.router.conftest import Run
from tests.router.pools.owned import owned
from tests.router.rig import Answer
from tests.terminal import Terminal
from tests.waiting import until

ROOT = Path(__file__).parents[4]
STEP_S = 200.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Browser:
    """A scenario of browser.mjs that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def step(self, name: str) -> dict[str, Any]:
        """What the scenario found; it waits until `proceed`."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        async with asyncio.timeout(STEP_S):
            line = await self._process.stdout.readline()
        assert line, (await self._process.stderr.read()).decode()
        found: dict[str, Any] = json.loads(line)
        assert found["step"] == name
        return found

    async def proceed(self, answer: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{answer}\n".encode())
        await self._process.stdin.drain()


@asynccontextmanager
async def browser(scenario: str, url: str, *arguments: str) -> AsyncIterator[Browser]:
    node, chromium = shutil.which("node"), os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert node, "this test needs node: sudo apt-get install npm"
    assert chromium, "this test needs a browser: sudo apt-get install chromium, or CHROMIUM=/path/to/chromium"
    assert (ROOT / "node_modules/playwright-core").is_dir(), "this test needs playwright-core: npm ci"
    process = await asyncio.create_subprocess_exec(
        *(node, str(Path(__file__).with_name("browser.mjs")), scenario, url, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "CHROMIUM": chromium},
        cwd=ROOT,
    )
    try:
        yield Browser(process)
    finally:
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()  # Playwright handles SIGTERM and leaves a step waiting
            process.terminate()
        await process.wait()


async def test_many_instances_are_shown_and_a_lost_router_is_found_again() -> None:
    source = Synthetic()
    async with AsyncExitStack() as cleanup:
        async with serving(source) as (url, _):
            page = await cleanup.enter_async_context(browser("load", url))
            found = await page.step("live")
            assert (found["rows"], found["details"]) == (50, 8)
            before = source.num_read
            await until(lambda: source.num_read >= before + 10, within_s=STEP_S)
            await page.proceed()
            found = await page.step("watched")
            assert found["problems"] == []
            print(f"the longest tasks of the page's thread: {found['tasks_ms'][:6]} ms of CPU")
        await page.proceed()
        assert "connection lost" in (await page.step("lost"))["text"]
        async with serving(source, int(url.rpartition(":")[2])):
            await page.proceed()
            assert await page.step("again") == {"step": "again", "rows": 50, "scrolls": False}
            await page.proceed()


async def test_requests_of_another_router_are_others_than_those_with_their_numbers() -> None:
    async with AsyncExitStack() as cleanup:
        async with serving(Synthetic(epoch="first")) as (url, _):
            page = await cleanup.enter_async_context(browser("another", url))
            await page.step("opened")
        async with serving(Synthetic(epoch="second"), int(url.rpartition(":")[2])):
            await page.proceed()
            found = await page.step("again")
            assert found["opened"].startswith("first-")
            assert found["kept"] == [found["opened"]], "its details are open"
            assert found["others"] == ["second"]
            assert found["ordered"]
            await page.proceed()


async def test_the_page_is_worked_by_keys_alone(run: Run) -> None:
    async with (
        owned(run, http={"listen": "127.0.0.1:0", "page": True}) as stack,
        browser("keyboard", f"http://{stack.rig.app.http_address}") as page,
    ):
        # STEP: Tab reaches everything in the order of the page, and the focus is seen
        stops = (await page.step("walked"))["stops"]
        assert all(is_shown for _, is_shown, _ in stops), stops
        names = [name for name, _, _ in stops]
        wanted = ["Skip to the pools", "Keys", "Size of the prefill pool", "Drain prefill-0"]
        wanted += ["Size of the decode pool", "Drain decode-0", "Drain decode-1", "Answers", "Message"]
        assert [name for name in names if name in wanted] == wanted
        await page.proceed()
        # STEP: a resize; the focus stays in the field
        found = await page.step("resized")
        assert (found["focused"], found["notice"]) == ("Size of the decode pool", "decode: 2 → 3")
        assert found["decision"] == ["decode", "2 → 3", "by the operator"]
        assert len(stack.desired.snapshot.pool("decode")) == 3
        await page.proceed()
        # STEP: a drain, which asks first
        found = await page.step("drained")
        assert found["asked"] == "Sure? Drain decode-1"
        assert found["notice"].startswith("decode-1 drains")
        assert found["problems"] == []
        await page.proceed()


async def test_a_load_is_seen_after_at_most_two_updates_and_in_top(run: Run) -> None:
    def shown_in_top() -> int:
        """The sum of the column OURS."""
        return sum(map(int, re.findall(r"decode-\d +ready(?: +\d+){3} +(?:-|\S+ of \d+) +(\d+) ", top.text)))

    size, load = 24, list[asyncio.Task[Answer]]()
    async with (
        owned(run, http={"listen": "127.0.0.1:0", "page": True}) as stack,
        browser("spike", f"http://{stack.rig.app.http_address}", str(size)) as page,
    ):
        for fake in [*stack.rig.prefill, *stack.rig.decode]:
            fake.behaviour.prefill_s, fake.behaviour.token_s = 0.1, 0.1
        command = (sys.executable, "-m", "tandem", "top", "--admin", str(stack.rig.app.admin_address))
        top = Terminal(command, columns=120)
        try:
            await until(lambda: "decode-1" in top.text, within_s=STEP_S)
            await page.step("calm")
            begun_s = time.time()
            load = [asyncio.create_task(stack.rig.generate(max_tokens=600, timeout=STEP_S)) for _ in range(size)]
            await until(lambda: sum(len(fake.recorded("decode")) for fake in stack.rig.decode) == size)
            await page.proceed(str(int(time.time() * 1e3)))
            await until(lambda: shown_in_top() == size, within_s=STEP_S)
            print(f"seconds after the load began: in top {time.time() - begun_s:.1f} or less")
            found = await page.step("seen")
            print({name: f"{at_ms / 1e3 - begun_s:.1f} s" for name, at_ms in found["seen"].items()})
            assert found["problems"] == []
            assert found["numUpdates"] <= 2, "an update that was read before, and the next"
            await page.proceed()
        finally:
            top.end()
            for one in load:
                one.cancel()


class Hostile(Synthetic):
    """Every text that instances, models and requests bring is markup."""

    markup = "<img src=x onerror='window.ran=1'><script>window.ran=1</script>"

    async def read(self) -> Reading:
        reading = await super().read()

        def hostile(one: RequestSummary) -> RequestSummary:
            names: dict[str, Any] = {"prefill": (self.markup,), "decode": (self.markup,)}
            return replace(one, request_id=self.markup, reason=self.markup, error=self.markup, **names)

        return replace(
            reading,
            router={**reading.router, "model": self.markup},
            running=[hostile(one) for one in reading.running],
            ended=deque(hostile(one) for one in reading.ended),
            instances=[(role, sample._replace(name=self.markup)) for role, sample in reading.instances],
            changes=[Change("decode", 1, 2, "operator", self.markup, reading.now_s)],
        )


async def test_markup_in_names_reasons_and_errors_stays_text() -> None:
    async with serving(Hostile(num_instances=5)) as (url, _), browser("markup", url, Hostile.markup) as page:
        found = await page.step("shown")
        places = ["#model", "#pools", "#running", "#ended", ".facts", "#decisions", "#chat-log", "#notice", "title"]
        assert found == {"step": "shown", "places": places, "elements": 0, "ran": False, "problems": []}
        await page.proceed()


async def test_a_refusal_is_shown_as_what_it_says() -> None:
    async with serving(Synthetic(num_instances=5)) as (url, _), browser("refused", url) as page:
        assert (await page.step("refused"))["text"] == "refused: Host must be an IP address"
        await page.proceed()
        await page.step("live")
        await page.proceed()


async def test_the_field_of_a_size_follows_others_and_keeps_what_was_typed() -> None:
    source = Synthetic(num_instances=50)
    async with serving(source) as (url, _), browser("sizes", url) as page:
        for num_instances, size, name, found in (
            (55, 33, "focused", {"value": "30", "resizes": False}),
            (60, 36, "followed", {"value": "33", "resizes": False}),
            (50, 30, "edited", {"value": "5", "resizes": True}),
            (50, 30, "kept", {"value": "5", "resizes": True}),
        ):
            assert await page.step(name) == {"step": name, **found}
            source.num_instances = num_instances
            await page.proceed(str(size))


async def test_a_value_without_neighbours_is_seen_in_a_chart() -> None:
    async with serving(Synthetic(num_instances=5)) as (url, _), browser("sparse", url) as page:
        found = await page.step("drawn")
        assert (found["drawn"], found["problems"]) == (28, [])
        await page.proceed()


async def test_a_page_with_tokens_asks_for_the_operators(run_http: RunHttp, tmp_path: Path) -> None:
    files = {
        "tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE]),
        "admin_tokens_file": write_tokens(tmp_path / "admin", operator=[OPERATOR]),
    }
    async with run_http(http={"page": True}, auth=files) as http, browser("locked", http.url) as page:
        assert "operators' token" in (await page.step("asked"))["text"]
        await page.proceed()
        # STEP: what was typed stays when the page connects again
        assert (await page.step("shown"))["token"] == OPERATOR
        await page.proceed()
        await page.step("live")
        await page.proceed()
