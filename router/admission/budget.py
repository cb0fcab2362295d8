"""What the requests in flight hold, as one sum, and which limit one more of them would exceed.

Charged is what a request is expected to come to, not the most that it may: see output_lengths.py.
"""

from __future__ import annotations

from typing import NamedTuple

from router.admission.capacity import Limits
from router.request import GenerationRequest


class Charge(NamedTuple):
    """What one request counts for while it is in flight."""

    num_sequences: int
    num_tokens: int
    """Prompt and expected output of every choice."""
    num_blocks: int
    num_prefill_tokens: int
    """Given back with the first token."""

    @classmethod
    def of(cls, request: GenerationRequest, num_output_tokens: int, block_size: int) -> Charge:
        """For `request`, of whose choices each is expected to generate `num_output_tokens`."""
        num_choices, num_tokens = request.params.n, request.num_prompt_tokens + num_output_tokens
        num_blocks = -(-num_tokens // block_size)
        return cls(num_choices, num_choices * num_tokens, num_choices * num_blocks, request.num_prompt_tokens)


class Budget:
    """The sum. Whatever is taken is given back, once."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_blocks = 0
        self.num_prefill_tokens = 0

    def take(self, charge: Charge) -> None:
        """A request begins."""
        self._add(charge, 1)
        self.num_prefill_tokens += charge.num_prefill_tokens

    def prefilled(self, charge: Charge) -> None:
        """Its first token is there."""
        self.num_prefill_tokens -= charge.num_prefill_tokens

    def give_back(self, charge: Charge) -> None:
        """It is over; `prefilled` has been called."""
        self._add(charge, -1)

    def lack(self, charge: Charge, limits: Limits) -> str | None:
        """What there is too little of for one more request, None if it fits. A request alone is never too big."""
        if not self.num_requests:
            return None
        if self.num_requests >= limits.num_requests:
            return f"{self.num_requests} requests are in flight, the most allowed"
        for name, held, more, limit in (
            ("tokens", self.num_tokens, charge.num_tokens, limits.num_tokens),
            ("choices", self.num_sequences, charge.num_sequences, limits.num_sequences),
            ("KV blocks", self.num_blocks, charge.num_blocks, limits.num_blocks),
        ):
            if held + more > limit:
                return f"{more} {name} more than the {held} in flight would exceed {limit:.0f}"
        if self.num_prefill_tokens >= limits.num_prefill_tokens:
            return f"{self.num_prefill_tokens} prompt tokens are being prefilled, the most allowed"
        return None

    def _add(self, charge: Charge, sign: int) -> None:
        self.num_requests += sign
        self.num_sequences += sign * charge.num_sequences
        self.num_tokens += sign * charge.num_tokens
        self.num_blocks += sign * charge.num_blocks
