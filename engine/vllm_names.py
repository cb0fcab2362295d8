"""vLLM's and nano-vllm's argument names on `LLM` and `SamplingParams`: which of ours each is, or why it is refused.

An argument that this engine has no field for is accepted with the values that describe what it does anyway. With any
other value it is refused by name, or, if results do not depend on it, ignored with a line in the log.
Columns: the values that are true here, what to use instead or why it is ignored, whether it is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, get_args

from engine.config import Device, Dtype, EngineConfig, LoadFormat, ModelImpl, Quantization
from engine.errors import NotSupported, shown, suggestion

_log = logging.getLogger(__name__)


class Fixed(NamedTuple):
    """An argument whose effect is always the same."""

    values: tuple[object, ...]
    """Those that describe what this engine does; None besides, which is vLLM's "automatic"."""
    reason: str
    is_ignored: bool = False


RENAMED = {
    "num_gpu_blocks_override": "num_blocks",
    "num_kvcache_blocks": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "kvcache_block_size": "block_size",
    "speculative_config": "num_speculative_tokens",
}
_AUTOMATIC_IF_NEGATIVE = ("max_model_len", "num_blocks")
_OF_A_PROCESS = {"kind", "python", "vllm_args", "cpu_cores", "process_setup", "process_setup_options"}
"""Fields of EngineConfig about a core's own process: that of `LLM` is the caller's, and its engine this one."""
_SAME_VALUES: dict[str, dict[str, str]] = {
    "dtype": {"float": "float32", "half": "float16"},
    "load_format": {"safetensors": "auto"},
    "model_impl": {"vllm": "native"},
}
_ALLOWED = {
    "dtype": Dtype,
    "device": Device,
    "load_format": LoadFormat,
    "model_impl": ModelImpl,
    "quantization": Quantization,
}

_SERVE = "a stack of instances: tandem up, docs/disaggregation.md"
_NO_GRAPHS = "enforce_eager decides about CUDA graphs; there is no torch.compile"
_LORA = "lora_adapters={name: folder}, and generate(…, lora=name)"
_TEXT_ONLY = "text prompts: models of images and audio are not supported"

LLM_ARGUMENTS: dict[str, Fixed] = {
    "compilation_config": Fixed((0,), _NO_GRAPHS, True),
    "max_seq_len_to_capture": Fixed((), _NO_GRAPHS, True),
    "swap_space": Fixed((0,), "preempted requests are computed again, not swapped", True),
    "disable_log_stats": Fixed((True,), "offline statistics are not logged; the progress bar shows tokens/s", True),
    "disable_custom_all_reduce": Fixed((True,), "ranks reduce through shared memory", True),
    "trust_remote_code": Fixed((False,), "code in a checkpoint is never executed", True),
    "served_model_name": Fixed((), "offline results do not name the model", True),
    "kv_cache_dtype": Fixed(("auto",), "dtype, which is the KV cache's as well"),
    "calculate_kv_scales": Fixed((False,), "dtype, which is the KV cache's as well"),
    "kv_transfer_config": Fixed((), _SERVE),
    "enable_chunked_prefill": Fixed((True,), "max_num_batched_tokens as large as max_model_len: prompts in one chunk"),
    "max_logprobs": Fixed((20,), "SamplingParams(logprobs=0..20)"),
    "logprobs_mode": Fixed(("raw_logprobs",), "log-probabilities of the raw logits"),
    "data_parallel_size": Fixed((1,), _SERVE),
    "enable_expert_parallel": Fixed((False,), "tensor_parallel_size"),
    "distributed_executor_backend": Fixed(("mp", "uni"), "tensor_parallel_size: processes of this host"),
    "cpu_offload_gb": Fixed((0,), "tensor_parallel_size, or device='cpu'"),
    "tokenizer_mode": Fixed(("auto", "hf"), "tokenizer.json in the model's folder"),
    "tokenizer_revision": Fixed((), "revision, which the tokenizer shares"),
    "code_revision": Fixed((), "a model that needs no code of its own"),
    "config_format": Fixed(("auto", "hf"), "config.json in the model's folder"),
    "download_dir": Fixed((), "the environment variable HF_HOME"),
    "hf_token": Fixed((), "the environment variable HF_TOKEN"),
    "hf_overrides": Fixed(({},), "a copy of the folder with another config.json"),
    "generation_config": Fixed(("auto",), "SamplingParams, which the model's defaults do not change"),
    "override_generation_config": Fixed(({},), "SamplingParams, which the model's defaults do not change"),
    "task": Fixed(("auto", "generate"), "a model that generates text"),
    "runner": Fixed(("auto", "generate"), "a model that generates text"),
    "convert": Fixed(("auto", "none"), "a model that generates text"),
    "enable_lora": Fixed((False,), _LORA),
    "limit_mm_per_prompt": Fixed(({},), _TEXT_ONLY),
    "mm_processor_kwargs": Fixed(({},), _TEXT_ONLY),
    "allowed_local_media_path": Fixed(("",), _TEXT_ONLY),
    "structured_outputs_config": Fixed(({},), "SamplingParams(json_schema=, regex=, …): docs/structured_output.md"),
    "guided_decoding_backend": Fixed(("auto", "xgrammar"), "xgrammar: docs/structured_output.md"),
    "logits_processors": Fixed(([],), "SamplingParams(logit_bias=, allowed_token_ids=, bad_words=)"),
    "scheduling_policy": Fixed(("fcfs",), "first come, first served"),
    "async_scheduling": Fixed((False,), "one step after the other"),
    "num_scheduler_steps": Fixed((1,), "one step after the other"),
    "disable_sliding_window": Fixed((False,), "max_model_len at most the window"),
    "enable_sleep_mode": Fixed((False,), "a new LLM"),
}
"""Of `LLM`. A name that becomes a field of EngineConfig leaves this table."""

