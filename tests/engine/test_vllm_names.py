"""Programs for vLLM and nano-vllm run with the import line changed; arguments that are not supported are named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoTokenizer

from engine import LLM, SamplingParams  # theirs: from vllm import …, from nanovllm import …
from engine.config import EngineConfig
from engine.errors import InvalidRequest, NotSupported
from engine.vllm_names import LLM_ARGUMENTS, RENAMED, SAMPLING_ARGUMENTS, engine_fields
from tests.builders import lively_checkpoint
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder

DOCS = Path(__file__).parents[2] / "docs/offline.md"
CONVERSATION = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "Who rides in front?"},
    {"role": "assistant", "content": "The captain."},
    {"role": "user", "content": "And who behind?"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model whose output varies, with a tokenizer and a chat template."""
    backend = byte_level_backend()
    end = backend.token_to_id("<|im_end|>")
    folder = lively_checkpoint(
        tmp_path_factory.mktemp("lively"), vocab_size=backend.get_vocab_size(), eos_token_id=end, bos_token_id=None
    )
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    return str(write_folder(folder, backend, BYTE_LEVEL_CONFIG))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, num_gpu_blocks_override=64)


# vLLM's examples


def test_vllms_basic_generation(model: str) -> None:
    prompts = ["A tandem has two", "The hill is", "Rain began when", "In the shop"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=model, seed=7)
    outputs = llm.generate(prompts, sampling_params)

    printed = []
    for output in outputs:
        printed.append((output.prompt, output.outputs[0].text))
        print(f"{output.prompt!r} goes on with {output.outputs[0].text!r}")

    assert [prompt for prompt, _ in printed] == prompts
    assert len({text for _, text in printed}) == len(prompts)
    for output in outputs:
        [completion] = output.outputs
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 16) or (
            completion.finish_reason == "stop"
        )
        assert completion.cumulative_logprob is None
    again = LLM(model=model, seed=7).generate(prompts, sampling_params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in outputs]
    other = LLM(model=model, seed=8).generate(prompts, sampling_params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in other] != [output.outputs[0].token_ids for output in outputs]


def test_vllms_chat(model: str) -> None:
    llm = LLM(model=model)
    sampling_params: Any = llm.get_default_sampling_params()  # its types are not those that it accepts
    sampling_params.max_tokens = 12
    sampling_params.stop = "\x00"
    outputs = llm.chat(CONVERSATION, sampling_params, use_tqdm=False)
    several = llm.chat([CONVERSATION for _ in range(3)], sampling_params, use_tqdm=True)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    plain = llm.chat(CONVERSATION, sampling_params, use_tqdm=False, chat_template=template)

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert outputs[0].prompt == text
    assert outputs[0].prompt_token_ids == tokenizer(text).input_ids
    assert len(outputs[0].outputs[0].token_ids) == 12
    assert {output.outputs[0].text for output in several} == {outputs[0].outputs[0].text}
    assert plain[0].prompt == "".join(f"{message['content']}\n" for message in CONVERSATION)
    assert plain[0].outputs[0].token_ids != outputs[0].outputs[0].token_ids
    assert sampling_params.stop == "\x00", "the caller's own parameters stay as they are"


