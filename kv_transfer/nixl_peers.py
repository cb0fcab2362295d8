"""The holders that one reading agent knows: added when first read from, kept while they are lately used.

    unknown ──first read──▶ known ──disconnected, its reads ended──▶ unknown
                              └──least lately used, nothing in flight──▶ unknown

A holder that has restarted has another epoch and so another name: a new peer, whose old self is forgotten by disuse or
by its first error. One thread, so that nothing of one peer ever runs beside the adding or removing of another.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.nixl_agent import Handle, NixlAgent, NixlError
from kv_transfer.nixl_metadata import TransferMetadata


@dataclass(slots=True, eq=False)
class Peer:
    """One holder. Lists name its pages and words by number."""

    name: str
    agent_metadata: bytes
    pages: Handle
    words: Handle
    num_reads: int = 0
    """In flight."""
    num_moving: int = 0
    """Of these, those whose pages are under way."""
    broken: bool = False
    """The connection is lost: nothing more is begun, and it goes when nothing is in flight."""


class Peers:
    """Owns the peers of one agent."""

    def __init__(self, agent: NixlAgent, *, max_peers: int) -> None:
        self._agent = agent
        self._max_peers = max_peers
        self._by_name: OrderedDict[str, Peer] = OrderedDict()  # least lately used first

    def get(self, metadata: TransferMetadata) -> Peer:
        """The holder of this transfer. Raises NixlError where it cannot be reached or is not who it says."""
        peer = self._by_name.get(metadata.agent_name)
        if peer is None:
            self._make_room()
            peer = self._by_name[metadata.agent_name] = self._add(metadata)
        elif peer.broken or peer.agent_metadata != metadata.agent_metadata:
            raise NixlError(ConnectionError(f"{metadata.agent_name} was lost, or says two things of itself"))
        self._by_name.move_to_end(peer.name)
        return peer

    def drop_if_broken(self, peer: Peer) -> None:
        """Forget a broken peer once nothing of it is in flight."""
        if peer.broken and not peer.num_reads and self._by_name.get(peer.name) is peer:
            self._remove(peer)

    def drop_all(self) -> None:
        """Forget every peer."""
        for peer in list(self._by_name.values()):
            self._remove(peer)

    def _add(self, metadata: TransferMetadata) -> Peer:
        name = self._agent.add_peer(metadata.agent_metadata)
        if name != metadata.agent_name:
            self._agent.remove_peer(name)
            raise NixlError(ConnectionError(f"metadata of {name!r} under the name {metadata.agent_name!r}"))
        lists: list[Handle] = []
        try:
            for region in (metadata.pages, metadata.words):
                lists.append(self._agent.prepare(region, name))
        except NixlError:
            for handle in lists:
                self._agent.release_list(handle)
            self._agent.remove_peer(name)
            raise
        return Peer(name, metadata.agent_metadata, pages=lists[0], words=lists[1])

    def _remove(self, peer: Peer) -> None:
        del self._by_name[peer.name]
        self._agent.release_list(peer.pages)
        self._agent.release_list(peer.words)
        self._agent.remove_peer(peer.name)

    def _make_room(self) -> None:
        idle = [peer for peer in self._by_name.values() if not peer.num_reads]
        for peer in idle[: max(0, len(self._by_name) - self._max_peers + 1)]:
            self._remove(peer)
