"""The page's files: they are in the wheel, and its merge of patches is the router's."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from router.api.live.endpoints import patch_of
from tests.router.api.live.test_endpoints import patched

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "router/api/live/page"


def test_the_wheel_has_the_page_and_the_licence_of_its_charts(tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path / 'wheel')!r}))"
    source = tmp_path / "source"
    shutil.copytree(ROOT / "router", source / "router", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [wheel] = (tmp_path / "wheel").glob("*.whl")
    packed = {name.rpartition("/")[2] for name in zipfile.ZipFile(wheel).namelist() if "/live/page/" in name}
    assert packed == {file.name for file in PAGE.iterdir()}
    assert {"index.html", "uPlot.iife.min.js", "uPlot.LICENSE"} <= packed


def test_no_script_of_the_page_makes_html_of_text() -> None:
    for script in PAGE.glob("*.js"):
        assert not re.search(r"\.(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(", script.read_text()), (
            script.name
        )
    assert not re.search(r"<script>|\son\w+=|style=", (PAGE / "index.html").read_text())


def test_the_page_applies_patches_as_the_router_does() -> None:
    rng = random.Random(0)

    def value(depth: int) -> Any:
        if depth and rng.random() < 0.6:
            return {name: value(depth - 1) for name in "abcd" if rng.random() < 0.5}
        return rng.choice((0, 1, "", "x", [1], [], True))

    def state() -> dict[str, Any]:
        return {name: value(3) for name in "abc" if rng.random() < 0.7}

    pairs = [(state(), state()) for _ in range(300)]
    cases = [(before, patch_of(before, after)) for before, after in pairs]
    script = (
        f"import {{ merge }} from {json.dumps((PAGE / 'feed.js').as_uri())}; import {{ readFileSync }} from 'node:fs';"
        "console.log(JSON.stringify(JSON.parse(readFileSync(0)).map(([before, patch]) => merge(before, patch))));"
    )
    node = ["node", "--no-warnings", "--experimental-default-type=module", "--input-type=module", "-e", script]
    done = subprocess.run(node, input=json.dumps(cases), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [after for _, after in pairs] == [patched(*case) for case in cases]


def test_a_value_that_no_line_reaches_is_a_point() -> None:
    seconds = [*range(100, 131), 200, 206, 207, 213]
    known = (100, 101, 106, 110, 116, 125, 129, 200, 206, 213)
    values = [1.0 if second in known else None for second in seconds]
    script = (
        f"import {{ isolated }} from {json.dumps((PAGE / 'charts.js').as_uri())};"
        f"const found = isolated(...{json.dumps([seconds, values])});"
        f"console.log(JSON.stringify([found, isolated([], []), isolated([7], [2])]));"
    )
    node = ["node", "--no-warnings", "--experimental-default-type=module", "--input-type=module", "-e", script]
    done = subprocess.run(node, capture_output=True, text=True, check=True)
    found, *small = json.loads(done.stdout)
    # lines join 100 and 101, 106 and 110 (4 s apart), 125 and 129, and 200 and 206, between which nothing is missing
    assert ([seconds[index] for index in found], small) == ([116, 213], [[], [0]])


def test_a_refusal_is_no_lost_connection() -> None:
    script = f"import {{ Feed }} from {json.dumps((PAGE / 'feed.js').as_uri())};"
    script += """
        const seen = [];
        globalThis.document = { addEventListener() {} };
        globalThis.fetch = async () => {
          if (seen.length > 2) throw new TypeError("fetch failed");
          const body = JSON.stringify({ error: { message: "Host must be an IP address" } });
          return new Response(body, { status: 403 });
        };
        const feed = new Feed(() => {}, (status, detail) => {
          seen.push([status, detail]);
          if (seen.length < 4) return;
          console.log(JSON.stringify(seen));
          process.exit();
        });
        feed.run(() => ({}));
    """
    node = ["node", "--no-warnings", "--experimental-default-type=module", "--input-type=module", "-e", script]
    done = subprocess.run(node, capture_output=True, text=True, check=True)
    refused = ["refused", "Host must be an IP address"]
    assert json.loads(done.stdout) == [["connecting", ""], refused, ["connecting", ""], ["lost", "fetch failed"]]


def test_a_new_chat_has_nothing_of_the_answer_that_it_interrupts() -> None:
    script = f"import {{ Chat }} from {json.dumps((PAGE / 'chat.js').as_uri())};"
    script += """
        const nodes = {}, asked = [];
        const node = () => ({
          on: {}, value: "", append() {}, replaceChildren() {}, setAttribute() {},
          addEventListener(name, act) { this.on[name] = act; },
        });
        globalThis.document = { getElementById: (id) => (nodes[id] ??= node()), createElement: node };
        globalThis.fetch = async (path, { body, signal }) => {
          asked.push(JSON.parse(body).messages.map(({ content }) => content));
          return { ok: true, headers: new Map(), body: new ReadableStream({ start(answer) {
            answer.enqueue(new TextEncoder().encode('data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n'));
            signal.addEventListener("abort", () => answer.error(new DOMException("", "AbortError")));
          } }) };
        };
        const soon = () => new Promise((resolve) => setTimeout(resolve, 200));
        const say = async (text) => {
          nodes["chat-text"].value = text;
          nodes["chat-form"].on.submit({ preventDefault() {} });
          await soon();
        };
        new Chat(() => ({}), () => {});
        await say("first");
        nodes["chat-new"].on.click();
        await soon();
        await say("second");
        console.log(JSON.stringify(asked));
        process.exit();
    """
    node = ["node", "--no-warnings", "--experimental-default-type=module", "--input-type=module", "-e", script]
    done = subprocess.run(node, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["first"], ["second"]]


def test_the_chat_shows_what_the_model_thinks_and_sends_only_answers_back() -> None:
    script = f"import {{ Chat }} from {json.dumps((PAGE / 'chat.js').as_uri())};"
    script += """
        const nodes = {}, asked = [], shown = [];
        const node = () => ({
          on: {}, value: "", text: "", replaceChildren() {}, setAttribute() {},
          append(...parts) { for (const part of parts) if (typeof part === "string") this.text += part; },
          before(other) { shown.push(other, this); },
          addEventListener(name, act) { this.on[name] = act; },
        });
        globalThis.document = { getElementById: (id) => (nodes[id] ??= node()), createElement: node };
        const deltas = [{ role: "assistant", content: "" }, { reasoning_content: "Hm" }, { reasoning_content: "m." },
          { content: "Yes" }, { content: "!" }];
        globalThis.fetch = async (path, { body }) => {
          asked.push(JSON.parse(body).messages.map(({ content }) => content));
          const lines = deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\\n\\n`);
          return { ok: true, headers: new Map(), body: new Blob([...lines, "data: [DONE]\\n\\n"]).stream() };
        };
        const say = async (text) => {
          nodes["chat-text"].value = text;
          nodes["chat-form"].on.submit({ preventDefault() {} });
          while (nodes["chat-send"].textContent !== "Send") await new Promise((resolve) => setTimeout(resolve, 10));
        };
        new Chat(() => ({}), () => {});
        await say("first");
        await say("second");
        console.log(JSON.stringify([asked, shown.map((one) => one.text)]));
        process.exit();
    """
    node = ["node", "--no-warnings", "--experimental-default-type=module", "--input-type=module", "-e", script]
    done = subprocess.run(node, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[["first"], ["first", "Yes!", "second"]], ["Hmm.", "Yes!", "Hmm.", "Yes!"]]
