"""LoRA adapters: greedy answers are those of transformers with the adapter in its weights, whatever else is in the
batch, and KV of one adapter is never another's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.adapter_config import AdapterConfig
from engine.attention.compilation import has_wide_registers
from engine.errors import CheckpointChanged, EngineError, InvalidCheckpoint, InvalidRequest, UnsupportedModel
from engine.identity import CheckpointState
from engine.models.adapters import CompiledAdapters
from tests.builders import lively_checkpoint, merged, write_adapter
from tests.oracle import GreedyOracle, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
ATTENTION = ("q_proj", "v_proj")
NAMES = ["", "all", "attention", "", "all", "attention", "all"]
"""The adapter of each prompt."""
PROMPTS = random_prompts(len(NAMES), longest=150, vocab_size=1000)
Answers = list[tuple[list[int], list[float]]]


def make_llm(folder: Path, adapters: dict[str, Path] | None = None, **options: Any) -> LLM:
    options = {"dtype": "float32", "num_gpu_blocks_override": 256, **options}
    return LLM(folder, skip_tokenizer_init=True, lora_adapters=adapters or {}, **options)


def generate(llm: LLM, names: list[str], prompts: list[list[int]] = PROMPTS) -> Answers:
    """Token ids and log-probabilities of each prompt's answer."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [answer.outputs[0] for answer in llm.generate(given, GREEDY, use_tqdm=False, lora=names)]
    return [
        (one.token_ids, [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)])
        for one in outputs
    ]


def write_both(tmp_path: Path, model: Path) -> dict[str, Path]:
    """Adapters of different ranks, modules and scales: 2 and 8 / sqrt(2)."""
    return {
        "all": write_adapter(tmp_path / "all", model),
        "attention": write_adapter(tmp_path / "attention", model, rank=2, modules=ATTENTION, seed=1, use_rslora=True),
    }


