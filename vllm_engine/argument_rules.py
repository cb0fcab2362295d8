"""Which of vLLM's arguments are not taken, and why. Free of vLLM: the chart rejects them before an installation."""

from __future__ import annotations

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
}
"""Arguments that have a setting of their own."""
REFUSED = {
    "speculative_config": "a speculating engine does not continue sampled streams exactly",
    "spec_method": "a speculating engine does not continue sampled streams exactly",
    "spec_model": "a speculating engine does not continue sampled streams exactly",
    "watermark_config": "a watermark changes what is sampled",
    "diffusion_config": "diffusion does not emit token by token",
    "enable_lora": "adapters are not supported yet",
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