def test_vllms_prefix_caching(model: str) -> None:
    prefix = "A captain steers, brakes, changes gear and speaks; a stoker pedals, signals and listens. "
    prompts = [prefix + question for question in ("Who steers?", "Who signals?")]
    sampling_params = SamplingParams(temperature=0.0)

    regular = LLM(model=model, gpu_memory_utilization=0.4, enable_prefix_caching=False)
    expected = [output.outputs[0].text for output in regular.generate(prompts, sampling_params)]
    cached = LLM(model=model, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(prompts[0], sampling_params)
    outputs = cached.generate(prompts, sampling_params)

    assert [output.outputs[0].text for output in outputs] == expected
    assert all(output.num_cached_tokens > 0 for output in outputs)


# nano-vllm's


def test_nano_vllms_example(model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    llm = LLM(model, enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=32)
    questions = ["name a bicycle", "count the wheels of three tandems"]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
        for each in questions
    ]
    outputs = llm.generate(prompts, sampling_params)

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{prompt!r}: {output['text']!r}")
        assert output["text"] == output.outputs[0].text
        assert tokenizer.decode(output["token_ids"], skip_special_tokens=True) == output["text"]
        with pytest.raises(KeyError):
            output["finish_reason"]
        assert llm.get_tokenizer().apply_chat_template(
            [{"role": "user", "content": questions[prompts.index(prompt)]}], tokenize=False, add_generation_prompt=True
        ) == (prompt)


def test_nano_vllms_bench(model: str) -> None:
    random = Random(0)
    num_seqs, max_len = 8, 48
    llm = LLM(model, enforce_eager=False, max_model_len=1024)
    prompts = [[random.randint(0, 360) for _ in range(random.randint(10, max_len))] for _ in range(num_seqs)]
    sampling_params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(10, max_len))
        for _ in range(num_seqs)
    ]
    llm.generate(["Benchmark: "], SamplingParams())
    began = perf_counter()
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    seconds = perf_counter() - began
    total = sum(params.max_tokens or 0 for params in sampling_params)
    print(f"{total} tokens in {seconds:.2f} s: {total / seconds:.0f} tokens/s")

    assert [len(output["token_ids"]) for output in outputs] == [params.max_tokens for params in sampling_params]
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_the_tokenizer_renders_with_a_given_template(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text_alone: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    text = tokenizer.apply_chat_template(CONVERSATION, chat_template=template, **text_alone)
    assert text == "".join(f"{message['content']}|" for message in CONVERSATION)
    with pytest.raises(NotSupported, match="continue_final_message: True is not supported yet; allowed: False"):
        tokenizer.apply_chat_template(CONVERSATION, continue_final_message=True, **text_alone)


# Forms of prompts


def test_prompts_have_vllms_forms(llm: LLM) -> None:
    unset: Any = None
    greedy = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, stop_token_ids=unset, bad_words=unset)
    ids = llm.get_tokenizer().encode("The hill is")
    [text] = llm.generate("The hill is", greedy, use_tqdm=False)
    prompts: list[Any] = ["The hill is", {"prompt": "The hill is"}, {"prompt_token_ids": ids}]
    listed = llm.generate(prompts, [greedy] * 3, use_tqdm=False)
    assert {output["text"] for output in listed} == {text["text"]}
    assert [output.prompt for output in listed] == ["The hill is", "The hill is", None]
    [completion] = text.outputs
    assert completion.logprobs is not None
    assert completion.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "What is in the picture?", "multi_modal_data": {"image": b""}},
        {"prompt_token_ids": [1, 2], "cache_salt": "mine"},
        {"prompt": "The hill is", "prompt_token_ids": [1, 2]},
    ],
)
def test_what_a_prompt_has_besides_its_text_is_refused(llm: LLM, prompt: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=rf"prompt: has keys .*{sorted(prompt)[0]}.* and no other"):
        llm.generate(prompt, use_tqdm=False)


# Arguments


def test_arguments_have_the_fields_of_the_engine() -> None:
    given = {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 3,
        "max_num_seqs": 512, "max_num_batched_tokens": 16384, "enable_prefix_caching": None,
        "kvcache_block_size": 256, "num_kvcache_blocks": -1, "max_model_len": -1, "dtype": torch.float32,
        "load_format": "safetensors", "model_impl": "vllm", "kv_cache_memory_bytes": 2**20,
    }  # fmt: skip
    assert engine_fields(given) == {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 3,
        "max_num_seqs": 512, "max_num_batched_tokens": 16384, "block_size": 256,
        "dtype": "float32", "load_format": "auto", "model_impl": "native", "kv_cache_bytes": 2**20,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second"), [("num_blocks", "num_gpu_blocks_override"), ("num_kvcache_blocks", "num_gpu_blocks_override")]
)
def test_a_field_is_given_once(first: str, second: str) -> None:
    with pytest.raises(TypeError, match=f"LLM got num_blocks twice, as {first} and as {second}"):
        engine_fields({first: 8, second: 9})
    with pytest.raises(TypeError, match=f"as {second} and as {first}"):
        engine_fields({second: 9, first: 8})


