"""What an engine is told once, at its start. Frozen; read at the edge; free of torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]


class KVConnectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which connector the engine core builds, and what it is told."""

    class_path: str = "engine.kv_connector:NullKVConnector"
    """`module:Class`; a third party names its own."""
    options: dict[str, Any] = {}
    """Passed to the class as keyword arguments."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine core needs to start. Sizes are tokens, blocks, bytes or seconds as the names say."""

    model: str
    """Folder of a checkpoint in Hugging Face's form (config.json, *.safetensors, tokenizer.json)."""
    dtype: Dtype = "auto"
    """Weights and activations; `auto` takes the checkpoint's own (float16 runs as bfloat16)."""
    device: Device = "cpu"
    load_format: LoadFormat = "auto"
    """`dummy` makes lively random weights from config.json alone, for benchmarks at real sizes."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens; None takes the model's own limit."""
    block_size: int = 16
    num_blocks: int | None = None
    """KV blocks; None divides kv_cache_bytes by the page size."""
    kv_cache_bytes: int | None = None
    """KV memory; None profiles: a share of the memory that is free after the weights are loaded."""
    max_num_seqs: int = 64
    """Requests in one step at the most."""
    max_num_batched_tokens: int = 512
    """Token budget of one step (the chunk budget of chunked prefill)."""
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    """Threads of the core's matrix products; None takes the cores this process may use."""
    cpu_cores: tuple[int, ...] = ()
    """Cores the engine core is pinned to; empty leaves it to the system."""
    attention_backend: str = "auto"
    seed: int = 0
    """Of dummy weights."""
    lease_s: float = 30.0
    """How long held KV outlives the last sign of its reader."""
    max_held_fraction: float = 0.5
    """Share of the blocks that transfers may hold before new hand-over requests wait."""
    reservation_s: float = 30.0
    """How long a request may wait, with blocks reserved, for KV or for its first token."""
    kv_connector: KVConnectorConfig = KVConnectorConfig()
    process_setup: str = ""
    """`module:function` that a core's own process calls first: its owner sets up logging there."""
    process_setup_options: dict[str, str] = {}
    """Passed to it as keyword arguments."""
    model_fingerprint: str = ""
    """Hex digest of the model's identity, mixed into every block hash; empty: the core computes it."""
