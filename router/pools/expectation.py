"""What must answer at an address of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from router.pools.instances import InstanceInfo, Role


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a pool is for."""

    role: Role
    tokenizer_digest: str = ""
    """Of the tokenizer that the router encodes with; empty: not looked at. Another one would read the ids as other
    text."""

    def mismatch(self, info: InstanceInfo) -> str | None:
        """Why `info` is not what the pool is for."""
        if info.role not in (None, self.role):
            return f"its role is {info.role}, not {self.role}"
        theirs = info.identity.tokenizer_digest
        if self.tokenizer_digest and theirs and theirs != self.tokenizer_digest:
            return f"its tokenizer_digest is {theirs}, the router's {self.tokenizer_digest}"
        return None
