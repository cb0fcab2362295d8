"""Constraints through the engine: the output satisfies them, however its tokens are computed."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import msgspec
import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, TokensEvent
from engine.errors import InvalidRequest
from engine.llm import CompletionOutput
from engine.sampling import grammar_masks
from engine.sampling.constraints import Constraint, has_xgrammar
from engine.sampling.grammar import GrammarCompiler, _Library
from tests.builders import lively_checkpoint
from tests.engine.sampling.grammar_cores import END, gathered, grammar_checkpoint
from tests.oracle import random_prompts
from tests.tokenizer_builders import byte_level_backend
from tests.waiting import wait_until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
EBNF = 'root ::= item ("," item)*\nitem ::= [a-c]{1,3} | "(" item ")"'
CALLS = {
    "type": "tags_with_separator",
    "tags": [{"type": "tag", "begin": " call(", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": ")"}],
    "separator": "",
    "at_least_one": True,
}
CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json_schema": ({"json_schema": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) or True),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": r"[a-z]{2,5}@[a-z]{1,4}\.(com|org)"}, lambda text: re.fullmatch(r"\w+@\w+\.(com|org)", text)),
    "choice": ({"choice": ["first", "second one", "third"]}, lambda text: text in ("first", "second one", "third")),
    "structural_tag": (
        {"structural_tag": {"type": "structural_tag", "format": CALLS}},
        lambda text: [jsonschema.validate(json.loads(call), SCHEMA) for call in text[6:-1].split(") call(")] or False,
    ),
    "grammar": ({"grammar": EBNF}, lambda text: text.count("(") == text.count(")") and set(text) <= set("abc,()")),
}
MAX_TOKENS = 120
NUM_PROMPTS = 15
UNCONSTRAINED: dict[str, Any] = {"ignore_eos": True, "min_tokens": 5}


def params_for(index: int) -> SamplingParams:
    """Each kind, greedy and sampled, some with penalties and log-probabilities; each seventh has no constraint."""
    constraints = [fields for fields, _ in CONSTRAINTS.values()]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "logprobs": 2},
        {"temperature": 1.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 4},
    ]
    constraint = UNCONSTRAINED if index % 7 == 6 else constraints[index % 7]
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": index, **ways[index % len(ways)], **constraint})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grammar_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(NUM_PROMPTS, longest=60, vocab_size=360, seed=7)


def make_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, **{"dtype": "float32", "num_gpu_blocks_override": 512, **options})


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


@pytest.fixture(scope="module")
def together(llm: LLM, prompts: list[list[int]]) -> list[CompletionOutput]:
    """All prompts in one batch."""
    return run(llm, prompts)


def run(llm: LLM, prompts: list[list[int]]) -> list[CompletionOutput]:
    answers = llm.generate(prompts, [params_for(index) for index in range(len(prompts))], use_tqdm=False)
    return [answer.outputs[0] for answer in answers]


def generate(llm: LLM, **fields: Any) -> CompletionOutput:
    [answer] = llm.generate("Once upon", SamplingParams(**{"max_tokens": MAX_TOKENS, **fields}), use_tqdm=False)
    return answer.outputs[0]


def ranks(output: CompletionOutput) -> list[dict[int, int | None]]:
    return [{one: entry.rank for one, entry in entries.items()} for entries in output.logprobs or []]


# What comes out


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_finished_output_satisfies_its_constraint(llm: LLM, kind: str, temperature: float) -> None:
    fields, is_satisfied = CONSTRAINTS[kind]
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, n=4 if temperature else 1, seed=3, **fields)
    [answer] = llm.generate("Once upon", params, use_tqdm=False)
    finished = [output.text for output in answer.outputs if output.finish_reason == "stop"]
    assert all(is_satisfied(text) for text in finished)
    assert finished or kind in ("json_object", "grammar") or not temperature, "endless ones end by length"
    assert len({output.text for output in answer.outputs}) > 1 or not temperature or kind == "choice"


def test_every_token_with_text_may_be_part_of_an_output(llm: LLM) -> None:
    """The first of a vocabulary, too: an exclamation mark, in the usual byte-level ones."""
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode([0]) == "!"
    assert generate(llm, choice=["!!"]).token_ids[:2] == [0, 0]


def test_without_xgrammar_a_constraint_is_rejected_with_what_to_type(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    library = _Library(Path(), 100)
    with pytest.raises(InvalidRequest, match=r"pip install .*structured-output"):
        library.compile(Constraint("regex", "a"))
    assert not has_xgrammar()


def test_max_tokens_ends_an_output_in_the_middle_with_length(llm: LLM) -> None:
    output = generate(llm, json_schema=SCHEMA, max_tokens=5)
    assert output.finish_reason == "length"
    assert output.text.startswith("{")


def test_the_end_comes_only_where_the_grammar_can_end(llm: LLM) -> None:
    """However much the model prefers to end."""
    output = generate(llm, regex="[ab]{7}", logit_bias={END: 100.0})
    assert (output.finish_reason, len(output.text)) == ("stop", 7)


def test_min_tokens_delays_the_end_while_the_grammar_allows_another_token(llm: LLM) -> None:
    assert len(generate(llm, regex="[ab]*", min_tokens=9, logit_bias={END: 100.0}).token_ids) >= 9
    short = generate(llm, choice=["ab"], min_tokens=9)
    assert (short.text, short.finish_reason) == ("ab", "stop"), "an end of the grammar is an end"


def test_stop_strings_and_stop_tokens_end_the_output_as_without_a_constraint(llm: LLM) -> None:
    assert llm.tokenizer is not None
    [comma] = llm.tokenizer.encode(",", add_special_tokens=False)
    cut = generate(llm, regex="abc,def", stop=["c,"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("ab", "stop", "c,")
    by_token = generate(llm, regex="abc,def", stop_token_ids=[comma])
    assert (by_token.text, by_token.stop_reason) == ("abc", comma)
    # a stop token without text is an end of the grammar like EOS
    special = llm.tokenizer.token_id("<|endoftext|>")
    ended = generate(llm, regex="abc", stop_token_ids=[special], logit_bias={special: 100.0})
    assert (ended.text, ended.stop_reason) == ("abc", special)


@pytest.mark.parametrize("is_eos", [True, False])
def test_an_end_with_text_is_no_part_of_an_output(checkpoint: Path, *, is_eos: bool) -> None:
    """A model's EOS that its tokenizer does not list as special; and the stop tokens of a model without EOS."""
    backend = byte_level_backend()
    letter, end = (backend.get_vocab()[token] for token in "a!")
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=64), wake=lambda: None)
    spec = EngineRequest(
        request_id="r",
        prompt_token_ids=[5, 6],
        params=SamplingParams(
            regex="[a!]{7}",
            max_tokens=20,
            logit_bias={end: 100.0},
            stop_token_ids=() if is_eos else (end,),
        ),
        eos_token_ids=(end,) if is_eos else (),
    )
    core.handle(AddRequest(spec))
    assert gathered(core, 1) == {"r": [letter] * 7 + [end]}
    core.shutdown()


