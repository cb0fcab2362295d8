"""Settings of the decode role: the defaults in which it differs."""

from __future__ import annotations

from instance.config import EngineSection, InstanceSettings
from serving.settings import setting


class DecodeEngine(EngineSection):
    """How the engine core of a decode instance computes: many requests, short chunks, so that no token waits long."""

    max_num_seqs: int = setting(128, "Maximum number of requests in one step.", flag="--max-num-seqs", ge=1)


class DecodeSettings(InstanceSettings):
    engine: DecodeEngine = DecodeEngine()
