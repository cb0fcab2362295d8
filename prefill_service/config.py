"""Settings of the prefill role: the defaults in which it differs."""

from __future__ import annotations

from instance.config import EngineSection, InstanceSettings
from serving.settings import setting


class PrefillEngine(EngineSection):
    """How the engine core of a prefill instance computes: few requests, long chunks."""

    max_num_seqs: int = setting(16, "Maximum number of requests in one step.", flag="--max-num-seqs", ge=1)
    max_num_batched_tokens: int = setting(
        2048, "Token budget of one step: the chunk of chunked prefill.", flag="--max-num-batched-tokens", ge=1
    )


class PrefillSettings(InstanceSettings):
    engine: PrefillEngine = PrefillEngine()
