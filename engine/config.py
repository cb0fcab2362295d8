"""Configuration of an engine core: frozen, read at the edge, free of torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.partition import Parallelism

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "native", "transformers"]
EngineKind = Literal["tandem", "vllm"]

GRAMMAR_S = 60.0
MAX_THREADS = 1024
"""Far more than any machine's cores; of several thousand the system starts no more, which ends the process."""
_LEAST = {
    "block_size": 1,
    "num_blocks": 2,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "num_speculative_tokens": 0,
    "num_threads": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
"""Of fields of EngineConfig, as in an instance's settings (instance/settings.py)."""


class KVConnectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which KV connector the engine core builds, and its arguments."""

    class_path: str = "engine.kv_connector:NullKVConnector"
    """`module:Class`, of this project or of a third party."""
    options: dict[str, Any] = {}
    """Passed to the class as keyword arguments."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine core needs to start. Sizes are tokens, blocks, bytes or seconds as the names say."""

    model: str
    """Folder of a checkpoint in Hugging Face's form (config.json, *.safetensors, tokenizer.json)."""
    kind: EngineKind = "tandem"
    """This engine, or vLLM in its place (vllm_engine)."""
    python: str = ""
    """Interpreter of the core's process; empty: this one."""
    vllm_args: dict[str, Any] = {}
    """Further arguments of vLLM's AsyncEngineArgs."""
    dtype: Dtype = "auto"
    """Weights and activations; `auto` takes the checkpoint's own."""
    quantization: Quantization = "none"
    """Of the weights of linear layers, but the output layer; activations and KV keep `dtype`."""
    device: Device = "cpu"
    load_format: LoadFormat = "auto"
    """`dummy`: random weights from config.json alone, for benchmarks at real sizes."""
    model_impl: ModelImpl = "auto"
    """What computes the model: our own decoder, transformers (an extra, `models`), or ours where it can."""
    lora_adapters: dict[str, str] = {}
    """Folder of each LoRA adapter in PEFT's form, by the name that requests give. Of native decoders and of vLLM."""
    max_model_len: int | None = None
    """Maximum prompt + output in tokens; None: the model's own limit."""
    block_size: int = 16
    """Tokens in a KV block. The fast attention of CPUs and Triton needs a multiple of 16."""
    num_blocks: int | None = None
    """KV blocks; None divides kv_cache_bytes by the page size."""
    kv_cache_bytes: int | None = None
    """KV memory; None: on CPU a fraction of the memory that is free after the weights are loaded, on one GPU what
    gpu_memory_utilization leaves; several GPUs need a size."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory for weights, steps and KV, and for what others have there, where no KV size is given."""
    enforce_eager: bool = False
    """False: steps of single tokens of dense native models run as CUDA graphs on a GPU. Without effect on CPU."""
    max_num_seqs: int = 64
    """Maximum number of requests in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step (the chunk budget of chunked prefill)."""
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    """Most tokens of a stream that prompt lookup drafts and one step verifies (scheduling/drafts.py); 0: none."""
    tensor_parallel_size: int = 1
    """Ranks that divide every layer: processes of this host, the core's included."""
    pipeline_parallel_size: int = 1
    """Stages, each of `tensor_parallel_size` ranks, that divide the layers."""
    num_threads: int | None = None
    """Compute threads of each rank; None: the cores this process may use, divided among the ranks."""
    cpu_cores: tuple[int, ...] = ()
    """CPU cores the engine core is pinned to, each rank to its share; empty: not pinned."""
    attention_backend: str = "auto"
    seed: int = 0
    """Of dummy weights."""
    max_held_fraction: float = 0.5
    """Fraction of the blocks that transfers may hold before new hand-over requests wait."""
    grammar_s: float = GRAMMAR_S
    """How long a request may wait until its constraint is compiled; then it ends with an error. Offline it limits each
    compilation, not how long a request waits behind others."""
    kv_connector: KVConnectorConfig = KVConnectorConfig()
    process_setup: str = ""
    """`module:function` that the core's process calls first, to set up logging."""
    process_setup_options: dict[str, str] = {}
    """Keyword arguments of `process_setup`."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            size = getattr(self, name)
            if size is not None and size < least:
                raise ValueError(f"{name} is {size}; it must be at least {least}")
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ValueError(f"num_threads is {self.num_threads}; it must be at most {MAX_THREADS}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1"
            )
        if self.quantization != "none" and self.device != "cpu":
            raise ValueError(f"quantization {self.quantization} is supported on cpu; set none on {self.device}")

    @property
    def parallelism(self) -> Parallelism:
        """How the model is divided among ranks."""
        return Parallelism(self.tensor_parallel_size, self.pipeline_parallel_size)
