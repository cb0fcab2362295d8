"""The tokens of a response's parts: log-probabilities of a text's own tokens, and how many the reasoning has."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from engine.text.chat_output import HERMES
from engine.text.detokenizer import IncrementalDetokenizer
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.responses import TokenTexts
from router.api.openai.responses_api import ResponsesBuilder, ResponsesRequest
from router.request.chat import ChatDeltas, ChatOutput, Tools
from tests.router.api.openai.test_blocks import Sent
from tests.tokenizer_builders import byte_level

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
NAMED = '<tool_call>{"name": "f", "arguments": {"a": "漢字"}}</tool_call>'
THOUGHT = "<think>\nIs it 漢字?\n</think>"
TEXTS = {
    "reasoning": (f"{THOUGHT}\n\nYes, 漢字 it is.", ["Yes, 漢字 it is."]),
    "a call": (f"{THOUGHT}\n\n{CALL}\nThe best of times.", ["\nThe best of times."]),
    "both": (f"{THOUGHT}\n\nI look. \n{CALL}\n\nStop < it <tool", ["I look.", "\n\nStop < it <tool"]),
    "a call behind": (f"{THOUGHT}\n\nI look. \n{CALL}", ["I look."]),
    "calls behind": (f"{THOUGHT}\n\nI look. \n{CALL}\n{CALL}", ["I look."]),
    "a call alone": (f"I look. \n{CALL}", ["I look."]),
    "its words elsewhere": (f"{THOUGHT}\n\n漢字 {CALL}\n{NAMED}", ["漢字"]),
    "no call": (f"{THOUGHT}\n\n<tool_call>No.</tool_call>", ["<tool_call>No.</tool_call>"]),
    "a mark in it": (f"{THOUGHT}\n\nI use <tool_call> now. {CALL}", ["I use <tool_call> now."]),
    "a letter": (f"{THOUGHT}\n\na <tool_call", ["a <tool_call"]),
    "no thought": ("<think>\n\n</think>\n\nYes, it is.", ["Yes, it is."]),
    "nothing": ("  Yes. \n\nIt is.", ["  Yes. \n\nIt is."]),
}
EACH = pytest.mark.parametrize(("text", "parts"), TEXTS.values(), ids=TEXTS)
SOME, WHOLE = [1, 2, 3, 7, 20], 1000


async def answered(text: str, num_at_once: int) -> dict[str, Any]:
    """The response to a request for log-probabilities, whose messages have so many tokens each."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    asked = {"input": "x", "tools": [tool], "include": ["message.output_text.logprobs"]}
    body = ResponsesRequest.parse(json.dumps(asked).encode())
    sent: Any = Sent()
    builder = ResponsesBuilder(sent, body, "m", TokenTexts(byte_level()))
    output = ChatOutput(Tools.of(body.requests("l")[0].chat, HERMES), thinks=True)
    deltas = ChatDeltas("r", output, is_constrained=False)
    detokenizer = IncrementalDetokenizer(byte_level())
    call: Any = SimpleNamespace(trace=SimpleNamespace(trailers=tuple))
    all_ids = byte_level().encode(text)
    groups = [all_ids[at : at + num_at_once] for at in range(0, len(all_ids), num_at_once)]
    for number, ids in enumerate(groups, 1):
        chunk = common_pb2.TokenChunk(token_ids=ids, text=detokenizer.push(ids))
        for token_id in ids:
            chunk.logprobs.add().candidates.add(token_id=token_id, logprob=-1.0, rank=1)
        if number == len(groups):
            chunk.finish.reason = common_pb2.FINISH_REASON_STOP
        message = generation_pb2.GenerateResponse(tokens=chunk, delta=deltas.of(chunk))
        if number == 1:
            message.prompt_tokens = 5
        await builder.add(0, call, message)
    await builder.finish({})
    whole: dict[str, Any] = sent.body
    return whole


def covered(text: str, logprobs: list[dict[str, Any]]) -> bool:
    """Whether these are the tokens of `text`, the first and the last of which may be longer."""
    data = [bytes(entry["bytes"]) for entry in logprobs]
    at = b"".join(data).find(text.encode())
    behind = len(b"".join(data)) - at - len(text.encode())
    return 0 <= at < len(data[0]) and behind < len(data[-1])


@EACH
@pytest.mark.parametrize("num_at_once", SOME)
async def test_logprobs_of_a_text_are_those_of_its_own_tokens(text: str, parts: list[str], num_at_once: int) -> None:
    await check_logprobs(text, parts, num_at_once)


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "both"])
async def test_logprobs_are_found_in_one_message_with_all(name: str) -> None:
    await check_logprobs(*TEXTS[name], WHOLE)


async def check_logprobs(text: str, parts: list[str], num_at_once: int) -> None:
    response = await answered(text, num_at_once)
    found = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    assert [part["text"] for part in found] == parts
    for part in found:
        assert covered(part["text"], part["logprobs"]), [entry["token"] for entry in part["logprobs"]]


@EACH
@pytest.mark.parametrize("num_at_once", [*SOME, WHOLE])
async def test_reasoning_ends_with_its_mark(text: str, parts: list[str], num_at_once: int) -> None:
    usage = (await answered(text, num_at_once))["usage"]
    expected = len(byte_level().encode(THOUGHT)) if text.startswith(THOUGHT) else 0
    assert usage["output_tokens_details"]["reasoning_tokens"] == expected
