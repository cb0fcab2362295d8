"""The offline engine's interface: conversations, and what its arguments must be."""

from __future__ import annotations

import copy
import errno
import io
import itertools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.core import EngineCore
from engine.errors import CapacityError, EngineError, InvalidCheckpoint, InvalidRequest, UnsupportedModel
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waiting_queue import WaitingQueue
from engine.text.chat_output import tool_format_of
from engine.text.tokenizer import Tokenizer
from protos.tandem.v1 import generation_pb2
from router.api.openai.chat_messages import Message
from router.request.chat import template_messages
from tandem.demo import MODEL_DIR
from tests.builders import lively_checkpoint, lively_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTION = [{"role": "user", "content": "Who mends tandems?"}]


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM("demo", dtype="float32", num_gpu_blocks_override=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("lively"))


def test_a_conversation_is_the_prompt_that_its_template_renders(demo: LLM) -> None:
    prompt = Tokenizer.from_folder(MODEL_DIR).encode_chat(QUESTION)
    [expected] = demo.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    [one] = demo.chat(QUESTION, GREEDY, use_tqdm=False)
    several = demo.chat([QUESTION, QUESTION], [GREEDY, GREEDY], use_tqdm=False)
    assert one.prompt_token_ids == prompt
    assert {output.outputs[0].text for output in (one, *several)} == {expected.outputs[0].text}
    assert expected.outputs[0].text


def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"no weights")
    (folder / "tokenizer.model").touch()
    with pytest.raises(
        UnsupportedModel, match=r"no tokenizer\.json, only tokenizer\.model; .*skip_tokenizer_init=True"
    ):
        LLM(folder, num_gpu_blocks_override=8)
    with pytest.raises(InvalidCheckpoint):
        LLM(folder, num_gpu_blocks_override=8, skip_tokenizer_init=True)


def test_a_tokenizer_that_is_not_wanted_is_read_only_for_an_eos_id_and_before_the_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "tokenizer.json").write_text("no tokenizer")
    llm = LLM(folder, num_gpu_blocks_override=8, skip_tokenizer_init=True)
    [answer] = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert answer.outputs[0].token_ids
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        LLM(folder, num_gpu_blocks_override=8, skip_tokenizer_init=True)


CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}]
PARTS = [{"type": "text", "text": "Add 1 and 2,"}, {"type": "text", "text": "please."}]
CALLED = [
    {"role": "developer", "content": "Be exact."},
    {"role": "user", "content": "Hello", "name": "ann"},
    {"role": "assistant", "content": None, "refusal": "I cannot.", "reasoning": "Hm.", "tool_calls": []},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]
TEMPLATE = (
    "{% for one in messages %}{{ one.role }}: {% if one.content is string %}{{ one.content }}{% endif %}"
    "{{ one.name }}{{ one.reasoning_content }}{{ ' with calls ' if 'tool_calls' in one }}"
    "{% for call in one.tool_calls %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}; "
    "{% endfor %}"
)


def test_a_conversation_in_openais_form_is_the_prompt_that_it_is_when_served(demo: LLM) -> None:
    before = copy.deepcopy(CALLED)
    body = [Message.model_validate(one).on_wire() for one in CALLED]
    served = template_messages(generation_pb2.Chat(messages=[generation_pb2.ChatMessage(**one) for one in body]), None)
    [one] = demo.chat(CALLED, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    renderer = demo.get_tokenizer().with_chat_template(TEMPLATE)
    assert one.prompt == renderer.render_chat(served)
    assert one.prompt == (
        "system: Be exact.; user: Hello; assistant: I cannot.Hm.; user: Add 1 and 2,\nplease.; "
        'assistant:  with calls add {"a": 1, "b": [2]}; tool: 3add; '
    )
    assert one.prompt_token_ids == renderer.encode_chat(served)
    assert before == CALLED, "the caller's messages have changed"


MISTRAL_TEMPLATE = (
    "{% for one in messages %}{% for call in one.tool_calls %}[TOOL_CALLS]"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}{{ call.id }}"
    "{{ call.function.name }}"
    "{% endfor %}{{ one.tool_call_id }} {% endfor %}"
)


