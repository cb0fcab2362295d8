"""Whose a request is: told by a gateway in front of the router that has authenticated it, never by the client itself.

Until a deployment names the metadata key that its gateway sets (and strips from what clients send), everybody is one
tenant and every such header is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from router.admission.fair_queue import Share
from router.config import AdmissionSettings
from serving.errors import invalid_argument

_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_ALLOWED = "1..128 of [A-Za-z0-9._:@/-]"

NOBODY = ""
"""The tenant of requests that name none: one like any other."""


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str:
    """The tenant that `metadata` names under `key`; NOBODY without a key or a value. Raises InvalidArgument for a name
    that is none or for two of them."""
    values = [value for name, value in metadata or () if name == key] if key else []
    if not values:
        return NOBODY
    if len(values) > 1:
        raise invalid_argument(key, f"{len(values)} values", "one")
    if not isinstance(values[0], str) or not _TENANT.fullmatch(values[0]):
        raise invalid_argument(key, "not a tenant's name", _ALLOWED)
    return values[0]


def share_of(tenant: str, settings: AdmissionSettings) -> Share:
    """What a tenant is entitled to: its own entry of the settings, or that of everybody else."""
    section = settings.tenants.get(tenant, settings.other_tenants)
    return Share(section.weight, section.max_requests, section.max_tokens)
