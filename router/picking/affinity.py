"""Cache affinity: where prompts and sessions ran, so that the next request can go where its KV is.

Only a preference: it enters the scores, and an overloaded or lost instance is avoided all the same. Bounded by the
settings, least recently used out first; what belonged to a process that is gone is forgotten.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.scheduling.block_hash import extend_block_hashes, root_hash
from router.picking.picker import WeightsShares
from router.picking.scorers import Criteria, RequestFacts, Scoring
from router.picking.settings import PickingSettings
from router.pools.instance_info import InstanceKey, InstanceView, Role
from router.request.generation_request import GenerationRequest

Hashes = tuple[bytes, ...]
"""Of a prompt's full blocks, in order, each chained to the one before."""


class PrefixIndex:
    """Which instance probably has a prompt's KV: block hashes per instance. Belongs to one event loop.

    An estimate: an instance evicts blocks without notice, and a missing block costs a recomputation, not a token. The
    chain of hashes is the engine's (`engine/scheduling/block_hash.py`), rooted here at salt and adapter alone: the
    index compares only its own hashes, and the filters keep instances of another identity apart.

    Invariant: with a block, an instance has every block before it. `record` adds a prompt's blocks from the first one
    on and touches them from the last to the first, so eviction removes a block after those that continue it. Hence
    bisection finds the leading blocks that an instance has.
    """

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: of all instances together, about 200 bytes each."""
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._blocks: dict[InstanceKey, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        """Blocks recorded, all instances together."""
        return self._num_blocks

    @staticmethod
    def hashes(
        token_ids: Sequence[int], block_size: int, salt: str, known: Sequence[bytes] = (), lora: str = ""
    ) -> Hashes:
        """The chained hashes of the full blocks; about 1 µs a block. Prompts of unequal salt or adapter share none.

        `known` are the first ones, which are not computed again.
        """
        chain = list(known)
        extend_block_hashes(chain, root_hash("", cache_salt=salt, lora=lora), array("q", token_ids), block_size)
        return tuple(chain)

    def num_blocks(self, key: InstanceKey, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of `hashes` the instance probably has."""
        blocks = self._blocks.get(key)
        if not blocks or not hashes or hashes[0] not in blocks:
            return 0
        if hashes[-1] in blocks:
            return len(hashes)
        return bisect_left(hashes, True, key=lambda block: block not in blocks)

    def record(self, key: InstanceKey, hashes: Sequence[bytes]) -> None:
        """The instance has computed or loaded these blocks, from the first one on."""
        hashes = hashes[: self._max_blocks]
        blocks = self._blocks.setdefault(key, OrderedDict())
        num_before = len(blocks)
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        self._num_blocks += len(blocks) - num_before
        if self._num_blocks > self._max_blocks:
            self._evict(self._num_blocks - self._max_blocks)

    def _evict(self, num_surplus: int) -> None:
        """Removes the oldest blocks of the instances that have the most, until these have equally many."""
        largest = sorted(self._blocks.values(), key=len, reverse=True)
        self._num_blocks -= num_surplus
        for blocks, size in zip(largest, _sizes_without([*map(len, largest)], num_surplus), strict=False):
            while len(blocks) > size:
                blocks.popitem(last=False)

    def retain(self, keys: Collection[InstanceKey]) -> None:
        """Forgets the blocks of every process that is not among `keys`: it is gone, with its KV."""
        for key in self._blocks.keys() - set(keys):
            self._num_blocks -= len(self._blocks.pop(key))


