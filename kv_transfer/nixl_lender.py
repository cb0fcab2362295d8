"""The agent whose memory peers read, and what tells a peer where a transfer's pages are.

It is made once and never rebuilt: peers hold its metadata for as long as this process lives.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.nixl_agent import NixlAgent, Region
from kv_transfer.nixl_metadata import VERSION, TransferMetadata, encode
from kv_transfer.nixl_ucx import UcxSettings
from kv_transfer.nixl_words import LeaseWords


class Lender:
    """Owns the agent. Its name has the epoch in it, so that a process that has restarted is another peer."""

    def __init__(
        self, epoch: bytes, pages: Region, words: LeaseWords, settings: UcxSettings, key: bytes | None
    ) -> None:
        self._epoch = epoch
        self._pages = pages
        self._words = words.region
        self._key = key
        self._agent = NixlAgent(f"lends-{epoch.hex()}", settings)
        for region in (pages, self._words):
            self._agent.register(region)
        self._agent_metadata = self._agent.metadata()

    @property
    def name(self) -> str:
        """Of its agent."""
        return self._agent.name

    def describe(self, block_ids: Sequence[int], word_index: int, word: bytes) -> bytes:
        """Connector metadata of a transfer whose pages are in these blocks, the tail's last."""
        metadata = TransferMetadata(
            version=VERSION,
            agent_name=self._agent.name,
            epoch=self._epoch,
            agent_metadata=self._agent_metadata,
            memory_type=self._pages.memory_type,
            device_id=self._pages.device_id,
            pages_address=self._pages.address,
            page_bytes=self._pages.span_bytes,
            num_blocks=self._pages.num_spans,
            words_address=self._words.address,
            num_words=self._words.num_spans,
            word_index=word_index,
            word=word,
            block_ids=list(block_ids),
        )
        return encode(metadata, self._key)

    def close(self) -> None:
        """Destroy the agent. Only while nobody reads: see nixl_ucx."""
        self._agent.close()
