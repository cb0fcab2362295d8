"""A validated request, as everything behind validation sees it: ids, not text; every default resolved."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from protos.tandem.v1 import common_pb2
from router.sampling import to_wire


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the client wants. Immutable; each of its `n` choices runs as requests of their own on the instances."""

    label: str
    """The client's name for it; need not be unique, so nothing is keyed by it but Abort."""
    request_id: str
    """This router's name for it, unique and unguessable."""
    model: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """With max_tokens and seed filled in."""
    seed: int
    priority: int = 0
    cache_salt: str = ""
    session: str = ""
    """The conversation it belongs to, for affinity alone."""
    deadline_s: float | None = None
    """Monotonic time at which it must be over."""
    tenant: str = ""
    """Whose it is, as a trusted gateway says: its part of a full house."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        """Output tokens of one choice at the most."""
        assert self.params.max_tokens is not None, "validation fills max_tokens in"
        return self.params.max_tokens

    def for_instance(
        self, *, choice: int, stream_epoch: int, emitted_token_ids: list[int]
    ) -> common_pb2.InstanceRequest:
        """One attempt at one choice, on the wire."""
        return common_pb2.InstanceRequest(
            request_id=f"{self.request_id}-{choice}-{stream_epoch}",
            stream_epoch=stream_epoch,
            choice=choice,
            prompt_token_ids=self.prompt_token_ids,
            emitted_token_ids=emitted_token_ids,
            sampling=to_wire(self.params, self.seed),
            priority=self.priority,
            cache_salt=self.cache_salt,
        )
