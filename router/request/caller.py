"""Identifies the caller of a request, which decides its admission share, its prefix cache and its labels.

    authorization: Bearer … ──the file of tokens──▶ tenant, authenticated ─▶ a salt and labels of its own
    admission.tenant_key ──a trusted gateway──▶ tenant, named             ─▶ labels of its own

With a file of tokens the tenant comes from the token alone. The salt is part of every KV block's identity, so equal
prompts of two tenants share no block, neither in an instance's memory nor in a store, and the time to an answer reveals
nothing about the prompts of others.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from serving.auth import BearerTokens, Metadata
from serving.errors import invalid_argument

_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_ALLOWED = "1..128 of [A-Za-z0-9._:@/-]"

NO_TENANT = ""  # the tenant of requests that name none


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a call, and whether a token has proved it."""

    tenant: str = NO_TENANT
    is_authenticated: bool = False
    is_one_of_several: bool = False
    """Whether the settings distinguish it from other tenants."""

    def salt(self, own: str) -> str:
        """The cache salt of a request that names the salt `own`: never another tenant's, whatever it names."""
        if not self.is_authenticated:
            return own
        # A tenant's name has no NUL in it, so different pairs give different strings.
        return hashlib.sha256(f"tandem tenant\0{self.tenant}\0{own}".encode()).hexdigest()

    def label(self, own: str) -> str:
        """The key under which a request of this caller is aborted: a tenant can abort only its own."""
        return f"{self.tenant}\0{own}"

    def instance_priority(self, own: int) -> int:
        """The priority of a request at the instances, which know no tenants: there it would pass those of others."""
        return 0 if self.is_one_of_several else own


@dataclass(frozen=True, slots=True)
class Callers:
    """Without `tokens` the metadata key `tenant_key` names the tenant; without either all are one tenant."""

    tokens: BearerTokens | None = None
    tenant_key: str = ""

    def of(self, metadata: Metadata | None) -> Caller:
        """The caller of a call with this metadata. Raises Unauthenticated or InvalidArgument."""
        if self.tokens is not None:
            tenant, is_one_of_several = self.tokens.tenant_of(metadata), self.tokens.has_several_tenants
            return Caller(tenant, is_authenticated=True, is_one_of_several=is_one_of_several)
        return Caller(tenant_of(metadata, self.tenant_key), is_one_of_several=bool(self.tenant_key))


def tenant_of(metadata: Metadata | None, key: str) -> str:
    """The tenant that `metadata` names under `key`, else NO_TENANT. Raises InvalidArgument for a bad name or two."""
    values = [value for name, value in metadata or () if name == key] if key else []
    if not values:
        return NO_TENANT
    if len(values) > 1:
        raise invalid_argument(key, f"{len(values)} values", "one")
    if not isinstance(values[0], str) or not _TENANT.fullmatch(values[0]):
        raise invalid_argument(key, "not a tenant's name", _ALLOWED)
    return values[0]
