"""/tokenize and /detokenize, with vLLM's bodies; /version and /; and which web pages may call."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.openai.test_tools import WEATHER
from tests.router.api.test_security import ALICE, write_tokens

CHAT = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi é"}]}]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi é"}]


async def test_a_text_comes_back_from_its_tokens(run_http: RunHttp, model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(model_folder)
    async with run_http() as http:
        answer = (await http.post("/tokenize", prompt="Hi é<eos>", return_token_strs=True)).json()
        assert answer["tokens"] == tokenizer.encode("Hi é<eos>")
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
        assert (answer["token_strs"][0], answer["token_strs"][-1]) == ("H", "<eos>")
        back = await http.post("/detokenize", tokens=answer["tokens"], model="fake")
        assert back.json() == {"prompt": "Hi é<eos>"}
        chat = (await http.post("/tokenize", messages=CHAT)).json()
        assert (chat["tokens"], chat["token_strs"]) == (tokenizer.encode_chat(TURNS), None)
        with_tools = (await http.post("/tokenize", messages=CHAT, tools=[WEATHER])).json()
        asked = {"messages": CHAT, "tools": [WEATHER], "max_tokens": 1, "return_token_ids": True}
        answer = (await http.post("/v1/chat/completions", **asked)).json()
        assert with_tools["tokens"] == answer["choices"][0]["prompt_token_ids"] != chat["tokens"]


async def test_a_chat_is_counted_as_it_will_be_rendered(run_http: RunHttp) -> None:
    async with run_http() as http:
        plain = (await http.post("/tokenize", messages=CHAT)).json()
        switches = {"messages": CHAT, "chat_template_kwargs": {"tone": "calm"}}
        switched = (await http.post("/tokenize", **switches)).json()
        asked = await http.post("/v1/chat/completions", **switches, max_tokens=1, return_token_ids=True)
        assert switched["tokens"] == asked.json()["choices"][0]["prompt_token_ids"] != plain["tokens"]


WRONG: list[tuple[str, dict[str, Any], str | None, int]] = [
    ("/tokenize", {}, "prompt", 400),
    ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt", 400),
    ("/tokenize", {"prompt": ""}, "prompt", 400),
    ("/tokenize", {"prompt": "x", "tools": [WEATHER]}, "tools", 400),
    ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", 400),
    ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", 400),
    ("/tokenize", {"prompt": "x" * 100_000}, "prompt", 400),
    ("/tokenize", {"prompt": "x", "temperature": 1}, "temperature", 400),
    ("/tokenize", {"messages": [{"role": "cook", "content": "x"}]}, None, 400),
    ("/tokenize", {"prompt": "x", "model": "gpt-9"}, None, 404),
    ("/detokenize", {}, "tokens", 400),
    ("/detokenize", {"tokens": [10**9]}, None, 400),
    ("/detokenize", {"tokens": [-1]}, None, 400),
    ("/detokenize", {"tokens": []}, "tokens", 400),
]


async def test_wrong_bodies_are_named(run_http: RunHttp) -> None:
    async with run_http() as http:
        for path, body, param, status in WRONG:
            answer = await http.post(path, **body)
            assert answer.status_code == status, (path, body, answer.text)
            if param is not None:
                assert answer.json()["error"]["param"] == param, (path, body)


async def test_version_and_paths_are_served_to_known_callers(run_http: RunHttp, tmp_path: Path) -> None:
    async with run_http(auth={"tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE])}) as http:
        for path in ("/", "/version"):
            assert (await http.http.get(path)).status_code == 401
        for path in ("/tokenize", "/detokenize"):
            assert (await http.post(path)).status_code == 401
        http.http.headers["authorization"] = f"Bearer {ALICE}"
        assert (await http.http.get("/version")).json() == {"version": version("tandem-llm")}
        index = (await http.http.get("/")).json()
        assert index["model"] == "fake"
        assert {"/v1/chat/completions", "/tokenize", "/version"} <= set(index["paths"])


@pytest.mark.parametrize("origins", [(), ("https://chat.example",)])
async def test_scripts_of_web_pages_may_call_only_from_the_origins_given(
    run_http: RunHttp, origins: tuple[str, ...]
) -> None:
    async with run_http(http={"allowed_origins": origins}) as http:
        for origin in ("https://chat.example", "https://other.example"):
            wanted = origin if origin in origins else None
            asked = {"origin": origin, "access-control-request-method": "POST"}
            preflight = await http.http.options("/v1/completions", headers=asked)
            answer = await http.http.get("/v1/models", headers={"origin": origin})
            for response in (preflight, answer):
                assert response.headers.get("access-control-allow-origin") == wanted
            assert answer.status_code == 200