def test_a_mistral_template_gets_ids_of_its_form_as_when_served(demo: LLM) -> None:
    call = {**CALLS[0], "id": "call_abc123"}
    called = [QUESTION[0], {"role": "assistant", "tool_calls": [call]}]
    called += [{"role": "tool", "tool_call_id": "call_abc123", "content": "3"}]
    body = [Message.model_validate(one).on_wire() for one in called]
    chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(**one) for one in body])
    [one] = demo.chat(called, GREEDY, use_tqdm=False, chat_template=MISTRAL_TEMPLATE)
    renderer = demo.get_tokenizer().with_chat_template(MISTRAL_TEMPLATE)
    assert one.prompt == renderer.render_chat(template_messages(chat, tool_format_of(MISTRAL_TEMPLATE)))


def test_a_result_without_an_id_has_the_name_of_no_call(demo: LLM) -> None:
    functions = [{"name": name, "arguments": {}} for name in ("add", "sub")]
    called = [*QUESTION, {"role": "assistant", "tool_calls": [{"function": one} for one in functions]}]
    called += [{"role": "tool", "content": "3"}, {"role": "tool", "name": "sub", "content": "4"}]
    [one] = demo.chat(called, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    assert one.prompt is not None
    assert one.prompt.endswith("with calls add {}sub {}; tool: 3; tool: 4sub; ")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\] is of type 'image_url'; allowed: text,"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"text of content\[0\]: 5 is not a string"),
        ({"role": "user", "content": 5}, "content 5 is not a string; allowed: a string, or a list of parts"),
        ("Hello", "'Hello' is not a message; allowed: "),
    ],
)
def test_a_message_that_is_no_text_is_named(demo: LLM, message: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^messages\[1\]: {problem}"):
        demo.chat([*QUESTION, message], GREEDY, use_tqdm=False)


def test_parameters_are_one_for_all_prompts_or_one_for_each(demo: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"2 given for 1 prompts; allowed: one SamplingParams for each"):
        demo.generate("Once", [GREEDY, GREEDY], use_tqdm=False)


@pytest.mark.parametrize("given", [{"temperature": 0.0, "max_tokens": 3}, [{"temperature": 0.0}]])
def test_parameters_of_another_type_are_not_ignored(demo: LLM, given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_params: \{'temperature': .* is dict, not"):
        demo.generate("Once", given, use_tqdm=False)


def test_a_constraint_that_cannot_be_compiled_is_rejected_before_any_prompt_is_computed(demo: LLM) -> None:
    num_generated = demo.core.load.num_generated_tokens
    invalid = SamplingParams(grammar="root ::= foo")
    with pytest.raises(InvalidRequest, match=r'^grammar: .*Rule "foo" is not defined'):
        demo.generate(["Once", "Twice"], [GREEDY, invalid], use_tqdm=False)
    assert demo.core.load.num_generated_tokens == num_generated
    assert demo.generate("Once", GREEDY, use_tqdm=False)[0].finished


def test_an_output_for_which_no_token_is_left_ends_alone(demo: LLM) -> None:
    impossible = SamplingParams(choice=("red",), allowed_token_ids=(5,), n=2)
    one, failed = demo.generate(["Once", "Twice"], [GREEDY, impossible], use_tqdm=False)
    assert one.outputs == demo.generate("Once", GREEDY, use_tqdm=False)[0].outputs
    assert failed.finished
    assert [(output.text, output.finish_reason) for output in failed.outputs] == [("", "error")] * 2
    assert all("the constraint exclude every token" in str(output.error) for output in failed.outputs)


def test_an_invalid_prompt_leaves_no_progress_bar(demo: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts: list[Any] = ["Once", [10**6]]
    with pytest.raises(InvalidRequest, match="token_ids"):
        demo.generate(prompts, GREEDY)
    assert capsys.readouterr().err == ""
    demo.generate("Once", GREEDY)
    assert "Generating" in capsys.readouterr().err


@pytest.mark.parametrize("prompts", [b"Once", [b"Once"], [bytearray(b"Once")], None, [None], 5, ["Once", 5], {"Once"}])
def test_what_is_no_prompt_is_named_with_what_is_one(demo: LLM, prompts: Any) -> None:
    """Bytes would be the token ids that their values are."""
    with pytest.raises(InvalidRequest, match=r"^prompt: .* is \w+; allowed: a text, a list of token ids"):
        demo.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("messages", [QUESTION[0], "Who?", ["Who?"], None, [5], iter([QUESTION])])
def test_what_is_no_conversation_is_named_with_what_is_one(demo: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: .* is \w+; allowed: a list of {"):
        demo.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("tools", ["get_weather", {"name": "get_weather"}, [len]])
def test_what_is_no_tool_is_named_with_what_is_one(demo: LLM, tools: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^tools: .* is \w+; allowed: a list of {\"type\": \"function\""):
        demo.chat(QUESTION, GREEDY, use_tqdm=False, tools=tools)


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def closed_stream() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO())
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, closed_stream(), BrokenStream()], ids=["none", "closed", "broken"])
def test_answers_come_where_the_progress_bar_cannot_be_written(
    demo: LLM, monkeypatch: pytest.MonkeyPatch, stderr: io.TextIOBase | None
) -> None:
    """None: as in a process whose standard error was closed before its start."""
    monkeypatch.setattr(sys, "stderr", stderr)
    answers = demo.generate(["Once", "A tandem is"], GREEDY)
    assert [answer.finished for answer in answers] == [True, True]


def test_the_defaults_are_those_of_the_generation_config(demo: LLM) -> None:
    config = json.loads((MODEL_DIR / "generation_config.json").read_text())
    defaults = demo.get_default_sampling_params()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(defaults, name) == config.get(name, getattr(SamplingParams(), name))
    assert defaults.max_tokens == config.get("max_new_tokens", SamplingParams().max_tokens)


def test_the_models_own_max_tokens_is_cut_to_the_context(tmp_path: Path, checkpoint: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 1000, "eos_token_id": None}))
    llm = LLM(folder, num_gpu_blocks_override=4, max_model_len=32, skip_tokenizer_init=True)
    [answer] = llm.generate([[1, 2, 3]], use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 29
    with pytest.raises(InvalidRequest, match=r"max_tokens: .*allowed: 1\.\.29"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1000), use_tqdm=False)


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *, call: int, begins: bool) -> None:
    """Raise KeyboardInterrupt in that call of a method, counted from 1: before it begins, or after it has ended."""
    original, calls = getattr(owner, method), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        is_interrupted = next(calls) == call
        result = None if is_interrupted and begins else original(*args)
        if is_interrupted:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, method, interrupted)


