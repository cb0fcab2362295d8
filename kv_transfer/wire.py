"""Conversions between the engine's values and the protos of the attach stream, and the protocol versions spoken."""

from __future__ import annotations

from engine.identity import ModelIdentity
from protos.tandem.v1 import common_pb2

MIN_PROTOCOL_VERSION = 1
MAX_PROTOCOL_VERSION = 1


def identity_to_proto(identity: ModelIdentity) -> common_pb2.Identity:
    """The same fields on the wire."""
    return common_pb2.Identity(**{name: getattr(identity, name) for name in identity.__struct_fields__})


def identity_from_proto(identity: common_pb2.Identity) -> ModelIdentity:
    """As the peer claims it, its fingerprint included."""
    return ModelIdentity(**{name: getattr(identity, name) for name in ModelIdentity.__struct_fields__})
