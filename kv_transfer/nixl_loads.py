"""The decode side where pages are read out of the holder's memory: which pages, from where, and what they must be.

    reserve ─▶ progress(connector_metadata) ─▶ source known ─▶ progress(digests) … ─▶ LoadOps ─▶ reads

Metadata or digests that do not fit fail the load: what they were for is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import KVProgress
from engine.request import Request
from kv_transfer.loads import Load, Loader, LoadOp
from kv_transfer.nixl_digest import DIGEST_BYTES
from kv_transfer.nixl_metadata import MetadataError, TransferMetadata, decode
from kv_transfer.page_naming import PageNaming


@dataclass(slots=True)
class Source:
    """Where the pages of one load are. `digests` has one for each page that was announced, unless they are off."""

    metadata: TransferMetadata
    digests: list[bytes] = field(default_factory=list)


class MemoryLoader(Loader):
    """Checks the holder's word before it believes it. `key` None: digests are off."""

    def __init__(self, naming: PageNaming, *, load_timeout_s: float, key: bytes | None) -> None:
        super().__init__(naming, load_timeout_s=load_timeout_s)
        self._key = key
        self._sources: dict[str, Source] = {}

    def source(self, op: LoadOp) -> Source:
        """Where this operation's page is. The operation is one that `take_ops` has just given."""
        return self._sources[op.request_id]

    def finished(self, request: Request) -> bool:
        self._sources.pop(request.request_id, None)
        return super().finished(request)

    def progress(self, command: KVProgress, now: float) -> None:
        load = self._loads.get(command.request_id)
        if load is None or load.failure is not None or load.complete:
            return
        if command.failed is None and (problem := self._take_in(load, command)) is not None:
            command = KVProgress(command.request_id, 0, failed=problem)
        super().progress(command, now)

    def expire(self, now: float) -> int:
        """Nothing: each read has a deadline of its own, which the connector watches."""
        return 0

    @property
    def next_deadline(self) -> float | None:
        return None

    def _take_in(self, load: Load, command: KVProgress) -> str | None:
        """Keep what the holder says; returns what is wrong with it."""
        source = self._sources.get(load.request_id)
        if source is None and (command.connector_metadata or command.num_ready_blocks or command.num_tokens):
            try:
                metadata = decode(
                    command.connector_metadata,
                    self._key,
                    page_bytes=self._naming.layout.bytes_per_block,
                    num_pages=len(load.pages),
                )
            except MetadataError as error:
                return str(error)
            source = self._sources[load.request_id] = Source(metadata)
        if source is None or self._key is None:
            return None
        source.digests += command.digests
        num_full = min(command.num_ready_blocks, load.num_full_blocks)
        num_announced = len(load.pages) if command.num_tokens == load.num_tokens else num_full
        if any(len(digest) != DIGEST_BYTES for digest in command.digests) or len(source.digests) < num_announced:
            return f"{len(source.digests)} good digests for {num_announced} pages: is digest off at the holder?"
        if len(source.digests) > len(load.pages):
            return f"{len(source.digests)} digests for {len(load.pages)} pages"
        return None
