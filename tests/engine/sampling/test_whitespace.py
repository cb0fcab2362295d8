"""The limit on white space between elements of JSON: the masks are those of a grammar in which xgrammar counts it."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo

from engine.core.messages import EngineRequest
from engine.sampling.constraints import MAX_WHITESPACE
from engine.sampling.grammar import Grammar, WhitespaceLimit
from engine.sampling.grammar_masks import _RequestGrammar
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import LogitsRow
from router.request.chat import ChatOutput
from tests.engine.sampling.schemas import STRING, check

BYTES = [bytes([one]) for one in range(256) if one >= 0x20 or one == 0x0A]
RUNS = [b" " * num for num in (2, 3, 8, 15, 16, 17, 30)] + [b"\n" + b" " * num for num in (1, 4, 15, 16, 20)]
MIXED = [b'": ', b", ", b",\n   ", b"{ ", b' "', b" a", b"  1", b"},   ", b"}," + b" " * 16, b"," + b" " * 20 + b'"']
WORDS = [b"ab", b"null", b"true ", b"12", b'",', b'":{', b"<c>{"]
VOCABULARY = [*BYTES, *RUNS, *MIXED, *WORDS, b""]
END = len(VOCABULARY) - 1
SPACE, LONGEST = VOCABULARY.index(b" "), VOCABULARY.index(b" " * 30)
COMPILER = GrammarCompiler(TokenizerInfo(VOCABULARY, stop_token_ids=[]), max_threads=1, cache_enabled=False)
LIMIT = WhitespaceLimit(VOCABULARY)
Masks = npt.NDArray[np.int32]


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": obj(a=STRING, b={"type": "integer"}, c={"type": "array", "items": {"type": "number"}}),
    "any": {"type": "object"},
    "lengths": obj(a={**STRING, "maxLength": 30}, b={**STRING, "minLength": 3}),
    "enum": obj(a={"enum": ["al pha", 3, None, {"x": [1, 2]}]}),
    "strings": obj(a={**STRING, "pattern": "^[a-z ]{2,50}$"}, b={**STRING, "format": "uri"}),
    "optional": {"type": "object", "properties": dict.fromkeys("abc", STRING)},
    "union": {"anyOf": [obj(k={"const": "u"}, v=STRING), {"type": "array", "maxItems": 3}]},
    "map": {"type": "object", "properties": {"a": STRING}, "additionalProperties": {"type": "integer"}},
}
TAGS = ["triggered_tags", "tags_with_separator"]
REASONED = b"<think>a </think>"


def tagged(schema: dict[str, Any], kind: str) -> str:
    """Free text around calls, calls alone, or an answer behind reasoning."""
    if kind == "reasoning":
        return str(ChatOutput(thinks=True).constrained(check(json_schema=json.dumps(schema))).structural_tag)
    tag = {"type": "tag", "begin": "<c>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</c>"}
    others = {"triggers": ["<c"]} if kind == "triggered_tags" else {"separator": "; "}
    return json.dumps({"type": "structural_tag", "format": {"type": kind, "tags": [tag], **others}})


def both(schema: dict[str, Any], tag: str | None) -> tuple[CompiledGrammar, CompiledGrammar]:
    """A grammar for the masks' limit, and one in which xgrammar counts."""
    params = check(json_schema=json.dumps(schema)) if tag is None else check(structural_tag=tagged(schema, tag))
    constraint = params.constraint
    assert constraint is not None
    assert constraint.limits_whitespace
    if tag is None:
        counting = COMPILER.compile_json_schema(constraint.source, max_whitespace_cnt=MAX_WHITESPACE)
        return COMPILER.compile_json_schema(constraint.source), counting
    parsed = json.loads(constraint.source)
    parts = parsed["format"]
    content = parts["elements"][1] if tag == "reasoning" else parts["tags"][0]["content"]
    content["max_whitespace_cnt"] = MAX_WHITESPACE
    return COMPILER.compile_structural_tag(constraint.source), COMPILER.compile_structural_tag(json.dumps(parsed))


