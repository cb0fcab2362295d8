"""The live page at the HTTP port: its files, its data, its operations, and who may have them."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.live.endpoints import LiveFeed, patch_of
from router.api.live.state import Json, Reading
from router.api.openai.server import HttpSettings
from router.app import RouterApp
from router.request.request_log import RequestLog
from router.request.validation import ServedModel
from router.settings import RouterSection, RouterSettings
from serving.settings import SettingsError
from tests.process_logs import ProcessLogs
from tests.router.api.live.test_state import WALL_S, reading
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.test_security import ALICE, OPERATOR, write_tokens
from tests.router.conftest import Run
from tests.router.pools.owned import owned
from tests.router.rig import PROMPT, TIMEOUT_S, settings_of, slow
from tests.waiting import until

PAGE = {"page": True}
HTML = {"accept": "text/html,*/*;q=0.8"}


@asynccontextmanager
async def watching(http: httpx.AsyncClient, **headers: str) -> AsyncIterator[AsyncIterator[Json]]:
    """The states that /live describes, each made of the one before."""

    async def states(response: httpx.Response) -> AsyncIterator[Json]:
        state: Json = {}
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                state = applied(state, line.removeprefix("data: "))
                yield state

    async with http.stream("GET", "/live", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield states(response)


async def test_a_browser_gets_the_page_and_others_the_description(run_http: RunHttp) -> None:
    async with run_http(http=PAGE) as http:
        page = await http.http.get("/", headers=HTML)
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert (await http.http.get("/")).json()["model"] == "fake"
        # STEP: everything that the page names is served, as its type, and from nowhere else
        names = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert names
        for name in names:
            file = await http.http.get(f"/{name}")
            assert file.status_code == 200, name
            assert file.headers["x-content-type-options"] == "nosniff"
            again = await http.http.get(f"/{name}", headers={"if-none-match": file.headers["etag"]})
            assert again.status_code == 304
        for missing in ("/page/..%2fendpoints.py", "/page/uPlot.LICENSE", "/page/none.js"):
            assert (await http.http.get(missing)).status_code == 404


async def test_the_page_is_off_by_default(run_http: RunHttp) -> None:
    async with run_http() as http:
        assert (await http.http.get("/", headers=HTML)).json()["service"] == "tandem"
        for path in ("/live", "/page/page.js"):
            assert (await http.http.get(path)).status_code == 404
        assert http.rig.app.service.metrics.log is None


async def test_requests_are_seen_while_they_run_and_after_their_end(run_http: RunHttp) -> None:
    async with run_http(http=PAGE, decode=2) as http, watching(http.http) as states:
        for fake in [*http.rig.prefill, *http.rig.decode]:
            fake.behaviour = slow(0.05)
        first = await anext(states)
        assert {one["name"] for one in first["instances"].values()} == {"prefill-0", "decode-0", "decode-1"}
        assert first["requests"] == first["ended"] == {}
        log = http.rig.app.service.metrics.log
        assert log is not None
        assert first["router"]["epoch"] == log.epoch != RequestLog().epoch
        call = asyncio.ensure_future(http.rig.generate(max_tokens=60))
        async for state in states:
            if any(one["stage"] == "decode" for one in state["requests"].values()):
                break
        [running] = state["requests"].values()
        assert running["prompt_tokens"] == len(PROMPT)
        assert running["prefill"] == ["prefill-0"]
        answer = await call
        async for state in states:
            if state["ended"]:
                break
        [ended] = state["ended"].values()
        assert (ended["outcome"], ended["tokens"]) == ("finished", 60)
        assert ",".join(ended["decode"]) == answer.trailers["tandem-decode"]
        assert {"prefill", "decode"} <= {name for name, _ in ended["stages"]}
        assert state["requests"] == {}


async def test_a_watcher_that_leaves_ends_the_sampling(run_http: RunHttp) -> None:
    async with run_http(http=PAGE) as http:
        feed = http.rig.app._page.feed  # type: ignore[union-attr]
        assert not feed.is_sampling
        async with watching(http.http) as states:
            await anext(states)
            assert feed.is_sampling
        await until(lambda: not feed.is_sampling)


async def test_a_router_that_drains_ends_the_watches_and_does_not_wait_for_them(run_http: RunHttp) -> None:
    async with run_http(http=PAGE) as http, watching(http.http) as states:
        await anext(states)
        async with asyncio.timeout(TIMEOUT_S):
            assert await http.rig.app.drain()
            assert [state async for state in states] == []


async def test_an_instance_is_drained_and_an_impossible_order_is_rejected(run_http: RunHttp) -> None:
    async with run_http(http=PAGE, decode=2) as http:
        answer = await http.post("/pools/drain", instance="decode-1")
        assert answer.json() == {"instance": "decode-1", "unfinished": 0}
        assert [fake.behaviour.draining for fake in http.rig.decode] == [False, True]
        problem = (await http.post("/pools/drain", instance="decode-7")).json()["error"]
        assert "did you mean decode-" in problem["message"]
        refused = await http.post("/pools/resize", decode=2)
        assert (refused.status_code, "cannot resize" in refused.text) == (400, True)


async def test_a_resize_from_the_page_is_an_operators_and_is_seen(run: Run) -> None:
    async with owned(run, http={"listen": "127.0.0.1:0", **PAGE}) as stack:
        base_url = f"http://{stack.rig.app.http_address}"
        async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as http, watching(http) as states:
            assert (await anext(states))["pools"]["decode"] == {"ready": 2, "size": 2}
            answer = await http.post("/pools/resize", json={"decode": 3})
            assert answer.json() == {"changes": [{"pool": "decode", "from": 2, "to": 3}]}
            async for state in states:
                if state["pools"]["decode"] == {"ready": 3, "size": 3}:
                    break
            [decision] = state["decisions"].values()
            assert (decision["from"], decision["to"], decision["cause"]) == (2, 3, "operator")
            for body, named in (({}, "sizes"), ({"decode": 0}, "between 1 and 64"), ({"decode": "3"}, "decode")):
                refused = await http.post("/pools/resize", json=body)
                assert (refused.status_code, named in refused.text) == (400, True), body


async def test_operators_need_their_token(run_http: RunHttp, tmp_path: Path) -> None:
    files = {
        "tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE]),
        "admin_tokens_file": write_tokens(tmp_path / "admin", operator=[OPERATOR]),
    }
    async with run_http(http=PAGE, auth=files) as http:
        assert (await http.http.get("/", headers=HTML)).status_code == 200, "the page asks for the token"
        for headers in ({}, {"authorization": f"Bearer {ALICE}"}):
            for method, path in (("GET", "/live"), ("POST", "/pools/resize"), ("POST", "/pools/drain")):
                answer = await http.http.request(method, path, headers=headers)
                assert answer.status_code == 401, path
        async with watching(http.http, authorization=f"Bearer {OPERATOR}") as states:
            assert (await anext(states))["router"]["model"] == "fake"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
        ({"host": "["}, 403),
        ({"origin": "http://["}, 403),
    ],
)
async def test_other_sites_cannot_use_an_open_page(run_http: RunHttp, headers: dict[str, str], status: int) -> None:
    """Neither by their own name nor by one that resolves to this address."""
    async with run_http(http=PAGE) as http:
        answer = await http.http.post("/pools/drain", json={"instance": "decode-0"}, headers=headers)
        assert answer.status_code == status
        assert http.rig.decode[0].behaviour.draining == (status == 200)


@pytest.mark.parametrize("sections", [{"http": {"listen": "0.0.0.0:0"}}, {"auth": {"tokens_file": "tokens"}}])
async def test_a_page_that_others_could_use_is_refused_at_the_start(
    model: ServedModel, model_folder: Path, tmp_path: Path, sections: dict[str, dict[str, str]]
) -> None:
    write_tokens(tmp_path / "tokens", alice=[ALICE])
    auth = {name: str(tmp_path / file) for name, file in sections.get("auth", {}).items()}
    http = {"listen": "127.0.0.1:0", "page": True, **sections.get("http", {})}
    with pytest.raises(SettingsError, match=r"auth\.admin_tokens_file"):
        RouterApp(settings_of(model_folder, [], [], http=http, auth=auth), model)


async def test_auto_serves_no_page_where_one_would_be_refused(run_http: RunHttp, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens", alice=[ALICE])
    async with run_http(http={"page": "auto"}, auth={"tokens_file": tokens}) as http:
        assert (await http.http.get("/live", headers={"authorization": f"Bearer {ALICE}"})).status_code == 404
    async with run_http(http={"page": "auto"}) as http:
        assert (await http.http.get("/", headers=HTML)).text.startswith("<!doctype html>")


def test_a_page_without_a_port_is_refused() -> None:
    router = RouterSection(model="m")
    with pytest.raises(ValueError, match=r"http\.page needs http\.listen"):
        RouterSettings(router=router, http=HttpSettings(page=True))
    assert RouterSettings(router=router, http=HttpSettings(page="auto")).http.listen is None


def patched(before: Json, patch: Mapping[str, Any]) -> Json:
    """`before` with the changes of `patch`; neither is changed."""
    after = {name: value for name, value in before.items() if patch.get(name, value) is not None}
    for name, value in patch.items():
        if isinstance(value, dict):
            old = before.get(name)
            after[name] = patched(old if isinstance(old, dict) else {}, value)
        elif value is not None:
            after[name] = value
    return after


LEAVES = st.one_of(st.booleans(), st.integers(0, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2))
STATES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(LEAVES, inner), max_size=3),
    max_leaves=8,
)


@given(before=STATES, after=STATES)
def test_a_patch_makes_one_state_of_the_other(before: Json, after: Json) -> None:
    was = copy.deepcopy(before)
    assert patched(before, patch_of(before, after)) == after
    assert before == was
    assert patch_of(after, copy.deepcopy(after)) == {}


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": 1}, {"a": {"bb": {"ccc": None}}}, {"e": 1, "a": {"bb": {}}}),
        ({"a": "foo"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_patches_are_applied_as_in_the_rfc(before: Json, patch: dict[str, Any], after: Json) -> None:
    assert patched(before, patch) == after


class Source:
    """Readings that count themselves."""

    def __init__(self) -> None:
        self.num_read = 0

    async def read(self) -> Reading:
        self.num_read += 1
        return reading(float(self.num_read), router={"number": self.num_read})


def applied(state: Json, event: str | bytes) -> Json:
    [(kind, content)] = json.loads(event).items()
    return content if kind == "snapshot" else patched(state, content)


async def test_watchers_share_one_sampling_that_ends_with_the_last_of_them() -> None:
    source = Source()
    feed = LiveFeed(source.read, interval_s=0.01)
    assert not feed.is_sampling
    before = asyncio.all_tasks()
    async with aclosing(feed.watch()) as first, aclosing(feed.watch()) as second:
        states: list[Json] = [{}, {}]
        for _ in range(5):
            for index, watch in enumerate((first, second)):
                states[index] = applied(states[index], await anext(watch))
        for state in states:
            assert state["at"] == WALL_S + state["router"]["number"], "all of it is of one reading"
        assert states[1]["router"]["number"] <= source.num_read, "one reading for both"
    assert not feed.is_sampling
    await until(lambda: asyncio.all_tasks() == before)
    num_read = source.num_read
    async with aclosing(feed.watch()) as again:
        assert "snapshot" in json.loads(await anext(again))
        assert source.num_read == num_read + 1


async def test_a_slow_watcher_gets_a_snapshot_and_others_patches() -> None:
    source = Source()
    feed = LiveFeed(source.read, interval_s=0.01)
    async with aclosing(feed.watch()) as watch:
        state = applied({}, await anext(watch))
        event = await anext(watch)
        assert "patch" in json.loads(event)
        state = applied(state, event)
        seen = source.num_read
        await until(lambda: source.num_read >= seen + 3)
        event = await anext(watch)
        assert "snapshot" in json.loads(event)
        assert applied(state, event)["router"]["number"] > seen


async def test_a_closed_feed_ends_its_watches_and_takes_no_others() -> None:
    feed = LiveFeed(Source().read, interval_s=60.0)
    watch = feed.watch()
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch, None))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting is None
    assert [event async for event in feed.watch()] == []


async def test_a_reading_that_fails_ends_the_watches_and_is_logged(
    caplog: pytest.LogCaptureFixture, process_logs: ProcessLogs
) -> None:
    async def read() -> Any:
        raise RuntimeError("no pools")

    feed = LiveFeed(read)
    with caplog.at_level(logging.ERROR), process_logs.expected("no pools"):
        assert [event async for event in feed.watch()] == []
    assert "no pools" in caplog.text
    assert not feed.is_sampling


async def test_a_reading_that_fails_ends_every_watch_though_another_begins_at_once(process_logs: ProcessLogs) -> None:
    source, begun = Source(), list[asyncio.Future[bytes]]()

    async def read() -> Reading:
        if source.num_read == 1:
            begun.append(asyncio.ensure_future(anext(second)))
            source.num_read += 1
            raise RuntimeError("no pools")
        return await source.read()

    feed = LiveFeed(read, interval_s=0.01)
    async with aclosing(feed.watch()) as first, aclosing(feed.watch()) as second:
        assert json.loads(await anext(first))["snapshot"]["router"] == {"number": 1}
        with process_logs.expected("no pools"):
            assert await anext(first, None) is None
        assert json.loads(await begun[0])["snapshot"]["router"] == {"number": 3}
    assert not feed.is_sampling
