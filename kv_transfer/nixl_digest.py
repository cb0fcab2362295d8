"""The digest of a page that is read from memory and so has no header: keyed BLAKE3 over what a header would say, and
the page.

Its first bytes are others than a stored page's, so that neither digest ever passes for the other. The writer's epoch is
in it: what a process that has restarted said before counts no more.
"""

from __future__ import annotations

import struct

import blake3

from kv_transfer.page import Buffer, PageSpec

DIGEST_BYTES = 32
_LABEL = b"TNDMMEM1"
_FIELDS = struct.Struct("<8s32s32sII32s32sQ?16s")


def page_digest(spec: PageSpec, page: Buffer, *, key: bytes, epoch: bytes) -> bytes:
    """32 bytes over `page`, what it must be, and who holds it."""
    hasher = blake3.blake3(
        _FIELDS.pack(
            _LABEL,
            spec.fingerprint,
            spec.layout_digest,
            spec.shard,
            spec.num_tokens,
            spec.block_hash,
            spec.parent_hash,
            spec.payload_bytes,
            spec.is_tail,
            epoch,
        ),
        key=key,
    )
    hasher.update(page)
    return bytes(hasher.digest())
