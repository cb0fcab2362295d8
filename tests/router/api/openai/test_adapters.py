"""LoRA adapters as models of the HTTP port: listed, named by `model`, and named in the answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.rig import SHORT

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SHORT, "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/messages": CHAT,
}


@pytest.fixture
async def http(run_http: RunHttp) -> AsyncIterator[HttpRig]:
    """One decode instance has adapters, another one none."""
    decode = [FakeInstance("decode", "plain"), FakeInstance("decode", "poet")]
    decode[1].behaviour.lora_adapters, decode[1].behaviour.num_running = ["poet", "clerk"], 9
    async with run_http(prefill=0, decode=decode) as http:
        yield http


async def test_adapters_are_listed_behind_the_model_they_belong_to(http: HttpRig) -> None:
    base, *adapters = (await http.http.get("/v1/models")).json()["data"]
    assert set(base) == {"id", "object", "created", "owned_by", "max_model_len"}
    assert base["id"] == "fake"
    assert adapters == [{**base, "id": name, "root": name, "parent": "fake"} for name in ("clerk", "poet")]
    assert (await http.http.get("/v1/models/poet")).json() == adapters[1]
    unknown = await http.http.get("/v1/models/mine")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "model: 'mine' is not served; served: 'fake', 'clerk', 'poet'"


async def test_the_instances_are_looked_through_once_for_all_adapters(
    http: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of many adapters would hold up every stream."""
    looks = Mock(wraps=http.rig.app.service.limits)
    monkeypatch.setattr(http.rig.app.service, "limits", looks)
    assert len((await http.http.get("/v1/models")).json()["data"]) == 3
    assert looks.call_count == 1


@pytest.mark.parametrize("path", ASKED)
async def test_an_answer_is_the_adapter_s_that_the_request_names_as_its_model(http: HttpRig, path: str) -> None:
    answer = await http.post(path, model="poet", **ASKED[path])
    assert answer.json()["model"] == "poet", answer.text
    assert [one.detail.request.lora for one in http.rig.decode[1].recorded("decode")] == ["poet"]
    assert (await http.post(path, **ASKED[path])).json()["model"] == "fake"
    assert [one.detail.request.lora for one in http.rig.decode[0].recorded("decode")] == [""]


@pytest.mark.parametrize("path", ASKED)
async def test_the_events_of_a_stream_name_the_adapter(http: HttpRig, path: str) -> None:
    answer = await http.post(path, model="poet", stream=True, **ASKED[path])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    within = [event.get("message") or event.get("response") or event for event in events]
    assert {one["model"] for one in within if "model" in one} == {"poet"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": SHORT}), ("/v1/messages/count_tokens", CHAT)],
)
async def test_prompts_are_counted_for_an_adapter_as_for_the_model(
    http: HttpRig, path: str, body: dict[str, Any]
) -> None:
    body = {name: value for name, value in body.items() if name != "max_tokens"}
    of_adapter, of_model = await http.post(path, model="poet", **body), await http.post(path, model="fake", **body)
    assert (of_adapter.status_code, of_adapter.content) == (200, of_model.content)
    assert (await http.post(path, model="mine", **body)).status_code == 404