def test_logprobs_are_those_of_the_raw_logits(llm: LLM) -> None:
    output = generate(llm, choice=["first", "second"], logprobs=3, temperature=0.0)
    raw = generate(llm, allowed_token_ids=[output.token_ids[0]], logprobs=3, max_tokens=1, temperature=0.0)
    assert output.logprobs is not None
    assert raw.logprobs is not None
    assert output.logprobs[0] == raw.logprobs[0]
    assert len(output.logprobs) == len(output.token_ids)


def test_parameters_and_a_constraint_that_exclude_every_token_end_their_request_alone(llm: LLM) -> None:
    failed = generate(llm, choice=["ab"], allowed_token_ids=[300])
    assert failed.finish_reason == "error"
    assert re.search("allowed_token_ids.* and the constraint exclude every token", str(failed.error))
    assert generate(llm, choice=["ab"]).text == "ab"


def test_a_constraint_that_cannot_be_compiled_says_why(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match='Rule "foo" is not defined'):
        generate(llm, grammar="root ::= foo")
    assert generate(llm, choice=["ab"]).text == "ab"


def test_a_grammar_without_texts_ends_its_request_alone(llm: LLM) -> None:
    """Row 57."""
    for empty in ("root ::= root", "root ::= one\none ::= root"):
        failed = generate(llm, grammar=empty)
        assert failed.finish_reason == "error"
        assert "exclude every token" in str(failed.error)
    endless = generate(llm, grammar='root ::= "a" root', max_tokens=9)
    assert (endless.finish_reason, set(endless.text)) == ("length", {"a"})
    assert generate(llm, grammar='root ::= root "a" | "b"').text.rstrip("a") == "b", "left recursion"