class Output:
    """An output whose next tokens the masks decide."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        spec = EngineRequest(request_id="r", prompt_token_ids=[0], params=SamplingParams(), eos_token_ids=(END,))
        self.request = Request.from_spec(spec, arrival=0, fingerprint="00")
        grammar = Future[Grammar]()
        grammar.set_result(Grammar(compiled, frozenset([END]), LIMIT))
        self._grammar = _RequestGrammar(self.request, grammar)

    def mask(self) -> Masks:
        masks = np.zeros((1, -(-len(VOCABULARY) // 32)), np.int32)
        self._grammar.fill_mask(LogitsRow(self.request), masks, 0)
        return masks

    def write(self, text: bytes) -> None:
        self.request.token_ids += [VOCABULARY.index(bytes([one])) for one in text]


def allowed(mask: Masks) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(VOCABULARY)]
    return [int(one) for one in np.flatnonzero(bits)]


def drawn(mask: Masks, source: random.Random) -> int:
    """White space in half of all cases, what closes a value in a third."""
    ids, point = allowed(mask), source.random()
    spaces = [one for one in ids if VOCABULARY[one].isspace()]
    closing = [one for one in ids if VOCABULARY[one][:1] in (b'"', b"]", b"}", b",", b":", b"<")]
    return source.choice((spaces if point < 0.5 else closing if point < 0.8 else ids) or ids)


@pytest.mark.parametrize("tag", [None, "reasoning", *TAGS])
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_those_of_a_grammar_that_counts(name: str, tag: str | None) -> None:
    compiled, counting = both(SCHEMAS[name], tag)
    num_limited = 0
    for seed in range(4):
        source, output = random.Random(seed), Output(compiled)
        matcher = GrammarMatcher(counting, override_stop_tokens=[END])
        if tag == "reasoning":
            output.write(REASONED)
            assert matcher.accept_string(REASONED)
        for _ in range(100):
            mask, expected = output.mask(), np.zeros_like(output.mask())
            matcher.fill_next_token_bitmask(expected)
            text = b"".join(VOCABULARY[one] for one in output.request.token_ids[1:])
            assert allowed(mask) == allowed(expected), text
            num_limited += SPACE in allowed(mask) and LONGEST not in allowed(mask)
            if (token_id := drawn(mask, source)) == END:
                break
            assert matcher.accept_token(token_id)
            output.request.token_ids.append(token_id)
    assert num_limited > 5


def test_free_text_and_strings_have_any_white_space() -> None:
    texts = ((b'{"a":"', None), (b"", "triggered_tags"), (b'<c>{"a":"', "triggered_tags"), (b"<think>", "reasoning"))
    for text, tag in texts:
        output = Output(both(SCHEMAS["plain"], tag)[0])
        output.write(text + b" " * (MAX_WHITESPACE + 9))
        assert LONGEST in allowed(output.mask())


@pytest.mark.parametrize("length", range(6))
def test_at_most_four_spaces_and_lines_precede_an_answer_behind_reasoning(length: int) -> None:
    compiled, _ = both({"type": "object"}, "reasoning")
    for gap in itertools.product(b" \n", repeat=length):
        matcher = GrammarMatcher(compiled, override_stop_tokens=[END])
        assert matcher.accept_string(REASONED + bytes(gap) + b"{") == (length <= 4)


def test_the_white_space_of_a_regular_expression_beside_json_is_its_own() -> None:
    parts = [{"type": "json_schema", "json_schema": {"type": "array"}}, {"type": "regex", "pattern": r"[ \t\r\n]*"}]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    constraint = check(structural_tag=json.dumps(tag)).constraint
    assert constraint is not None
    assert not constraint.limits_whitespace
    matcher = GrammarMatcher(COMPILER.compile_structural_tag(constraint.source), override_stop_tokens=[END])
    assert not matcher.accept_string("[" + " " * (MAX_WHITESPACE + 1))
    assert matcher.accept_string("[" + " " * MAX_WHITESPACE + "]" + " " * 40)


@pytest.mark.parametrize("is_thinking", [False, True])
def test_behind_reasoning_the_grammar_and_the_parser_agree_where_the_answer_begins(is_thinking: bool) -> None:
    chat, answers = ChatOutput(thinks=True, is_thinking=is_thinking, is_exact=True), (" yes", "\n\nno")
    constraint = chat.constrained(check(choice=answers)).constraint
    assert constraint is not None
    compiled = COMPILER.compile_structural_tag(constraint.source)
    begin = "" if is_thinking else "<think>"
    for answer, gap in itertools.product(answers, ["", " ", "\n", "\n\n", "\n\n\n"]):
        text = f"{begin}Hm. </think>{gap}{answer}"
        matcher = GrammarMatcher(compiled, override_stop_tokens=[END])
        accepts = matcher.accept_string(text) and matcher.accept_token(END)
        assert accepts == (gap == "\n\n"), text
        if accepts:
            assert chat.parser(is_constrained=True).push(text, final=True).content == answer
