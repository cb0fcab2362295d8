"""The decode role's own defaults."""

from __future__ import annotations

from instance.config import EngineSection, InstanceSettings
from serving.settings import setting


class DecodeEngine(EngineSection):
    """How the engine core of a decode instance computes: many requests, short chunks, so that no token waits long."""

    max_num_seqs: int = setting(128, "Requests in one step at the most.", flag="--max-num-seqs", ge=1)
    max_num_batched_tokens: int = setting(
        512, "Token budget of one step: the chunk of chunked prefill.", flag="--max-num-batched-tokens", ge=1
    )


class DecodeSettings(InstanceSettings):
    """One decode instance."""

    engine: DecodeEngine = DecodeEngine()