def test_a_grammar_that_takes_ever_more_time_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 45 and 57: the time of a token grows with the square of its position."""
    monkeypatch.setattr(grammar_masks, "_FREE_S", 0.02)
    monkeypatch.setattr(grammar_masks, "_TOKEN_S", 0.0001)
    for ambiguous in ({"grammar": 'root ::= root root | "a" | ""'}, {"regex": "((a*)*)*"}):
        failed = generate(llm, min_tokens=400, max_tokens=400, **ambiguous)
        assert failed.finish_reason == "error"
        assert "the constraint is too ambiguous to be followed in time" in str(failed.error)
    assert generate(llm, choice=["ab"]).text == "ab"


def test_an_output_from_elsewhere_holds_the_steps_no_longer(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes at once, and a client may have made it up: 400 tokens of this one take ten seconds."""
    monkeypatch.setattr(grammar_masks, "_FREE_S", 0.02)
    letter: Any = byte_level_backend().token_to_id("a")
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=1024), wake=lambda: None)
    spec = EngineRequest(
        request_id="slow",
        prompt_token_ids=[5, 6],
        output_token_ids=[letter] * 400,
        params=SamplingParams(regex="((a*)*)*", max_tokens=500, seed=1),
        seed=1,
        eos_token_ids=(END,),
    )
    core.handle(AddRequest(spec))
    longest_s, events = 0.0, list[Any]()

    def ended() -> bool:
        nonlocal longest_s
        begun_s = time.thread_time()
        events.extend(core.step())
        longest_s = max(longest_s, time.thread_time() - begun_s)
        return bool(events)

    wait_until(ended, lambda: "it has not ended", 60)
    core.shutdown()
    assert (events[0].finish_reason, events[0].error_kind) == ("error", "nothing_allowed")
    assert longest_s < 4


def test_an_output_from_elsewhere_that_has_ended_ends_its_request_alone(checkpoint: Path) -> None:
    """A client may send any ids as those that it has."""
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=64), wake=lambda: None)
    letter: Any = byte_level_backend().token_to_id("a")
    for request_id, output in (("ended", [letter, letter, END]), ("runs", [letter, letter])):
        spec = EngineRequest(
            request_id=request_id,
            prompt_token_ids=[5, 6],
            output_token_ids=output,
            params=SamplingParams(regex="(aa)+", max_tokens=20),
            eos_token_ids=(END,),
        )
        core.handle(AddRequest(spec))
    ends: dict[str, TokensEvent] = {}

    def ended() -> bool:
        events = [event for event in core.step() if isinstance(event, TokensEvent)]
        ends.update({event.request_id: event for event in events if event.finish_reason is not None})
        return len(ends) == 2

    wait_until(ended, lambda: f"only {sorted(ends)} ended", 60)
    core.shutdown()
    assert ends["ended"].error_kind == "nothing_allowed"
    assert ends["runs"].error_kind is None


