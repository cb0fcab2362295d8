"""The blocks of an answer, however its text is divided into messages."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from engine.text.chat_output import HERMES
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.messages_api import MessagesBuilder, MessagesRequest
from router.api.openai.responses import TokenTexts
from router.api.openai.responses_api import ResponsesBuilder, ResponsesRequest
from router.request.chat import ChatDeltas, ChatOutput, Tools

ARGUMENTS, REST = '{"a": "Rio"}', "\nI look."
TEXT = f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>{REST}'


class Sent:
    """What a builder sends, in place of an exchange."""

    answer_id, num_events = "r", 0

    def __init__(self) -> None:
        self.body: Any = None
        self.events: list[Any] = []
        self.parts: dict[int, str] = defaultdict(str)
        """By the index of their block."""

    async def begin_events(self, headers: dict[str, str]) -> None:
        pass

    async def send_event(self, data: bytes, name: str = "") -> None:
        event = json.loads(data)
        self.events.append(event)
        if name == "content_block_delta":
            delta = event["delta"]
            self.parts[event["index"]] += delta["text"] if delta["type"] == "text_delta" else delta["partial_json"]
        elif name.endswith(".delta"):
            self.parts[event["output_index"]] += event["delta"]

    async def end_events(self, mark: bytes | None = None) -> None:
        pass

    async def send_json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self.body = content


def messages(pieces: Sequence[str], tools: generation_pb2.Chat) -> list[generation_pb2.GenerateResponse]:
    deltas = ChatDeltas("r", ChatOutput(Tools.of(tools, HERMES)), is_constrained=False)
    made = [
        generation_pb2.GenerateResponse(tokens=common_pb2.TokenChunk(token_ids=[1], text=piece, token_index=index))
        for index, piece in enumerate(pieces)
    ]
    made[0].prompt_tokens = 5
    made[-1].tokens.finish.reason = common_pb2.FINISH_REASON_STOP
    for one in made:
        one.delta.CopyFrom(deltas.of(one.tokens))
    return made


def builder_of(api: str, stream: bool) -> tuple[Any, generation_pb2.Chat, Sent]:
    sent: Any = Sent()
    if api == "messages":
        tool: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
        user = {"role": "user", "content": "x"}
        asked: dict[str, Any] = {"messages": [user], "max_tokens": 100, "tools": [tool], "stream": stream}
        body = MessagesRequest.parse(json.dumps(asked).encode())
        return MessagesBuilder(sent, body, "m"), body.requests("l")[0].chat, sent
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    responses = ResponsesRequest.parse(json.dumps({"input": "x", "tools": [tool], "stream": stream}).encode())
    return ResponsesBuilder(sent, responses, "m", TokenTexts(None)), responses.requests("l")[0].chat, sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_arguments_stay_with_their_call_when_text_follows_in_one_message(api: str, stream: bool) -> None:
    call: Any = SimpleNamespace(trace=SimpleNamespace(trailers=tuple))
    begin = TEXT.index(ARGUMENTS) + 1
    for first, second in product(range(begin, begin + len(ARGUMENTS) - 1), range(begin, len(TEXT))):
        if first >= second:
            continue
        builder, chat, sent = builder_of(api, stream)
        for message in messages([TEXT[:first], TEXT[first:second], TEXT[second:]], chat):
            await builder.add(0, call, message)
        await builder.finish({})
        if stream:
            parts = [sent.parts[index] for index in sorted(sent.parts)]
        elif api == "messages":
            parts = [block.get("text") or json.dumps(block["input"]) for block in sent.body["content"]]
        else:
            parts = [item.get("arguments") or item["content"][0]["text"] for item in sent.body["output"]]
        assert parts == [ARGUMENTS, REST], (first, second)
