"""Settings of the pools: where their instances are, and when one counts as unavailable."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, field_validator, model_validator

from router.pools.discovery import parse_targets
from serving.channel import MAX_INT
from serving.settings import MAX_TIME_S, Section, setting


def _checked(text: str) -> str:
    parse_targets(text)
    return text


Targets = Annotated[str, AfterValidator(_checked)]
"""The type of a setting that lists addresses as `parse_targets` reads them."""


class PoolSettings(Section):
    """The instances, and when one counts as unavailable."""

    prefill: Targets = setting(
        "", "Prefill instances: host:port, dns:name:port, kubernetes:service:port; comma-separated.", flag="--prefill"
    )
    decode: Targets = setting(
        "", "Decode instances: host:port, dns:name:port, kubernetes:service:port; comma-separated.", flag="--decode"
    )
    stack: str = setting(
        "",
        "unix:/PATH of the local stack that owns the instances, in place of the two lists; used to discover and "
        "resize them.",
        flag="--stack",
    )
    dns_interval_s: float = setting(5.0, "Seconds after which dns: names are resolved again, within a fifth.", gt=0)
    check_tokenizer: bool = setting(True, "Leave out instances whose tokenizer files differ from the router's.")
    beat_timeout_s: float = setting(
        2.0, "Seconds without a load report after which an instance is unavailable.", gt=0, le=MAX_TIME_S
    )
    core_silence_timeout_s: float = setting(
        2.0,
        "Seconds of silence of an engine core after which its instance is unavailable, or 5 of its steps if longer.",
        gt=0,
    )
    settle_s: float = setting(
        1.0,
        "Seconds that a starting router which could serve waits for the rest of its instances before it is ready.",
        ge=0,
    )
    min_backoff_s: float = setting(0.1, "First wait in seconds before reconnecting to an instance.", gt=0)
    max_backoff_s: float = setting(
        0.5,
        "Longest wait in seconds before reconnecting to an instance, in place of channel.max_backoff_ms, which is for "
        "other routers.",
        ge=0.1,
        le=MAX_INT // 1000,
    )

    @field_validator("stack")
    @classmethod
    def _is_socket(cls, stack: str) -> str:
        if stack and not stack.startswith("unix:/"):
            raise ValueError("is not unix:/PATH, the socket of a local stack; `tandem up` gives it to its router")
        return stack

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.stack and (self.prefill or self.decode):
            raise ValueError("stack defines both pools: leave out prefill and decode, or stack")
        return self