def test_an_xgrammar_that_cannot_be_loaded_rejects_every_constraint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xgrammar.py").write_text('raise ImportError("libfoo.so: cannot open shared object file")')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("os.setpriority", Mock(side_effect=PermissionError))  # as in some sandboxes
    compiler = GrammarCompiler(checkpoint, 300, wake=lambda: None)
    for pattern in ("a", "b", "c"):
        error = compiler.compiled(Constraint("regex", pattern)).exception(60)
        assert isinstance(error, InvalidRequest)
        assert "xgrammar fails: libfoo.so: cannot open" in str(error)
        (tmp_path / "xgrammar.py").write_text("raise SystemExit")  # it is not tried again
    compiler.shutdown()


def test_a_model_without_a_tokenizer_has_no_constraints(tmp_path: Path) -> None:
    llm = LLM(lively_checkpoint(tmp_path), num_gpu_blocks_override=64, skip_tokenizer_init=True)
    with pytest.raises(InvalidRequest, match="requires a tokenizer whose tokens have bytes"):
        llm.generate([[5, 6]], SamplingParams(regex="a"), use_tqdm=False)


# The same on every path


def test_a_batch_gives_what_each_gives_alone(
    llm: LLM, prompts: list[list[int]], together: list[CompletionOutput]
) -> None:
    assert {output.finish_reason for output in together} == {"stop", "length"}
    for index in range(0, NUM_PROMPTS, 2):
        [alone] = llm.generate([prompts[index]], params_for(index), use_tqdm=False)  # prefix-cached, too
        assert alone.outputs[0].token_ids == together[index].token_ids
        assert ranks(alone.outputs[0]) == ranks(together[index])


def test_neither_chunks_nor_preemption_change_the_tokens(
    checkpoint: Path, prompts: list[list[int]], together: list[CompletionOutput]
) -> None:
    llm = make_llm(checkpoint, num_gpu_blocks_override=24, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert [output.token_ids for output in run(llm, prompts)] == [output.token_ids for output in together]
    assert llm.core.load.num_preemptions > 0


@pytest.mark.parametrize("index", [0, 2, 3, 7])
def test_an_output_resumed_at_any_position_goes_on_alike(
    checkpoint: Path, prompts: list[list[int]], together: list[CompletionOutput], index: int
) -> None:
    """What a router does when an instance dies: the grammar's state is that of the emitted ids."""
    core = EngineCore(EngineConfig(model=str(checkpoint), dtype="float32", num_blocks=1024), wake=lambda: None)
    whole = together[index].token_ids
    for cut in range(len(whole)):
        spec = EngineRequest(
            request_id=str(cut),
            prompt_token_ids=prompts[index],
            output_token_ids=whole[:cut],
            params=params_for(index),
            seed=index,
            eos_token_ids=(END,),
        )
        core.handle(AddRequest(spec))
    rests = gathered(core, len(whole))
    core.shutdown()
    assert rests == {str(cut): whole[cut:] for cut in range(len(whole))}


# Beside the model


@pytest.mark.parametrize("num_allowed", [0, 3, 500, 997, 1000])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_mask_excludes_the_tokens_of_its_rows(num_allowed: int, *, is_transposed: bool) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    logits = logits.t().contiguous().t() if is_transposed else logits
    source = np.random.default_rng(num_allowed)
    bits = np.zeros((3, 1024), np.uint8)
    for row in bits:
        row[source.choice(1000, num_allowed, replace=False)] = 1
    expected = logits.masked_fill(torch.from_numpy(bits[:, :1000] == 0), -torch.inf)
    expected[1] = logits[1]
    grammar_masks._exclude(logits, np.packbits(bits, axis=1, bitorder="little").view(np.int32), [0, 2])
    assert torch.equal(logits, expected)


def test_constraints_travel_between_processes() -> None:
    for fields, _ in CONSTRAINTS.values():
        params = SamplingParams(**fields)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        assert sent == params
        assert sent.constraint == params.constraint != None  # noqa: E711
