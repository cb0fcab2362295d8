"""What this router remembers of where prompts and sessions ran, so that the next one can go where its KV is.

Only a preference: what is remembered enters scores, and an overloaded or lost instance is left all the same. Bounded
by the settings, least recently used out first; what belonged to a process that is gone is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from router.config import PickingSettings
from router.picking.prefix_index import Hashes, PrefixIndex
from router.picking.scorers import Criteria, RequestFacts
from router.pools.instances import InstanceKey, InstanceView, Role
from router.request import GenerationRequest


class Sessions:
    """Where each session ran last, per pool. At most `max_sessions`, the least recently used is forgotten."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._instances: OrderedDict[str, dict[Role, InstanceKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def instance(self, session: str, role: Role) -> InstanceKey | None:
        """Where it ran last in that pool; None when nobody knows, or it has no name."""
        return self._instances.get(session, {}).get(role)

    def ran(self, session: str, role: Role, key: InstanceKey) -> None:
        """Something of it runs there now."""
        if not session:
            return
        self._instances.setdefault(session, {})[role] = key
        self._instances.move_to_end(session)
        while len(self._instances) > self._max_sessions:
            self._instances.popitem(last=False)


class Affinity:
    """Both memories, and the scoring of each pool that they serve. One per router, on one event loop."""

    def __init__(self, settings: PickingSettings, *, decides_by_prefix: bool = False) -> None:
        self.decode = settings.decode_scoring
        self.prefill = settings.prefill_scoring
        self.index = PrefixIndex(settings.max_prefix_blocks)
        self.sessions = Sessions(settings.max_sessions)
        self.keeps_prefixes = decides_by_prefix or any(
            scoring.may_ask_for_prefixes for scoring in (self.decode, self.prefill)
        )
        """Whether anybody will ask; else nothing is hashed and nothing kept."""

    def of(self, request: GenerationRequest) -> RequestAffinity:
        """The part that concerns one request and all its choices."""
        return RequestAffinity(self, request)

    def retain(self, keys: Collection[InstanceKey]) -> None:
        """Forgets the blocks of every process that is not among `keys`: those that the pools know, ready or not."""
        for key in self.index.instances() - set(keys):
            self.index.forget(key)


class RequestAffinity:
    """What is remembered for one request. Its prompt is hashed when somebody first asks, and then only once."""

    def __init__(self, affinity: Affinity, request: GenerationRequest) -> None:
        self._affinity = affinity
        self._request = request
        self._hashes: dict[int, Hashes] = {}  # by block size

    def facts(self, role: Role, num_tokens: int) -> RequestFacts:
        """For the scorers of one pool. `num_tokens`: whose KV an instance needs before it can go on."""
        session_at = self._affinity.sessions.instance(self._request.session, role)
        return RequestFacts(num_tokens, session_at, self.num_cached_tokens)

    def criteria(self, num_tokens: int) -> Criteria:
        """What a plan for the request goes by."""
        return Criteria(
            self._affinity.decode.for_request(self.facts("decode", num_tokens)),
            self._affinity.prefill.for_request(self.facts("prefill", num_tokens)),
            self.num_cached_tokens,
        )

    def num_cached_tokens(self, view: InstanceView) -> int:
        """Leading tokens of the prompt that the instance is believed to have in its prefix cache."""
        block_size = view.info.identity.block_size
        if not self._affinity.keeps_prefixes or not len(self._affinity.index) or block_size < 1:
            return 0
        return self._affinity.index.num_blocks(view.key, self._prompt_hashes(block_size)) * block_size

    def placed(self, decode: InstanceView, prefill: InstanceView | None) -> None:
        """An attempt goes to these instances."""
        self._affinity.sessions.ran(self._request.session, "decode", decode.key)
        if prefill is not None:
            self._affinity.sessions.ran(self._request.session, "prefill", prefill.key)

    def cached(self, view: InstanceView, emitted_token_ids: Sequence[int] = ()) -> None:
        """The instance has the KV of the prompt, and of `emitted_token_ids` after it."""
        block_size = view.info.identity.block_size
        if not self._affinity.keeps_prefixes or block_size < 1:
            return
        hashes = self._prompt_hashes(block_size)
        if emitted_token_ids:
            token_ids = (*self._request.prompt_token_ids, *emitted_token_ids)
            hashes = PrefixIndex.extended(hashes, token_ids, block_size, self._request.cache_salt)
        self._affinity.index.record(view.key, hashes)

    def _prompt_hashes(self, block_size: int) -> Hashes:
        hashes = self._hashes.get(block_size)
        if hashes is None:
            request = self._request
            hashes = PrefixIndex.hashes(request.prompt_token_ids, block_size, request.cache_salt)
            self._hashes[block_size] = hashes
        return hashes