@pytest.mark.parametrize(
    ("owner", "method", "call", "begins"),
    [
        (Scheduler, "abort", 1, True),
        (Scheduler, "abort", 4, False),
        (WaitingQueue, "remove", 1, True),
        (WaitingQueue, "remove", 1, False),
        (KVCacheManager, "close_table", 1, True),
        (KVCacheManager, "close_table", 4, False),
    ],
)
def test_what_a_call_interrupted_twice_has_left_is_not_computed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int, begins: bool
) -> None:
    """The fourth request has no blocks: any between its table and the pool would be lost."""
    llm = LLM(checkpoint, num_gpu_blocks_override=64, max_num_seqs=2, skip_tokenizer_init=True)
    [expected] = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    scheduler = llm.core.scheduler
    with monkeypatch.context() as patched:
        interrupt(patched, EngineCore, "compute", call=2, begins=True)
        interrupt(patched, owner, method, call=call, begins=begins)  # of the aborts that follow
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7, number] for number in range(6)], GREEDY, use_tqdm=False)
    assert scheduler.requests
    num_prefilled = scheduler.counters.num_prefilled_tokens
    [answer] = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert scheduler.counters.num_prefilled_tokens == num_prefilled + 2
    assert (scheduler.requests, list(scheduler.waiting), scheduler.running) == ({}, [], [])
    assert scheduler.kv.pool.num_available == scheduler.kv.num_blocks


def test_a_chat_needs_the_tokenizer(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_gpu_blocks_override=64, skip_tokenizer_init=True)
    with pytest.raises(InvalidRequest, match="chat requires the tokenizer"):
        llm.chat(QUESTION, GREEDY)


