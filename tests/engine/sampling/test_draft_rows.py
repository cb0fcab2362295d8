"""Rows of drafts: biases, penalties and masks are those of a request that has the drafted tokens in its output."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from xgrammar import CompiledGrammar

from engine.core.messages import EngineRequest
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_masks import GrammarMasks
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import LogitAdjustments
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import LogitsRow
from tests.engine.sampling.test_penalties import VOCAB, random_params
from tests.engine.sampling.test_whitespace import END, LIMIT, REASONED, SCHEMAS, VOCABULARY, both

NUM_FOLLOWED = 12
WORDS = ((3,), (1, 2), (1, 1, 4), (2, 2, 2, 5), (1, 1, 1, 1, 1, 6), (2, 2, 2, 2, 2, 2, 7))


def request(output: list[int], grammar: CompiledGrammar | None = None, eos: int = END, **params: Any) -> Request:
    spec = EngineRequest(
        request_id="r",
        prompt_token_ids=[1],
        output_token_ids=output,
        params=SamplingParams(**params),
        eos_token_ids=(eos,),
    )
    if grammar is None:
        return Request.from_spec(spec, arrival=0, fingerprint="00")
    compiled = Future[Grammar]()
    compiled.set_result(Grammar(grammar, frozenset([END]), LIMIT))
    return Request.from_spec(spec, arrival=0, fingerprint="00", grammar=compiled)


def rows_of(one: Request, draft: list[int]) -> list[LogitsRow]:
    return [LogitsRow(one, draft[:place]) for place in range(len(draft) + 1)]


def test_adjustments_behind_drafted_tokens_are_those_behind_an_output() -> None:
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    for _ in range(300):
        few = range(1, rng.choice([2, 3, VOCAB]))
        output, draft = ([rng.choice(few) for _ in range(rng.randrange(8))] for _ in range(2))
        params = {**random_params(rng), "bad_word_ids": WORDS}
        one, changes = request(output, **params), LogitAdjustments()
        for _ in range(2):
            logits = torch.randn(len(draft) + 1, VOCAB, generator=generator)
            expected = logits.clone()
            changes.apply(logits, rows_of(one, draft))
            for place, row in enumerate(expected):
                LogitAdjustments().apply(row[None], [LogitsRow(request([*output, *draft[:place]], **params))])
            assert torch.equal(logits, expected)
            output.append(7)  # what was drafted did not come
            one.token_ids.append(7)


def test_a_draft_with_a_token_that_no_text_has_ends_before_it_without_a_line_in_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As the marks of turns, which a chat's prompt is full of: xgrammar would write each time."""
    one, masks = request([], both(SCHEMAS["any"], None)[0], eos=VOCABULARY.index(b"~")), GrammarMasks()
    brace = VOCABULARY.index(b"{")
    assert masks.num_admitted(one, [brace, END]) == 1
    assert masks.num_admitted(one, [END]) == 0
    assert masks.apply(torch.zeros(3, len(VOCABULARY)), rows_of(one, [brace, END])) == {2}
    assert capfd.readouterr() == ("", "")


def allowed(masks: GrammarMasks, rows: list[LogitsRow]) -> tuple[list[list[int]], set[int]]:
    """The tokens that may come in each row, and the rows for which that is unknown."""
    logits = torch.zeros(len(rows), len(VOCABULARY))
    unknown = masks.apply(logits, rows)
    return [row.isfinite().nonzero().flatten().tolist() for row in logits], unknown


def behind(one: Request, draft: list[int]) -> list[int]:
    """The tokens that may come if the draft is in the output."""
    assert one.grammar is not None
    output, params = one.token_ids[one.num_prompt_tokens :], one.spec.params
    again = request([*output, *draft], one.grammar.result().compiled, min_tokens=params.min_tokens)
    return allowed(GrammarMasks(), [LogitsRow(again)])[0][0]


def drafted(one: Request, source: random.Random) -> list[int]:
    """Up to five tokens that may follow, of which one may be wrong."""
    draft = list[int]()
    for _ in range(source.randrange(6)):
        draft.append(source.choice(behind(one, draft) or [END]))
    if draft and source.random() < 0.5:
        draft[source.randrange(len(draft))] = source.randrange(END + 1)
    return draft


@pytest.mark.parametrize("beginning", [b"", b"<c>", REASONED])
@pytest.mark.parametrize("name", ["plain", "enum", "union", "map"])
def test_masks_behind_drafted_tokens_are_those_behind_an_output(name: str, beginning: bytes) -> None:
    tag = {b"": None, b"<c>": "triggered_tags", REASONED: "reasoning"}[beginning]
    compiled, _ = both(SCHEMAS[name], tag)
    num_known = num_unknown = 0
    for seed in range(6):
        source, masks = random.Random(seed), GrammarMasks()
        one, free = request([], compiled, min_tokens=source.choice([0, len(beginning) + 5])), request([1])
        one.token_ids += [VOCABULARY.index(bytes([byte])) for byte in beginning]
        for _ in range(NUM_FOLLOWED):
            draft = drafted(one, source)
            num_admitted = masks.num_admitted(one, draft)
            [_, *found, last, last_drafted], unknown = allowed(
                masks, [LogitsRow(free), *rows_of(one, draft), *rows_of(free, [5])]
            )
            assert unknown == {1 + place for place in range(num_admitted + 1, len(draft) + 1)}
            assert len(last) == len(last_drafted) == len(VOCABULARY)
            assert found[: num_admitted + 1] == [behind(one, draft[:place]) for place in range(num_admitted + 1)]
            if num_admitted < len(draft):
                assert draft[num_admitted] not in found[num_admitted]
            num_known, num_unknown = num_known + num_admitted, num_unknown + len(unknown)
            if not (choices := [token_id for token_id in found[0] if token_id != END]):
                break
            one.token_ids.append(source.choice(choices))
    assert min(num_known, num_unknown) > 20
