"""OpenAI's own client against a real stack with the demo model, and the examples of docs/openai.md as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tandem import Client
from tandem.commands.up import usage_text
from tests.engine_under_test import PATIENCE
from tests.system.checker import wait_idle
from tests.system.rig import Rig
from tests.system.stacks import Stack, on_stack
from tests.waiting import wait_until

pytestmark = [on_stack("demo"), pytest.mark.usefixtures("shared_stack")]
STORY = "Once upon a time there was a penguin called Penny who had a tandem, but nobody to sit on the back of it. " * 4
CHAT: list[Any] = [{"role": "user", "content": "What is a tandem?"}]
PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("openai.md", "structured_output.md", "tools.md")]
EXAMPLES = [
    example
    for page in PAGES
    for example in re.findall(r"^```(sh|python)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.fixture
def client(shared_stack: Stack) -> Iterator[openai.OpenAI]:
    url = f"http://{shared_stack.rig.stack.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
def test_a_text_is_the_grpc_answer_token_by_token(rig: Rig, client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    with Client(rig.address) as grpc_client:
        expected = grpc_client.generate(STORY, max_tokens=40, **sampling)
    options: dict[str, Any] = {"model": "demo", "prompt": STORY, "max_tokens": 40, **sampling}
    whole = client.completions.create(**options, extra_body={"return_token_ids": True})
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].model_extra is not None
    assert whole.choices[0].model_extra["token_ids"] == list(expected.token_ids)
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        expected.prompt_tokens,
        len(expected.token_ids),
    )
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens_details.cached_tokens or 0) > 0, "the same prompt was computed before"
    events = list(client.completions.create(**options, stream=True))
    assert "".join(event.choices[0].text for event in events) == expected.text
    assert len(events) > 1


def test_a_chat_is_the_grpc_answer(rig: Rig, client: openai.OpenAI) -> None:
    with Client(rig.address) as grpc_client:
        expected = grpc_client.generate(CHAT, max_tokens=64, temperature=0.0)
    answer = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, logprobs=True, top_logprobs=3)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content).startswith(expected.text)
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content), "greedy takes the best"


def test_two_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(model="demo", prompt=STORY, max_tokens=30, n=2, seed=3, temperature=1.0)
        return [choice.text for choice in answer.choices]

    first = texts()
    assert first[0] != first[1]
    assert texts() == first


def test_a_stop_string_cuts_the_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": STORY, "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[20:23]
    cut = client.completions.create(**options, stop=[stop, "\u2603"]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert (cut.model_extra or {})["stop_reason"] == stop


class Rider(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)
    kind: Literal["captain", "stoker"] | None


def test_openais_parse_helper_gets_what_it_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="demo", messages=CHAT, response_format=Rider, max_tokens=300)
    assert isinstance(answer.choices[0].message.parsed, Rider)
    with client.chat.completions.stream(
        model="demo", messages=CHAT, response_format=Rider, max_tokens=300, seed=3
    ) as stream:
        streamed = stream.get_final_completion()
    assert isinstance(streamed.choices[0].message.parsed, Rider)


def test_json_that_max_tokens_cuts_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, response_format={"type": "json_object"}, max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


def test_vllms_names_constrain_both_endpoints(client: openai.OpenAI) -> None:
    regex = {"structured_outputs": {"regex": r"\d{3}-\d{4}"}}
    by_regex = client.completions.create(model="demo", prompt=STORY, extra_body=regex)
    assert re.fullmatch(r"\d{3}-\d{4}", by_regex.choices[0].text)
    choice = {"guided_choice": ["yes", "no"]}
    assert client.chat.completions.create(model="demo", messages=CHAT, extra_body=choice).choices[
        0
    ].message.content in (
        "yes",
        "no",
    )


def test_a_schema_that_cannot_be_followed_names_the_keyword(client: openai.OpenAI) -> None:
    unsupported: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match="at /: not is not supported") as raised:
        client.chat.completions.create(model="demo", messages=CHAT, response_format=unsupported)
    assert raised.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match='Rule "foo" is not defined') as raised:
        client.completions.create(model="demo", prompt="x", extra_body={"guided_grammar": "root ::= foo"})


def test_a_client_that_leaves_in_mid_stream_frees_everything(rig: Rig, client: openai.OpenAI) -> None:
    num_tokens = 3500  # it takes seconds
    before = sum(load.num_generated_tokens for load in rig.new_loads().values())
    stream = client.completions.create(
        model="demo", prompt=STORY, max_tokens=num_tokens, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(stream)
    stream.close()
    wait_idle(rig, within_s=20.0)
    assert sum(load.num_generated_tokens for load in rig.new_loads().values()) - before < num_tokens - 1


def test_errors_name_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="demo", messages=CHAT, temperature=7)
    assert raised.value.param == "temperature"


RUN_EXAMPLES = """
import contextlib, io, json, sys, traceback

outcomes = {}
for code in json.load(sys.stdin):
    printed, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    outcomes[code] = printed.getvalue(), error
print(json.dumps(outcomes))
"""


def of_stack(example: str, rig: Rig) -> str:
    return example.replace("127.0.0.1:8000", str(rig.stack.http_address)).replace(
        "Client()", f"Client({rig.address!r})"
    )


@pytest.fixture(scope="module")
def outcomes(shared_stack: Stack) -> dict[str, tuple[str, str]]:
    """What each example in Python printed, and its exception. One process runs them all: imports take most of it."""
    codes = [of_stack(code, shared_stack.rig) for language, code in EXAMPLES if language == "python"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_EXAMPLES],
        input=json.dumps(codes),
        capture_output=True,
        text=True,
        timeout=100 * PATIENCE,
        env={**os.environ, "NO_PROXY": "*"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def in_shell(command: str) -> tuple[str, str]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        env={**os.environ, "NO_PROXY": "*"},
    )
    return done.stdout, f"status {done.returncode}: {done.stderr}" if done.returncode else ""


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(EXAMPLES)])
def test_the_pages_examples_run(rig: Rig, outcomes: dict[str, tuple[str, str]], language: str, code: str) -> None:
    code = of_stack(code, rig)
    printed, error = outcomes[code] if language == "python" else in_shell(code)
    assert not error, error
    assert printed.strip(), "an example prints something"
    assert '"error"' not in printed


def test_the_command_that_up_prints_works(rig: Rig) -> None:
    assert f"\n  OpenAI API  http://{rig.stack.http_address}/v1\n" in usage_text(rig.stack)
    command = usage_text(rig.stack).split("from any OpenAI client:\n")[1].split("\n\n")[0]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60 * PATIENCE, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_page_has_examples() -> None:
    assert {language for language, _ in EXAMPLES} == {"sh", "python"}
    assert len(EXAMPLES) >= 4


def test_without_its_decode_instance_a_stack_is_unavailable_and_recovers(
    shared_stack: Stack, client: openai.OpenAI
) -> None:
    rig = shared_stack.rig
    rig.kill("decode-0")
    with httpx.Client(base_url=f"http://{rig.stack.http_address}", timeout=20) as http:
        wait_until(lambda: http.get("/health").status_code != 200, "the stack stays healthy")
    with pytest.raises(openai.InternalServerError) as raised:
        client.completions.create(model="demo", prompt="x")
    assert raised.value.status_code == 503
    assert "retry-after" in raised.value.response.headers
    back = threading.Thread(target=rig.restart, args=("decode-0",))
    back.start()
    try:  # the client's own retries last until it is back
        retrying = client.with_options(max_retries=int(60 * PATIENCE))
        assert retrying.completions.create(model="demo", prompt="x", max_tokens=2).choices
    finally:
        back.join()
