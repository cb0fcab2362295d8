"""The blocks of an answer, however its text is divided into messages, and the tokens of each."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from engine.text.chat_output import HARMONY, HERMES
from engine.text.detokenizer import IncrementalDetokenizer
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.messages_api import MessagesBuilder, MessagesRequest
from router.api.openai.responses import TokenTexts
from router.api.openai.responses_api import ResponsesBuilder, ResponsesRequest
from router.request.chat import ChatDeltas, ChatOutput, Tools
from tests.tokenizer_builders import byte_level

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


def messages(
    pieces: Sequence[str], tools: generation_pb2.Chat, *, has_channels: bool = False
) -> list[generation_pb2.GenerateResponse]:
    output = ChatOutput(Tools.of(tools, HARMONY if has_channels else HERMES), has_channels=has_channels)
    deltas = ChatDeltas("r", output, is_constrained=False)
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


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_a_text_ends_before_the_reasoning_that_follows_in_one_message(api: str) -> None:
    call: Any = SimpleNamespace(trace=SimpleNamespace(trailers=tuple))
    builder, chat, sent = builder_of(api, stream=False)
    pieces = [
        "<|channel|>commentary<|message|>I lo",
        "ok.<|end|><|start|>assistant<|channel|>analysis<|message|>Two",
        " threes.<|end|><|start|>assistant<|channel|>final<|message|>Six",
    ]
    for message in messages(pieces, chat, has_channels=True):
        await builder.add(0, call, message)
    await builder.finish({})
    if api == "messages":
        parts = [block.get("thinking") or block["text"] for block in sent.body["content"]]
    else:
        parts = [item["content"][0]["text"] for item in sent.body["output"]]
    assert parts == ["I look.", "Two threes.", "\nSix"]


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
IN_CHANNEL, NEXT = "<|channel|>analysis<|message|>Is it 漢字?<|end|>", "<|start|>assistant"
FINAL, PREAMBLE = f"{NEXT}<|channel|>final<|message|>", f"{NEXT}<|channel|>commentary<|message|>I look.<|end|>"
IN_CHANNELS = {
    "reasoning in a channel": (f"{IN_CHANNEL}{FINAL}Yes, 漢字 it is.", ["Yes, 漢字 it is."]),
    "words of a head": (f"{IN_CHANNEL}{FINAL}final it is.", ["final it is."]),
    "a part of a head": (f"{IN_CHANNEL}{FINAL}an answer", ["an answer"]),
    "words of the reasoning": (f"{IN_CHANNEL}{FINAL}Is it 漢字? Yes.", ["Is it 漢字? Yes."]),
    "a call in a channel": (
        f'{IN_CHANNEL}{PREAMBLE}{NEXT}<|channel|>commentary to=functions.f<|message|>{{"a": 1}}<|call|>',
        ["I look."],
    ),
    "no reasoning": ("<|channel|>final<|message|>an answer", ["an answer"]),
}
TEXTS |= IN_CHANNELS
EACH = pytest.mark.parametrize(("text", "parts"), TEXTS.values(), ids=TEXTS)
SOME, WHOLE = [1, 2, 3, 7, 20], 1000


async def answered(text: str, num_at_once: int) -> dict[str, Any]:
    """The response to a request for log-probabilities, whose messages have so many tokens each."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    asked = {"input": "x", "tools": [tool], "include": ["message.output_text.logprobs"]}
    body = ResponsesRequest.parse(json.dumps(asked).encode())
    sent: Any = Sent()
    builder = ResponsesBuilder(sent, body, "m", TokenTexts(byte_level()))
    form = HARMONY if "<|channel|>" in text else HERMES
    tools, has_channels = Tools.of(body.requests("l")[0].chat, form), form is HARMONY
    output = ChatOutput(tools, thinks=not has_channels, has_channels=has_channels)
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
    thought = next((one for one in (THOUGHT, IN_CHANNEL) if text.startswith(one)), "")
    assert usage["output_tokens_details"]["reasoning_tokens"] == len(byte_level().encode(thought))


@pytest.mark.parametrize("num_at_once", [1, 2, 3, 7])
async def test_reasoning_behind_a_text_is_counted_without_the_text(num_at_once: int) -> None:
    preamble = PREAMBLE.replace("I look.", "The best of times. " * 20)
    response = await answered(f"{IN_CHANNEL}{preamble}{NEXT}{IN_CHANNEL}{FINAL}an answer", num_at_once)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "reasoning", "message"]
    thoughts = 2 * len(byte_level().encode(IN_CHANNEL))
    counted = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert abs(counted - thoughts) <= len(byte_level().encode(IN_CHANNEL[: IN_CHANNEL.index("Is")])) + num_at_once
