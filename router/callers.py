"""Whose a call is, and what is kept apart by that: its share of the house, its prefix cache, its labels.

    authorization: Bearer … ──the file of tokens──▶ tenant, authenticated ─▶ a salt and labels of its own
    admission.tenant_key ──a trusted gateway──▶ tenant, named             ─▶ labels of its own

With a file of tokens nobody else's word on the tenant counts. The salt is part of every KV block's identity, so equal
prompts of two tenants share no block, neither in an instance's memory nor in a store; and how long an answer takes
tells nobody what others have asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from router.admission.tenants import NOBODY, tenant_of
from serving.credentials import Tokens

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    tenant: str = NOBODY
    is_authenticated: bool = False

    def salt(self, own: str) -> str:
        """The cache salt of a request for which the client asks for the salt `own`: nobody else's, whatever he asks."""
        if not self.is_authenticated:
            return own
        # A tenant's name has no NUL in it, so no two pairs are written alike.
        return hashlib.sha256(f"tandem tenant\0{self.tenant}\0{own}".encode()).hexdigest()

    def label(self, own: str) -> str:
        """The name by which a request of this caller is aborted: a tenant ends its own alone."""
        return f"{self.tenant}\0{own}" if self.tenant else own


class Callers:
    """Tells whose a call is."""

    def __init__(self, tokens: Tokens | None = None, tenant_key: str = "") -> None:
        """`tokens` None takes a gateway's word under the metadata key `tenant_key`; without either all are one."""
        self._tokens = tokens
        self._tenant_key = tenant_key

    def of(self, metadata: Metadata | None) -> Caller:
        """The caller of a call with this metadata. Raises Unauthenticated or InvalidArgument."""
        if self._tokens is not None:
            return Caller(self._tokens.tenant_of(metadata), is_authenticated=True)
        return Caller(tenant_of(metadata, self._tenant_key))
