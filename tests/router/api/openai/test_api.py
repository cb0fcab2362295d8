"""Paths and methods of the HTTP port; /tokenize and /detokenize; /version and /; and which web pages may call."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.openai.test_tools import WEATHER
from tests.router.api.test_security import ALICE, write_tokens

GET = (
    "/v1/models",
    "/v1/models/fake",
    "/v1/models/other",
    "/health",
    "/version",
    "/",
    "/openapi.json",
    "/page/page.css",
)


async def test_head_is_get_without_the_body(run_http: RunHttp) -> None:
    async with run_http(http={"page": True}) as http:
        for path in (*GET, "/metrics"):
            whole, head = await http.http.get(path), await http.http.head(path)
            assert head.status_code == whole.status_code, path
            assert head.content == b""
            assert head.headers["content-type"] == whole.headers["content-type"]
            if path != "/metrics":  # whose numbers change
                assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))


async def test_head_of_a_stream_ends(run_http: RunHttp) -> None:
    async with run_http(http={"page": True}) as http:
        for _ in range(2):  # the connection is kept
            head = await http.http.head("/live")
            assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_head_of_a_router_without_instances_says_so(run_http: RunHttp) -> None:
    async with run_http(prefill=0, decode=0) as http:
        head = await http.http.head("/health")
        assert (head.status_code, head.headers["retry-after"]) == (503, "1")


async def test_head_needs_the_token_that_get_needs(run_http: RunHttp, tmp_path: Path) -> None:
    async with run_http(auth={"tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE])}) as http:
        assert (await http.http.head("/v1/models")).status_code == 401
        assert (await http.http.head("/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/fake", {"GET", "HEAD"}),
        ("PUT", "/health", {"GET", "HEAD"}),
        ("POST", "/live", {"GET", "HEAD"}),
        ("HEAD", "/v1/chat/completions", {"POST"}),
        ("OPTIONS", "/v1/messages", {"POST"}),
    ],
)
async def test_another_method_is_answered_with_those_allowed(
    run_http: RunHttp, method: str, path: str, allowed: set[str]
) -> None:
    async with run_http(http={"page": True}) as http:
        answer = await http.http.request(method, path)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == allowed


async def test_a_slash_at_the_end_of_a_path_changes_nothing(run_http: RunHttp) -> None:
    """A redirect would name this port's own scheme, which is not that of a proxy in front of it."""
    async with run_http(http={"page": True}) as http:
        for path in ("/health", "/v1/models", "/v1/models/fake", "/v1/models/other", "/page/page.css", "/v1/unknown"):
            plain, slashed = await http.http.get(path), await http.http.get(f"{path}/")
            assert (slashed.status_code, slashed.content) == (plain.status_code, plain.content), path
        assert (await http.http.get("//")).status_code == 200
        answer = await http.post("/v1/completions/", prompt="hi", max_tokens=2)
        assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")


async def test_a_slash_at_the_end_of_a_path_passes_no_authorizer(run_http: RunHttp, tmp_path: Path) -> None:
    async with run_http(auth={"tokens_file": write_tokens(tmp_path / "tokens", alice=[ALICE])}) as http:
        assert (await http.post("/v1/completions/", prompt="hi", max_tokens=2)).status_code == 401


async def test_the_schema_has_get_alone(run_http: RunHttp) -> None:
    async with run_http() as http:
        paths = (await http.http.get("/openapi.json")).json()["paths"]
        assert {"/v1/models", "/health"} <= set(paths)
        assert all(len(methods) == 1 and "head" not in methods for methods in paths.values())


async def test_the_schema_is_the_same_with_the_live_page(run_http: RunHttp) -> None:
    async with run_http(http={"page": True}) as http:
        with_page = (await http.http.get("/openapi.json")).json()
        for method, path in (("GET", "/page/page.js"), ("POST", "/pools/resize"), ("POST", "/pools/drain")):
            assert (await http.http.request(method, path)).status_code != 404, f"{path} is not there"
    async with run_http() as http:
        assert with_page == (await http.http.get("/openapi.json")).json()


async def test_a_script_of_an_allowed_origin_may_use_head(run_http: RunHttp) -> None:
    origin = "https://chat.example"
    async with run_http(http={"allowed_origins": (origin,)}) as http:
        asked = {
            "origin": origin,
            "access-control-request-method": "HEAD",
            "access-control-request-headers": "authorization",
        }
        assert (await http.http.options("/v1/models", headers=asked)).status_code == 200


@pytest.mark.parametrize("origins", [("https://chat.example",), ("*",)])
async def test_a_script_of_an_allowed_origin_may_read_all_headers(run_http: RunHttp, origins: tuple[str, ...]) -> None:
    """Without credentials, which the port does not allow, `*` is every header."""
    async with run_http(http={"allowed_origins": origins}) as http:
        answer = await http.http.get("/v1/models", headers={"origin": "https://chat.example"})
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


async def test_a_script_of_an_allowed_origin_may_call_from_a_public_page(run_http: RunHttp) -> None:
    """Chrome asks before a public page calls a private network."""
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    async with run_http(http={"allowed_origins": ("https://chat.example",)}) as http:
        allowed = await http.http.options("/v1/completions", headers={"origin": "https://chat.example", **asked})
        assert (allowed.status_code, allowed.headers["access-control-allow-private-network"]) == (200, "true")
        other = await http.http.options("/v1/completions", headers={"origin": "https://other.example", **asked})
        assert other.status_code == 400


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
