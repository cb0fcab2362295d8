"""The live page in a browser. Needs Debian's chromium and npm's playwright-core: `make test-slow` installs both."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.router.api.live.synthetic import Synthetic, serving
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.test_security import ALICE, OPERATOR, write_tokens
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

    async def proceed(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        await self._process.stdin.drain()


@asynccontextmanager
async def browser(scenario: str, url: str, *arguments: str) -> AsyncIterator[Browser]:
    node, chromium = shutil.which("node"), os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert node, "this test needs node: sudo apt-get install npm"
    assert chromium, "this test needs a browser: sudo apt-get install chromium, or CHROMIUM=/path/to/chromium"
    assert (ROOT / "node_modules/playwright-core").is_dir(), "this test needs playwright-core: npm ci"
    process = await asyncio.create_subprocess_exec(
        *(node, Path(__file__).with_name("browser.mjs"), scenario, url, *arguments),
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
        await page.proceed()
        assert "connection lost" in (await page.step("lost"))["text"]
        async with serving(source, int(url.rpartition(":")[2])):
            await page.proceed()
            assert await page.step("again") == {"step": "again", "rows": 50, "scrolls": False}
            await page.proceed()


async def test_a_page_with_tokens_asks_for_the_operators(run_http: RunHttp, tmp_path: Path) -> None:
    files = {
        "tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE]),
        "admin_tokens_file": write_tokens(tmp_path / "admin", operator=[OPERATOR]),
    }
    async with run_http(http={"page": True}, auth=files) as http, browser("locked", http.url) as page:
        assert "operators' token" in (await page.step("asked"))["text"]
        await page.proceed()
        await page.step("live")
        await page.proceed()
