"""How much CPU time grammars take in steps: of each request, of all together, and for outputs from elsewhere.

The clock is the test's: a token and a mask take what the test says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo

from engine import SamplingParams
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, TokensEvent
from engine.sampling import grammar_masks
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_masks import GrammarMasks
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import LogitsRow
from tests.engine.sampling.grammar_cores import END, grammar_checkpoint
from tests.tokenizer_builders import byte_level_backend
from tests.waiting import wait_until

VOCABULARY = [b"a", b"b", b""]
A, B, EOS = range(3)
COMPILER = GrammarCompiler(TokenizerInfo(VOCABULARY, stop_token_ids=[]), max_threads=1)
COMPILED = COMPILER.compile_regex("[ab]*")
CHEAP_S = 0.00001


class Clock:
    """The thread's CPU time. `cost_s` is that of a token at its position, counted from 1, and of the mask behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost_s: Callable[[int, int], float]) -> None:
        self.now_s = 0.0
        self.num_accepted = 0
        positions, last_s = Counter[int](), dict[int, float]()
        accept, fill = GrammarMatcher.accept_token, GrammarMatcher.fill_next_token_bitmask

        def accept_timed(matcher: GrammarMatcher, token_id: int) -> bool:
            positions[id(matcher)] += 1
            last_s[id(matcher)] = cost_s(token_id, positions[id(matcher)])
            self.now_s += last_s[id(matcher)]
            self.num_accepted += 1
            return accept(matcher, token_id)

        def fill_timed(matcher: GrammarMatcher, masks: Any, row: int) -> bool:
            self.now_s += last_s.get(id(matcher), 0.0)
            return fill(matcher, masks, row)

        monkeypatch.setattr(GrammarMatcher, "accept_token", accept_timed)
        monkeypatch.setattr(GrammarMatcher, "fill_next_token_bitmask", fill_timed)
        monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(thread_time=lambda: self.now_s))


def growing(token_id: int, position: int) -> float:
    """Each "a" takes more than the one before, as with an ambiguous grammar."""
    return 0.001 * position if token_id == A else CHEAP_S


def compiled(one: CompiledGrammar) -> Future[Grammar]:
    found = Future[Grammar]()
    found.set_result(Grammar(one, frozenset([EOS])))
    return found


def request(output_token_ids: list[int]) -> Request:
    spec = EngineRequest(
        request_id="r",
        prompt_token_ids=[EOS],
        output_token_ids=output_token_ids,
        params=SamplingParams(),
        eos_token_ids=(EOS,),
    )
    return Request.from_spec(spec, arrival=0, fingerprint="00", grammar=compiled(COMPILED))


def allowed(masks: GrammarMasks, requests: list[Request]) -> list[bool]:
    """Whether each may have a next token."""
    logits = torch.zeros(len(requests), len(VOCABULARY))
    masks.apply(logits, [LogitsRow(one) for one in requests])
    return logits.isfinite().any(dim=1).tolist()


def num_followed(masks: GrammarMasks, one: Request, token_ids: Iterator[int]) -> int:
    """How many of `token_ids`, sampled one after the other, are followed by another token."""
    num_tokens = 0
    for token_id in token_ids:
        one.token_ids.append(token_id)
        if not allowed(masks, [one])[0]:
            break
        num_tokens += 1
    return num_tokens


@pytest.mark.parametrize("is_resumed", [True, False])
def test_many_cheap_tokens_do_not_pay_for_expensive_ones(monkeypatch: pytest.MonkeyPatch, *, is_resumed: bool) -> None:
    """However many a client says that it has, or the engine has sampled."""
    Clock(monkeypatch, lambda token_id, _: 0.1 if token_id == A else CHEAP_S)
    masks, one, cheap = GrammarMasks(), request([B] * 20_000 if is_resumed else []), 0 if is_resumed else 1000
    assert allowed(masks, [one]) == [True]
    assert num_followed(masks, one, iter([B] * cheap)) == cheap
    assert num_followed(masks, one, iter([A] * 20)) == 2, "0.5 s, a token and its mask 0.2 s"


def test_a_long_output_from_elsewhere_takes_nothing_from_the_tokens_that_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch, lambda token_id, _: 0.1 if token_id == A else 0.00009)
    masks, one = GrammarMasks(), request([B] * 20_000)
    assert allowed(masks, [one]) == [True]
    assert num_followed(masks, one, iter([A] * 20)) == 2


def test_tokens_below_the_limit_fill_up_what_an_expensive_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda token_id, _: 0.1 if token_id == A else CHEAP_S)
    output = [A, *[B] * 45] * 20
    assert num_followed(GrammarMasks(), request([]), iter(output)) == len(output)


def test_looks_take_the_time_of_a_token_each_and_20_ms_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, masks = Clock(monkeypatch, lambda token_id, _: 0.004 if token_id == A else CHEAP_S), GrammarMasks()
    one = request([])
    assert masks.num_admitted(one, [B] * 40) == 40
    assert [masks.num_admitted(one, [B, A, B, A, B, B]) for _ in range(3)] == [4] * 3, "5 ms are over"
    num_accepted = clock.num_accepted
    assert masks.num_admitted(one, [B]) == 0
    assert clock.num_accepted == num_accepted
    rows = [LogitsRow(one), LogitsRow(one, [B])]
    assert masks.apply(torch.zeros(2, len(VOCABULARY)), rows) == set()
    assert masks.num_admitted(one, [B]) == 1, "the next step"
    rows = [
        row for other in (one, *(request([]) for _ in range(5))) for row in (LogitsRow(other), LogitsRow(other, [A]))
    ]
    unknown = masks.apply(torch.zeros(len(rows), len(VOCABULARY)), rows)
    assert unknown == {7, 9, 11}, "each takes 4 ms, and its mask as long"
    for _ in range(64):
        assert masks.num_admitted(request([]), [B]) == 0, "the rows of the last ones were computed for nothing"
        masks.apply(torch.zeros(1, len(VOCABULARY)), rows[:1])
    assert masks.num_admitted(request([]), [B]) == 1