_CONSTRAINTS = "json_object, json_schema, regex, choice, grammar or structural_tag: docs/structured_output.md"
_NO_BEAMS = "n and temperature: there is no beam search"

SAMPLING_ARGUMENTS: dict[str, Fixed] = {
    "best_of": Fixed((1,), "n choices, of which the caller takes the best by cumulative_logprob"),
    "use_beam_search": Fixed((False,), _NO_BEAMS),
    "length_penalty": Fixed((1.0,), _NO_BEAMS),
    "early_stopping": Fixed((False,), _NO_BEAMS),
    "structured_outputs": Fixed((), _CONSTRAINTS),
    "guided_decoding": Fixed((), _CONSTRAINTS),
    "logits_processors": Fixed(([],), "logit_bias, allowed_token_ids or bad_words"),
    "spaces_between_special_tokens": Fixed((False,), "tokenizer.json decides about spaces", True),
    "truncate_prompt_tokens": Fixed((), "a prompt that fits max_model_len"),
    "output_kind": Fixed((), "the whole output; Client.stream or AsyncEngine for pieces"),
    "stream_interval": Fixed((), "the whole output; Client.stream or AsyncEngine for pieces"),
    "flat_logprobs": Fixed((False,), "a dict of log-probabilities for each token"),
    "logprob_token_ids": Fixed((), "logprobs, of the best tokens"),
    "thinking_token_budget": Fixed((), "max_tokens"),
    "repetition_detection": Fixed((), "repetition_penalty, frequency_penalty or presence_penalty"),
    "skip_reading_prefix_cache": Fixed((False,), "LLM(enable_prefix_caching=False)"),
    "extra_args": Fixed(({},), "the fields of SamplingParams"),
}
"""Of `SamplingParams`. A name that becomes a field leaves this table."""


def engine_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of EngineConfig that `arguments` of `LLM` set. Raises NotSupported, and TypeError for other names."""
    known = set(EngineConfig.__struct_fields__) - _OF_A_PROCESS
    fields: dict[str, Any] = {}
    given: dict[str, str] = {}
    """By field, the name under which it was given."""
    for name, value in supported("LLM", arguments, {*known, *RENAMED}, LLM_ARGUMENTS).items():
        field = RENAMED.get(name, name)
        if value is None or (field in _AUTOMATIC_IF_NEGATIVE and value == -1):
            continue
        if given.setdefault(field, name) != name:
            raise TypeError(f"LLM got {field} twice, as {given[field]} and as {name}")
        fields[field] = _our_value(field, _num_speculative_tokens(value) if name == "speculative_config" else value)
    return fields


def supported(
    owner: str, arguments: Mapping[str, Any], known: Collection[str], fixed: Mapping[str, Fixed]
) -> dict[str, Any]:
    """Those of `arguments` that `owner` knows, once each other one is found to change nothing. Raises NotSupported,
    and TypeError for names in neither `known` nor `fixed`."""
    unknown = sorted(arguments.keys() - known - fixed.keys())
    if unknown:
        hint = suggestion(unknown[0], [*known, *fixed])
        raise TypeError(f"{owner} got unknown arguments {unknown}{hint}; known: {sorted(known)}")
    for name in arguments.keys() - known:
        _check_fixed(owner, name, arguments[name], fixed[name])
    return {name: value for name, value in arguments.items() if name in known}


def _check_fixed(owner: str, name: str, value: object, rule: Fixed) -> None:
    if value is None or value in rule.values:
        return
    if not rule.is_ignored:
        allowed = " or ".join(shown(each) for each in rule.values or (None,))
        raise NotSupported(name, shown(value), f"{allowed}; use {rule.reason}")
    _log.warning("%s ignores %s=%s: %s", owner, name, shown(value), rule.reason)


def _num_speculative_tokens(config: object) -> int:
    """Of vLLM's speculation by n-grams. How long these are is not ours to choose: it does not change results."""
    given = config if isinstance(config, Mapping) else {}
    num_tokens = given.get("num_speculative_tokens")
    if given.get("method") != "ngram" or not isinstance(num_tokens, int):
        allowed = '{"method": "ngram", "num_speculative_tokens": 5}, or num_speculative_tokens=5'
        raise NotSupported("speculative_config", shown(config), allowed)
    return num_tokens


def _our_value(field: str, value: Any) -> Any:
    """`value` in our words: vLLM takes torch's types as well as their names."""
    if field not in _ALLOWED:
        return value
    name = str(value).removeprefix("torch.")
    name = _SAME_VALUES.get(field, {}).get(name, name)
    allowed = get_args(_ALLOWED[field])
    if name not in allowed:
        raise NotSupported(field, shown(value), ", ".join(allowed))
    return name