SCALES = {"all": 2.0, "attention": 8 / 2**0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes for which all kernels are compiled, so that decode steps are recorded."""
    return lively_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", intermediate_size=128)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    return write_both(tmp_path_factory.mktemp("adapters"), model)


@pytest.fixture(scope="module")
def reference(model: Path, adapters: dict[str, Path]) -> Answers:
    return generate(make_llm(model, adapters), NAMES)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2", "mistral"])
def test_answers_are_those_of_transformers_with_the_adapter_in_the_weights(architecture: str, tmp_path: Path) -> None:
    """One batch has both adapters and none, in chunks, preempted, and from the prefix cache."""
    folder = lively_checkpoint(tmp_path / "model", architecture)
    adapters = write_both(tmp_path, folder)
    llm = make_llm(folder, adapters, max_num_batched_tokens=33, num_gpu_blocks_override=12)
    answers = generate(llm, NAMES)
    assert llm.core.load.num_preemptions > 0
    assert generate(llm, NAMES) == answers
    oracles = {"": GreedyOracle(folder)}
    for name, adapter in adapters.items():
        oracles[name] = GreedyOracle(merged(folder, adapter, tmp_path / f"{name} merged", SCALES[name]))
    for name, prompt, (token_ids, logprobs) in zip(NAMES, PROMPTS, answers, strict=True):
        oracles[name].check(prompt, token_ids, logprobs)
    plain = generate(make_llm(folder), [""] * len(NAMES))
    assert [one == other for one, other in zip(answers, plain, strict=True)] == [name == "" for name in NAMES]


def test_equal_prompts_of_two_adapters_share_no_kv(model: Path, adapters: dict[str, Path]) -> None:
    names, prompts = ["", "all", "attention"], [PROMPTS[1]] * 3
    expected = generate(make_llm(model, adapters, enable_prefix_caching=False), names, prompts)
    assert len({tuple(token_ids) for token_ids, _ in expected}) == 3
    llm = make_llm(model, adapters)
    for num_cached_tokens in (0, 144):
        for name, (token_ids, _) in zip(names, expected, strict=True):
            [answer] = llm.generate({"prompt_token_ids": PROMPTS[1]}, GREEDY, use_tqdm=False, lora=name)
            assert answer.outputs[0].token_ids == token_ids
            assert answer.num_cached_tokens == num_cached_tokens


def test_none_in_a_list_of_adapters_is_none_of_them(model: Path, adapters: dict[str, Path]) -> None:
    llm = make_llm(model, adapters)
    [plain, adapted] = llm.generate([[5, 6], [5, 6]], GREEDY, use_tqdm=False, lora=[None, "all"])
    [expected] = llm.generate([5, 6], GREEDY, use_tqdm=False)
    assert plain["token_ids"] == expected["token_ids"] != adapted["token_ids"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 17},
        {"max_num_seqs": 1},
        {"num_speculative_tokens": 4},
        {"enable_prefix_caching": False, "num_threads": 1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_an_answer_do_not_depend_on_chunks_batch_or_drafts(
    dtype: str, options: dict[str, Any], model: Path, adapters: dict[str, Path], reference: Answers
) -> None:
    if dtype == "bfloat16":
        reference = generate(make_llm(model, adapters, dtype=dtype), NAMES)
    assert generate(make_llm(model, adapters, dtype=dtype, **options), NAMES) == reference


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether what adapters add is computed by kernels, or by torch as where there are none."""
    if not request.param:
        monkeypatch.setattr(CompiledAdapters, "supports", lambda pairs: False)
    return bool(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_have_the_bits_of_others(
    dtype: str, is_compiled: bool, model: Path, adapters: dict[str, Path]
) -> None:
    """The adapters of a size's rows change from batch to batch; steps without one have recordings of their own."""
    llm, plain = (make_llm(model, adapters, dtype=dtype, enable_prefix_caching=False) for _ in range(2))
    recorded, unrecorded = (one.core._executor._model for one in (llm, plain))  # type: ignore[attr-defined]
    plain.core._executor._model = getattr(unrecorded, "_model", unrecorded)  # type: ignore[attr-defined]
    for names in (NAMES, NAMES[::-1], [""] * len(NAMES), ["all"] * len(NAMES)):
        assert generate(llm, names) == generate(plain, names)
    if has_wide_registers():
        assert {adapts for _, adapts in recorded._graphs} == ({True, False} if is_compiled else {False})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_adapters_compute_what_few_do(
    dtype: str, is_compiled: bool, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """An answer's bits depend on no other adapter that is loaded, nor on those in its batch."""
    few = generate(make_llm(model, adapters, dtype=dtype), NAMES)
    others = {f"o{seed}": write_adapter(tmp_path / f"o{seed}", model, rank=seed, seed=seed) for seed in range(1, 31)}
    llm = make_llm(model, {**adapters, **others}, dtype=dtype)
    answers = generate(llm, [*NAMES, *others], [*PROMPTS, *(PROMPTS[1],) * len(others)])
    assert answers[: len(NAMES)] == few
    assert len({tuple(token_ids) for token_ids, _ in answers[len(NAMES) :]}) > len(others) / 2


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_ranks_compute_their_part_of_an_adapter(
    tensor: int, pipeline: int, model: Path, adapters: dict[str, Path], reference: Answers
) -> None:
    llm = make_llm(model, adapters, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, num_threads=1)
    try:
        answers = generate(llm, NAMES)
    finally:
        llm.core.shutdown()
    for (token_ids, logprobs), (expected_ids, expected) in zip(answers, reference, strict=True):
        assert token_ids == expected_ids
        assert logprobs == pytest.approx(expected, abs=1e-4)


def test_an_adapter_is_added_to_weights_of_codes(model: Path, adapters: dict[str, Path]) -> None:
    """Without a scale it changes nothing; with one, what it adds is not rounded to codes."""
    folder = adapters["all"].parent / "nothing"
    shutil.copytree(adapters["all"], folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 0}))
    llm = make_llm(model, {"all": adapters["all"], "nothing": folder}, quantization="int8")
    names = ["", "nothing", "all"]
    plain, nothing, changed = generate(llm, names, [PROMPTS[1]] * 3)
    assert (nothing == plain, changed == plain) == (True, False)


def test_experts_stay_as_they_are_and_an_adapter_of_them_is_refused(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path / "model", "qwen3_moe")
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")  # experts are single tensors in one file
    adapter = write_adapter(tmp_path / "adapter", folder, modules=names)
    oracle = GreedyOracle(merged(folder, adapter, tmp_path / "merged", 2.0))
    answers = generate(make_llm(folder, {"sql": adapter}), ["sql"] * len(PROMPTS))
    for prompt, (token_ids, logprobs) in zip(PROMPTS, answers, strict=True):
        oracle.check(prompt, token_ids, logprobs)
    tensors = load_file(adapter / "adapter_model.safetensors")
    expert = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora"
    pair = {f"{expert}_A.weight": torch.ones(4, 64), f"{expert}_B.weight": torch.ones(48, 4)}
    save_file({**tensors, **pair}, adapter / "adapter_model.safetensors")
    with pytest.raises(
        UnsupportedModel, match=r"'sql': .* not supported: 'model.*experts.3.up_proj.lora_A.weight', '.*"
    ):
        make_llm(folder, {"sql": adapter})


def test_engines_with_other_adapters_have_another_identity(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    def fingerprint(folders: dict[str, Path]) -> str:
        return make_llm(model, folders).core.info.model_identity.fingerprint

    other_numbers = write_adapter(tmp_path / "numbers", model, seed=9)
    other_scale = tmp_path / "scale"
    shutil.copytree(adapters["all"], other_scale)
    (other_scale / "adapter_config.json").write_text(json.dumps({"lora_alpha": 9}))
    same = tmp_path / "same"
    shutil.copytree(adapters["all"], same)
    sets = [{}, *({"all": folder} for folder in (adapters["all"], other_numbers, other_scale)), {"b": adapters["all"]}]
    assert len({fingerprint(folders) for folders in sets}) == len(sets)
    assert fingerprint({"all": same}) == fingerprint({"all": adapters["all"]})


def test_an_adapter_that_changes_while_it_is_loaded_is_noticed(adapters: dict[str, Path], tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = tmp_path / name
        shutil.copytree(adapters["all"], folder)
        state = CheckpointState.of(folder)
        state.check()
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        with pytest.raises(CheckpointChanged, match=name):
            state.check()


def test_no_file_of_an_adapter_stays_in_memory(model: Path, adapters: dict[str, Path]) -> None:
    llm = make_llm(model, adapters)
    mapped = Path("/proc/self/maps").read_text()
    assert [str(folder) for folder in adapters.values() if f"{folder}/" in mapped] == []
    llm.core.shutdown()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("sq", "lora: 'sq' is not an adapter of this model; allowed: all, attention"),
        (["all"], "lora: 1 given for 2 prompts; allowed: one for each, or one for all"),
    ],
)
def test_an_unknown_adapter_is_refused_before_anything_is_computed(
    lora: str | list[str], message: str, model: Path, adapters: dict[str, Path]
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make_llm(model, adapters).generate([[5, 6], [7]], GREEDY, use_tqdm=False, lora=lora)
    assert str(raised.value) == message


def test_a_model_without_adapters_says_how_to_load_them(model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: none: LLM\(lora_adapters=\{name: folder\}\) is not set"):
        make_llm(model).generate([5, 6], GREEDY, use_tqdm=False, lora="sql")
    with pytest.raises(InvalidRequest, match=r"lora_adapters: is \['sql'\]; allowed: folders by name"):
        LLM(model, skip_tokenizer_init=True, lora_adapters=["sql"])


CONFIGS = {
    "peft_type": ("IA3", UnsupportedModel, "peft_type 'IA3' is not supported; LORA is"),
    "bias": ("all", UnsupportedModel, "bias 'all' is not supported; none is"),
    "use_dora": (True, UnsupportedModel, "use_dora True is not supported"),
    "modules_to_save": (["lm_head"], UnsupportedModel, r"modules_to_save \['lm_head'\] is not supported"),
    "alpha_pattern": ({"q_proj": 2}, UnsupportedModel, r"alpha_pattern \{'q_proj': 2\} is not supported"),
    "init_lora_weights": ("pissa_niter_16", UnsupportedModel, "'pissa_niter_16' changed the model's own weights too"),
    "lora_alpha": ("8", InvalidCheckpoint, "lora_alpha is '8'; it must be a number"),
}


@pytest.mark.parametrize("field", CONFIGS)
def test_a_config_that_computes_something_else_is_refused(
    field: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    value, error, message = CONFIGS[field]
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["all"], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    neutral = {"modules_to_save": [], "alpha_pattern": {}, "use_dora": False, "init_lora_weights": True, "r": None}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **neutral}))
    assert AdapterConfig.read("sql", folder).scale(4) == 2.0
    (folder / "adapter_config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(error, match=f"adapter 'sql': adapter_config.json: .*{message}"):
        AdapterConfig.read("sql", folder)


def test_a_scale_beyond_float32_is_refused(adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["all"], folder)
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": 1{"0" * 400}}}')
    with pytest.raises(InvalidCheckpoint, match=r"lora_alpha is 10+\.\.\.; it must be a number"):
        AdapterConfig.read("sql", folder)


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        ("a/b", {}, r"adapter 'a/b': a name is 1..128 of \[A-Za-z0-9._-\]"),
        ("sql", {"adapter_config.json": b"{"}, "adapter_config.json is not JSON"),
        ("sql", {"adapter_config.json": b"[]"}, "adapter_config.json is not a JSON object"),
        ("sql", {"adapter_config.json": None}, "cannot read .*adapter_config.json: No such file"),
        ("sql", {"adapter_model.safetensors": None}, "has no adapter_model.safetensors, and other formats"),
        ("sql", {"adapter_model.safetensors": b"PK"}, "adapter_model.safetensors is not a complete safetensors file"),
    ],
)
def test_damaged_files_are_named(
    name: str, broken: dict[str, bytes | None], message: str, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["all"], folder)
    for file, content in broken.items():
        (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(EngineError, match=f"adapter '{name}': .*{message.removeprefix(f'adapter {name!r}: ')}"):
        make_llm(model, {name: folder})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"self_attn.q_proj.lora_A": torch.ones(4, 63)},
            InvalidCheckpoint,
            r"has shape \[4, 63\]; .* requires \[4, 64\]",
        ),
        ({"self_attn.q_proj.lora_B": torch.ones(128, 3)}, InvalidCheckpoint, r"shape \[128, 3\]; .* \[128, 4\]"),
        ({"self_attn.q_proj.lora_A": torch.ones(4, 64).int()}, InvalidCheckpoint, "is torch.int32; supported"),
        ({"self_attn.q_proj.lora_A": torch.tensor(1.0)}, InvalidCheckpoint, r"shape \[\]; .* requires \[1, 64\]"),
        ({"self_attn.q_proj.lora_A": torch.ones(0, 64)}, InvalidCheckpoint, r"shape \[0, 64\]; .* requires \[1, 64\]"),
        ({"self_attn.q_proj.lora_A": None}, InvalidCheckpoint, "q_proj.lora_A.weight' cannot be read: .*not contain"),
        ({}, InvalidCheckpoint, "adapter_model.safetensors has no tensors"),
        (
            {"mlp.router.lora_A": torch.ones(4, 64)},
            UnsupportedModel,
            "not supported: .*mlp.router.*; supported: those of",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    changed: dict[str, torch.Tensor | None], error: type[EngineError], message: str, model: Path,
    adapters: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["all"], folder)
    tensors = load_file(folder / "adapter_model.safetensors") if changed else {}
    for name, tensor in changed.items():
        tensors.pop(key := f"base_model.model.model.layers.1.{name}.weight", None)
        tensors |= {} if tensor is None else {key: tensor}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(error, match=f"adapter 'sql': .*{message}"):
        make_llm(model, {"sql": folder})


@pytest.mark.parametrize(("number", "dtype"), [(float("nan"), "float32"), (70000.0, "float16")])
def test_numbers_that_are_not_finite_are_refused(
    number: float, dtype: str, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Each of the adapter's requests would fail, and failures in a row eject instances."""
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["all"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"][-1, -1] = number
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(
        InvalidCheckpoint, match=f"'sql': tensors of .*1.mlp.down_proj.lora have .* finite torch.{dtype}"
    ):
        make_llm(model, {"sql": folder}, dtype=dtype)


def test_the_transformers_backend_refuses_adapters(model: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(
        UnsupportedModel, match="lora_adapters are supported for native models, not by the transformers"
    ):
        make_llm(model, adapters, model_impl="transformers")
