"""Block identity: chained SHA-256, equal in every process, version and language.

    h_0 = SHA-256(root ‖ tokens_0),  h_i = SHA-256(h_{i-1} ‖ tokens_i)
    root = SHA-256("tandem-block-v1" ‖ len ‖ fingerprint ‖ len ‖ cache_salt ‖ len ‖ lora)

Tokens are little-endian int64. Free of torch: the router uses it too.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

_DOMAIN = b"tandem-block-v1"


def root_hash(fingerprint: str, *, cache_salt: str = "", lora: str = "") -> bytes:
    """The parent of a prompt's first block. Parts are length-prefixed, so that no two lists of parts collide."""
    digest = hashlib.sha256(_DOMAIN)
    for part in (fingerprint, cache_salt, lora):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    tokens = array("q", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return hashlib.sha256(parent + tokens.tobytes()).digest()


def extend_block_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, token_ids[start : start + block_size]))