@pytest.mark.parametrize(
    ("automatic", "given", "fields"),
    [
        ({"speculative_config": None}, {"num_speculative_tokens": 5}, {"num_speculative_tokens": 5}),
        ({"kvcache_block_size": None}, {"block_size": 32}, {"block_size": 32}),
        ({"block_size": None}, {"kvcache_block_size": 32}, {"block_size": 32}),
        ({"num_gpu_blocks_override": -1}, {"num_kvcache_blocks": 64}, {"num_blocks": 64}),
    ],
)
def test_a_name_whose_value_is_automatic_gives_no_field(
    automatic: dict[str, Any], given: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert engine_fields(automatic | given) == engine_fields(given | automatic) == fields
    assert engine_fields(automatic) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization": "awq"}, r"quantization: 'awq' is not supported yet; allowed: none, int8, int4"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, r"kv_transfer_config: .*allowed: None; use a stack of inst"),
        ({"enable_chunked_prefill": False}, "allowed: True; use max_num_batched_tokens as large as max_model_len"),
        ({"max_logprobs": 5}, r"max_logprobs: 5 .*allowed: 20; use SamplingParams\(logprobs=0\.\.20\)"),
        ({"data_parallel_size": 2}, "allowed: 1; use a stack of instances"),
        ({"dtype": "int3"}, "dtype: 'int3' is not supported yet; allowed: auto, float32, bfloat16"),
        ({"load_format": "pt"}, "load_format: 'pt' is not supported yet; allowed: auto, dummy"),
        ({"tokenizer_mode": "slow"}, "allowed: 'auto' or 'hf'; use tokenizer.json in the model's folder"),
        ({"speculative_config": "ngram"}, 'speculative_config: \'ngram\' is .*; allowed: {"method": "ngram"'),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": "x"}},
            "speculative_config: .*; allowed: {",
        ),
        ({"tokenizer": "demo"}, "tokenizer: 'demo' is not supported yet; allowed: None"),
    ],
)
def test_an_unsupported_value_is_refused_with_what_to_use(model: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupported, match=message):
        LLM(model, **given)


def test_a_misspelt_name_gets_a_hint() -> None:
    with pytest.raises(TypeError, match=r"LLM got unknown arguments \['max_num_seq'\]; did you mean max_num_seqs\?"):
        engine_fields({"max_num_seq": 4})
    with pytest.raises(TypeError, match=r"SamplingParams got unknown arguments \['max_token'\]; did you mean max_tok"):
        SamplingParams(max_token=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["kind", "python", "vllm_args", "cpu_cores", "process_setup"])
def test_settings_of_a_cores_own_process_are_no_arguments(name: str) -> None:
    with pytest.raises(TypeError, match=rf"LLM got unknown arguments \['{name}'\]"):
        engine_fields({name: "vllm"})


def test_what_does_not_change_results_is_ignored_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "engine.vllm_names"):
        assert engine_fields({"max_logprobs": 20, "swap_space": 0, "trust_remote_code": False}) == {}
        assert not caplog.messages
        assert engine_fields({"max_seq_len_to_capture": 9, "trust_remote_code": True}) == {}
    assert sorted(caplog.messages) == [
        "LLM ignores max_seq_len_to_capture=9: enforce_eager decides about CUDA graphs; there is no torch.compile",
        "LLM ignores trust_remote_code=True: code in a checkpoint is never executed",
    ]


@pytest.mark.parametrize("name", SAMPLING_ARGUMENTS)
def test_sampling_arguments_are_accepted_where_they_are_true(name: str) -> None:
    rule = SAMPLING_ARGUMENTS[name]
    given: dict[str, Any]
    for value in (None, *rule.values):
        given = {name: value}
        assert SamplingParams(**given, max_tokens=3) == SamplingParams(max_tokens=3)
    if not rule.is_ignored:
        given = {name: "else"}
        with pytest.raises(NotSupported, match=f"{name}: 'else' is not supported yet; allowed: .*; use "):
            SamplingParams(**given)


def test_decoding_and_converting_know_the_fields_alone() -> None:
    lists: dict[str, Any] = {"stop": ["a"], "bad_words": ["b"]}
    params = SamplingParams(**lists, seed=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_the_tables_name_no_field() -> None:
    """A table's row would hide behind the field that has come."""
    fields = {*EngineConfig.__struct_fields__}
    assert not fields & (LLM_ARGUMENTS.keys() | RENAMED.keys())
    assert set(RENAMED.values()) <= fields
    assert not set(SamplingParams.__struct_fields__) & SAMPLING_ARGUMENTS.keys()


def test_the_docs_name_every_argument() -> None:
    page = DOCS.read_text()
    missing = [name for name in (*LLM_ARGUMENTS, *RENAMED, *SAMPLING_ARGUMENTS) if f"`{name}`" not in page]
    assert not missing


def test_without_a_tokenizer_there_is_none_to_get(model: str) -> None:
    with pytest.raises(InvalidRequest, match="skip_tokenizer_init: is set, so there is no tokenizer"):
        LLM(model, skip_tokenizer_init=True, num_gpu_blocks_override=8).get_tokenizer()
