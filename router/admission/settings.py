"""Settings of admission: the limits of the router and of its tenants."""

from __future__ import annotations

import re

from pydantic import field_validator

from serving.settings import MAX_TIME_S, Section, setting


class TenantSettings(Section):
    """What a tenant gets while others compete with it."""

    weight: float = setting(1.0, "Its share under load, relative to the other tenants' weights.", gt=0, le=1e9)
    max_requests: int | None = setting(None, "Its requests in flight; none: limited by capacity only.", ge=1)
    max_tokens: int | None = setting(
        None, "Its tokens in flight, prompt and expected output; none: limited by capacity only.", ge=1
    )


class AdmissionSettings(Section):
    """How much the router admits at one time, what waits, and what is rejected. docs/admission.md says why."""

    max_requests: int = setting(1024, "Requests in flight at this router.", ge=1)
    max_tokens: int = setting(
        1 << 23, "Prompt and expected output tokens of the requests in flight, every choice counted.", ge=1
    )
    sequence_fraction: float = setting(
        1.1, "Choices in flight, relative to those that the decode instances run at one time.", gt=0
    )
    block_fraction: float = setting(
        1.0, "Expected KV blocks of the requests in flight, relative to the decode instances' blocks.", gt=0
    )
    prefill_steps: float = setting(
        16.0, "Steps of the prefilling instances that the prompts without a first token may fill.", gt=0
    )
    expected_tokens: int = setting(
        256, "Output tokens expected of a choice (at most its max_tokens) until the router has measured some.", ge=1
    )
    num_routers: int = setting(
        1,
        "Routers that share these pools, unless signals.routers finds them; each is guaranteed an equal part.",
        ge=1,
    )
    queue_timeout_s: float = setting(
        5.0,
        "Seconds that a request may wait to be admitted, and after it has missed its TTFT objective, until an instance "
        "begins its prompt.",
        gt=0,
    )
    instance_wait_s: float = setting(
        0.0,
        "Seconds that a request waits while there is no decode instance, such as for the first one of a pool that was "
        "scaled to 0; at most max_queued wait. 0: it is rejected at once.",
        ge=0,
    )
    max_queued: int = setting(256, "Requests of one tenant that may wait; 0: none waits.", ge=0)
    max_queued_tokens: int = setting(
        1 << 20, "Tokens of all waiting requests; above it, no tenant may queue more than an equal part.", ge=0
    )
    yield_after_s: float = setting(
        1.0, "Seconds that a stream runs before its slot may go to a tenant that has less in flight.", ge=0
    )
    retry_after_s: float = setting(1.0, "Shortest retry hint in seconds.", gt=0, le=MAX_TIME_S)
    max_retry_after_s: float = setting(
        10.0, "Longest retry hint in seconds; random jitter adds up to half of it.", gt=0, le=MAX_TIME_S
    )
    tenant_key: str = setting(
        "",
        "Metadata key in which a trusted gateway names the tenant; empty: all requests belong to one tenant. The "
        "gateway must remove it from what clients send.",
    )
    tenants: dict[str, TenantSettings] = setting({}, "Tenants with a weight or limits of their own, by name.")
    other_tenants: TenantSettings = TenantSettings()
    max_tenants: int = setting(1024, "Tenants tracked separately at one time; further ones share one queue.", ge=1)

    @field_validator("tenant_key")
    @classmethod
    def _is_metadata_key(cls, key: str) -> str:
        if key and (not re.fullmatch(r"[a-z0-9_.-]+", key) or key.endswith("-bin")):
            raise ValueError("must be a metadata key of text: of [a-z0-9_.-], not ending in -bin")
        return key

    def share_of(self, tenant: str) -> TenantSettings:
        return self.tenants.get(tenant, self.other_tenants)