def _sizes_without(sizes: Sequence[int], num_surplus: int) -> list[int]:
    """What is left of the largest of `sizes` when they give `num_surplus`; `sizes` begins with the largest."""
    left = -num_surplus
    for count, (size, following) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True), 1):
        left += size
        if left >= count * following:
            return [left // count + (index < left % count) for index in range(count)]
    raise AssertionError("the surplus is larger than all of them")


class Sessions:
    """Where each session ran last, per pool. At most `max_sessions`; the least recently used is forgotten."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._instances: OrderedDict[str, dict[Role, InstanceKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def instance(self, session: str, role: Role) -> InstanceKey | None:
        return self._instances.get(session, {}).get(role)

    def record(self, session: str, role: Role, key: InstanceKey) -> None:
        """A request of the session runs there now; an empty session is ignored."""
        if not session:
            return
        self._instances.setdefault(session, {})[role] = key
        self._instances.move_to_end(session)
        while len(self._instances) > self._max_sessions:
            self._instances.popitem(last=False)


class Affinity:
    """The prefix index, the sessions, and the scoring of each pool. One per router, on one event loop."""

    def __init__(self, settings: PickingSettings) -> None:
        self.decode = Scoring.parse(settings.decode_scorers)
        self.prefill = Scoring.parse(settings.prefill_scorers)
        self.domain_weight = settings.domain_weight
        self.weights_shares = WeightsShares.parse(settings.weights_shares)
        self.index = PrefixIndex(settings.max_prefix_blocks)
        self.sessions = Sessions(settings.max_sessions)


@dataclass(slots=True, eq=False)
class RequestAffinity:
    """The affinity of one request and all its choices. Its prompt is hashed on first use, and only once."""

    affinity: Affinity
    request: GenerationRequest
    _hashes: dict[int, Hashes] = field(default_factory=dict)  # by block size

    def facts(self, role: Role, num_tokens: int) -> RequestFacts:
        """For the scorers of one pool. `num_tokens`: whose KV an instance needs before it can go on."""
        session_at = self.affinity.sessions.instance(self._session, role)
        return RequestFacts(num_tokens, session_at, self.num_cached_tokens)

    def criteria(self, num_tokens: int) -> Criteria:
        shares = self.affinity.weights_shares
        return Criteria(
            self.affinity.decode.for_request(self.facts("decode", num_tokens)),
            self.affinity.prefill.for_request(self.facts("prefill", num_tokens)),
            self.num_cached_tokens,
            domain_weight=self.affinity.domain_weight,
            drawn_weights=shares.filter_for(self.request) if shares.shares else None,
        )

    def num_cached_tokens(self, view: InstanceView) -> int:
        """Leading tokens of the prompt that the instance probably has in its prefix cache."""
        block_size = view.info.identity.block_size
        if not len(self.affinity.index) or block_size < 1:
            return 0
        return self.affinity.index.num_blocks(view.key, self._prompt_hashes(block_size)) * block_size

    def record_placement(self, decode: InstanceView, prefill: InstanceView | None) -> None:
        self.affinity.sessions.record(self._session, decode.info.role or "decode", decode.key)
        if prefill is not None:
            self.affinity.sessions.record(self._session, "prefill", prefill.key)

    def record_cached(self, view: InstanceView, emitted_token_ids: Sequence[int] = ()) -> None:
        """The instance has the KV of the prompt, and of `emitted_token_ids` after it."""
        block_size = view.info.identity.block_size
        if block_size < 1:
            return
        hashes = self._prompt_hashes(block_size)
        if emitted_token_ids:
            hashes = self._hashes_of((*self.request.prompt_token_ids, *emitted_token_ids), block_size, hashes)
        self.affinity.index.record(view.key, hashes)

    @property
    def _session(self) -> str:
        """Of its tenant alone: tenants may use equal names. Empty for none."""
        session, tenant = self.request.session, self.request.tenant
        return f"{session}\0{tenant}" if session and tenant else session

    def _prompt_hashes(self, block_size: int) -> Hashes:
        if block_size not in self._hashes:
            self._hashes[block_size] = self._hashes_of(self.request.prompt_token_ids, block_size)
        return self._hashes[block_size]

    def _hashes_of(self, token_ids: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> Hashes:
        return PrefixIndex.hashes(token_ids, block_size, self.request.cache_salt, known, self.request.lora)