def test_a_token_that_is_rejected_slowly_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda token_id, _: 0.006 if token_id == A else CHEAP_S)
    masks, one = GrammarMasks(), request([])
    one.grammar = compiled(COMPILER.compile_regex("b*"))
    assert masks.num_admitted(one, [B, A, B]) == 1
    assert masks.num_admitted(one, [B]) == 0


def test_a_grammar_that_takes_long_has_few_drafts_and_does_not_pay_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda token_id, _: 0.006 if token_id == A else CHEAP_S)
    masks, one = GrammarMasks(), request([])
    assert masks.num_admitted(one, [B, A, B]) == 2
    assert masks.num_admitted(one, [B]) == 0
    assert num_followed(masks, one, iter([B] * 64)) == 64
    assert masks.num_admitted(one, [B]) == 1
    Clock(monkeypatch, lambda token_id, _: 0.1 if token_id == A else CHEAP_S)
    assert masks.num_admitted(one, [A]) == 1
    assert num_followed(masks, one, iter([A] * 20)) == 2, "as without drafts"


def test_a_request_with_little_time_left_has_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda token_id, position: 0.1 if token_id == A and position == 1 else CHEAP_S)
    masks, one = GrammarMasks(), request([])
    one.token_ids.append(A)
    assert allowed(masks, [one]) == [True]
    assert masks.num_admitted(one, [B]) == 0
    assert num_followed(masks, one, iter([B] * 45)) == 45
    assert masks.num_admitted(one, [B]) == 1


def test_outputs_from_elsewhere_share_a_second_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with vLLM, which has no step in which they do not sample. What others take ends no honest one."""
    clock, masks = Clock(monkeypatch, growing), GrammarMasks()
    found = allowed(masks, [*(request([A] * 30) for _ in range(8)), request([B] * 1000)])
    assert found == [True] * 2 + [False] * 6 + [True], "each takes 0.46 s, and its mask 0.03 s"
    assert clock.now_s < 1.1


def test_masks_of_a_batch_take_no_longer_than_streams_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, masks = Clock(monkeypatch, growing), GrammarMasks()
    running, honest = [request([]) for _ in range(40)], request([])
    for _ in range(20):
        before_s = clock.now_s
        found = allowed(masks, [*running, honest])
        assert clock.now_s - before_s < 1.3, "1 s, and 5 ms for each token"
        assert found[-1]
        running = [one for one, is_allowed in zip(running, found, strict=False) if is_allowed]
        for one in running:
            one.token_ids.append(A)
        honest.token_ids.append(B)
    assert 0 < len(running) < 40


def test_outputs_from_elsewhere_are_followed_in_parts_and_the_longest_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, masks = Clock(monkeypatch, growing), GrammarMasks()
    long, short, endless = request([A] * 30), request([B] * 100), request([A] * 1000)
    assert masks.replay([long, endless], 0.05) == []
    assert clock.now_s < 0.07
    assert masks.replay([long, short, endless], 0.05) == [short]
    done = list[Request]()
    while len(done) < 2:
        before_s = clock.now_s
        done += masks.replay([one for one in (long, endless) if one not in done], 0.05)
        assert clock.now_s - before_s < 0.09
    assert (allowed(masks, [long]), allowed(masks, [endless])) == ([True], [False])


def test_requests_enter_when_their_outputs_from_elsewhere_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of further choices have a compiled grammar at once, and all come together."""
    core = EngineCore(
        EngineConfig(model=str(grammar_checkpoint(tmp_path)), dtype="float32", num_blocks=64), wake=lambda: None
    )
    letter: Any = byte_level_backend().token_to_id("a")
    params = SamplingParams(regex="a*", max_tokens=33, min_tokens=33)
    assert params.constraint is not None
    core._grammars.compiled(params.constraint).result(60)
    clock, num_in_steps, ended = Clock(monkeypatch, lambda *_: 0.001), list[int](), list[TokensEvent]()
    for number in range(7):
        spec = EngineRequest(
            request_id=str(number),
            prompt_token_ids=[5, 6],
            output_token_ids=[letter] * 30,
            params=params,
            eos_token_ids=(END,),
        )
        core.handle(AddRequest(spec))

    def all_ended() -> bool:
        num_before = clock.num_accepted
        events = [event for event in core.step() if isinstance(event, TokensEvent)]
        num_in_steps.append(clock.num_accepted - num_before)
        ended.extend(event for event in events if event.finish_reason is not None)
        assert not core.idle or len(ended) == 7
        return len(ended) == 7

    wait_until(all_ended, lambda: f"{len(ended)} of 7 ended", 60)
    core.shutdown()
    assert {event.finish_reason for event in ended} == {"length"}
    assert max(num_in_steps) <= 50 + 7, "50 ms, and one token of each stream"
    assert sum(num_in_steps) >= 7 * 32
