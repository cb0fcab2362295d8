"""The decode role: serves what every instance serves (instance/decoding.py), with defaults for many streams."""

from __future__ import annotations

from instance import decoding
from instance.server import Role
from instance.settings import EngineSection, InstanceSettings
from protos.tandem.v1 import instance_pb2
from serving.settings import setting

ROLE = Role("decode", instance_pb2.ROLE_DECODE, decoding.SERVICE)


class DecodeEngine(EngineSection):
    """How the engine core of a decode instance computes: many requests, short chunks, so that no token waits long."""

    max_num_seqs: int = setting(128, "Maximum number of requests in one step.", flag="--max-num-seqs", ge=1)


class DecodeSettings(InstanceSettings):
    engine: DecodeEngine = DecodeEngine()
