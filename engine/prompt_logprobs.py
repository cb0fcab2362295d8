"""Log-probabilities of a prompt's own tokens, collected while the prompt is computed.

    first share ─▶ collecting, share by share ─▶ told with the first draw | dropped with the request

Every prompt position must be computed, so such a request takes nothing from the prefix cache or from a connector until
they are told; a preemption begins them anew. They are told once: not by whoever goes on after output that somebody
else emitted, and by the first choice alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.logprobs import token_logprobs
from engine.messages import TokenLogprob
from engine.request import Request, RequestStatus
from engine.scheduler_output import ScheduledRequest, owes_prompt_logprobs

_ROWS = 64
"""Positions whose logits are there at a time: of a whole chunk of prompt they would be a gigabyte."""

Positions = list[list[TokenLogprob]]


class PromptLogprobs:
    """What has been collected. Owned by the model runner. `compute_logits` makes [rows, vocab] of hidden states."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor]) -> None:
        self._compute_logits = compute_logits
        self._collected: dict[Request, Positions] = {}

    def collect(self, shares: Sequence[ScheduledRequest], hidden: Tensor) -> dict[str, Positions]:
        """Take a step's `hidden` [tokens, hidden_size]. Returns, by request id, those that are complete: one entry per
        prompt token, empty for the first, which nothing predicts."""
        self._drop_finished()
        complete = {}
        end = 0
        for share in shares:
            end += share.num_tokens
            if owes_prompt_logprobs(share.request):
                positions = self._add(share, hidden[end - share.num_tokens : end])
                if share.samples:
                    complete[share.request.request_id] = positions
                    del self._collected[share.request]
        return complete

    def _add(self, share: ScheduledRequest, hidden: Tensor) -> Positions:
        request, num = share.request, share.request.spec.params.prompt_logprobs or 0
        if share.start == 0:
            self._collected[request] = [[]]
        positions = self._collected[request]
        targets = request.spec.prompt_token_ids[share.start + 1 : share.start + share.num_tokens + 1]
        for first in range(0, len(targets), _ROWS):
            wanted = targets[first : first + _ROWS]
            logits = self._compute_logits(hidden[first : first + len(wanted)])
            positions += token_logprobs(logits, wanted, [num] * len(wanted))
        return positions

    def _drop_finished(self) -> None:
        if self._collected:
            kept = self._collected.items()
            self._collected = {one: got for one, got in kept if one.status is not RequestStatus.FINISHED}
