"""A value of each field of the wire's SamplingParams, so that a test finds the places that lack a new field."""

from __future__ import annotations

from typing import Any

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import common_pb2

_STRUCTURED: dict[str, Any] = {
    "stop": ["x"],
    "stop_token_ids": [1],
    "bad_words": ["x"],
    "logit_bias": {1: 1.0},
    "allowed_token_ids": common_pb2.TokenIds(ids=[1]),
    "bad_word_ids": [common_pb2.TokenIds(ids=[1])],
    "choice": common_pb2.Texts(texts=["x"]),
}


def a_value_of(name: str) -> Any:
    """Not the default of the field, which would come back although it was lost."""
    if name in _STRUCTURED:
        return _STRUCTURED[name]
    kind = type(getattr(common_pb2.SamplingParams(), name))
    return not getattr(SamplingParams(), name) if kind is bool else kind("2")
