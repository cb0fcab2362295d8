"""Shares of new requests by weights, while instances with several weights run: a canary, or a slow change of a model.

the session, else the request ──hash──▶ a point in 0 … 1 ──▶ the share that it falls into ──▶ a filter of both pools

Pure, without state: every router, choice and attempt of a request draws the same, and a session stays with its weights
while the shares stay. A larger share keeps the sessions that a smaller one had where it is the first of the setting.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from router.pools.instance_info import InstanceView
from router.request.generation_request import GenerationRequest

_DIGEST = re.compile(r"[0-9a-f]{4,}")
SHOWN_DIGITS = 12
"""Of a digest, in messages and metrics."""


@dataclass(frozen=True, slots=True)
class WeightsShares:
    """The beginning of a weights' digest with its share of the requests; other weights get what is left."""

    shares: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> WeightsShares:
        """From `digest=share,…`. Raises ValueError, which says what is allowed."""
        shares = tuple(_share(part.strip()) for part in text.split(",") if part.strip())
        total = sum(share for _, share in shares)
        if total > 1 + 1e-9:
            raise ValueError(f"the shares sum to {total:g}; at most 1 is allowed")
        digests = sorted(digest for digest, _ in shares)
        for first, second in pairwise(digests):
            if second.startswith(first):
                raise ValueError(f"{second} continues {first}: one instance would have two shares")
        return cls(shares)

    def filter_for(self, request: GenerationRequest) -> Callable[[InstanceView], str | None]:
        """Passes the instances whose weights the request was drawn for."""
        drawn, point, digests = "", _point(request), tuple(digest for digest, _ in self.shares)
        for digest, share in self.shares:
            if point < share:
                drawn = digest
                break
            point -= share

        def check(view: InstanceView) -> str | None:
            weights = view.info.identity.weights_digest
            if weights.startswith(drawn) if drawn else not weights.startswith(digests):
                return None
            return f"this request was drawn for other weights than {weights[:SHOWN_DIGITS]} (picking.weights_shares)"

        return check


def _point(request: GenerationRequest) -> float:
    """Evenly from 0 to 1, without 1."""
    name = f"session {request.session}" if request.session else f"request {request.request_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) / 2**48


def _share(text: str) -> tuple[str, float]:
    digest, equals, share = (part.strip() for part in text.partition("="))
    if not equals:
        raise ValueError(f"{digest!r} has no share; write for example {digest}=0.05")
    if not _DIGEST.fullmatch(digest):
        wanted = "at least 4 hexadecimal digits, as `tandem pools --json` shows"
        raise ValueError(f"{digest!r} is no digest of weights: {wanted}")
    try:
        number = float(share)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"{digest}={share}: a share is a number from 0 to 1")
    return digest, number