def test_a_mark_that_the_template_rejects_is_refused_before_anything_is_computed(
    demo: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss's template does with marks of its channels in a message, which as token ids are its text."""
    monkeypatch.setattr(demo, "generate", lambda *_, **__: pytest.fail("it was computed"))
    mark = demo.get_tokenizer().decode([demo.get_tokenizer().eos_token_id or 0], skip_special_tokens=False)
    template = f"{{% if '{mark}' in messages[0].content %}}{{{{ raise_exception('a mark') }}}}{{% endif %}}x"
    with pytest.raises(InvalidRequest, match="rejected by the chat template: 'a mark'"):
        demo.chat([{"role": "user", "content": f"Hi {mark}"}], GREEDY, use_tqdm=False, chat_template=template)


def test_a_refused_template_variable_is_named_as_the_argument_of_chat(demo: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat_template_kwargs: 'messages' is reserved; allowed: "):
        demo.chat(QUESTION, GREEDY, use_tqdm=False, chat_template_kwargs={"messages": []})


def test_an_unknown_argument_is_named(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match=r"unknown arguments \['num_gpus'\]; known: .*'num_blocks'"):
        LLM(checkpoint, num_gpus=2)


def test_a_model_of_the_hub_is_fetched(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    hub = SimpleNamespace(snapshot_download=lambda name, **options: checkpoint if name == "owner/name" else None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    llm = LLM("owner/name", skip_tokenizer_init=True, num_gpu_blocks_override=8)
    assert llm.core.info.vocab_size > 0


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no config\.json; give the folder of a checkpoint"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_bytes": 100}, "100 bytes of KV memory are too few for 2 blocks of"),
        ({"num_blocks": 2**40}, r"cannot allocate [0-9.]+ GiB of KV memory: [0-9.]+ GiB free; lower kv_cache_bytes"),
        ({"max_model_len": 10**6, "num_blocks": 64}, "max_model_len 1000000 exceeds the model's limit of"),
        ({"max_model_len": 1000, "num_blocks": 4}, "max_model_len 1000 exceeds the KV memory of 64 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected_with_the_limit(
    checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CapacityError, match=message):
        LLM(checkpoint, skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("block_size", 1),
        ("num_blocks", 2),
        ("max_model_len", 2),
        ("num_threads", 1),
    ],
)
def test_a_size_with_which_nothing_can_run_is_rejected(checkpoint: Path, name: str, least: int) -> None:
    """Requests would wait for ever."""
    sizes: dict[str, Any] = {name: least - 1}
    with pytest.raises(ValueError, match=f"{name} is {least - 1}; it must be at least {least}"):
        LLM(checkpoint, skip_tokenizer_init=True, **sizes)


def test_more_threads_than_a_system_starts_are_rejected(checkpoint: Path) -> None:
    """The process would end, without a message of ours."""
    with pytest.raises(ValueError, match="num_threads is 8000; it must be at most 1024"):
        LLM(checkpoint, skip_tokenizer_init=True, num_threads=8000)


def test_without_a_size_the_pool_is_what_the_requests_can_use(checkpoint: Path) -> None:
    info = LLM(checkpoint, skip_tokenizer_init=True, max_num_seqs=2, max_model_len=64).core.info
    assert info.num_blocks == 2 * (64 // 16 + 1)


def test_a_prompt_that_fails_ends_alone(tmp_path: Path) -> None:
    """Of a batch whose other outputs may have taken hours."""
    model = lively_model("llama", tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[999] = torch.nan
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32", num_gpu_blocks_override=64, skip_tokenizer_init=True)
    params = SamplingParams(temperature=1.0, max_tokens=4, n=2, seed=3, ignore_eos=True, logit_bias={999: -100.0})
    first, failed, last = llm.generate([[1, 2, 3], [999, 5], [4, 5, 6]], params, use_tqdm=False)
    assert failed.finished
    for output in failed.outputs:
        assert (output.token_ids, output.finish_reason) == ([], "error")
        assert output.error == "the model's logits are not finite: no token can be sampled"
    alone = llm.generate([[1, 2, 3], [4, 5, 6]], params, use_tqdm=False)
    for found, expected in zip((first, last), alone, strict=True):
        assert [len(output.token_ids) for output in found.outputs] == [4, 4]
        assert [output.token_ids for output in found.outputs] == [output.token_ids for output in expected.outputs]
    assert (llm.core.load.running_blocks, llm.core.load.num_waiting) == (0, 0)
