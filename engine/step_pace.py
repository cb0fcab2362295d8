"""How long a step will take, so that others can tell a long step from a wedged model."""

from __future__ import annotations

_SMOOTHING = 0.2
_MANY_TOKENS = 64
"""From here on a step's length goes by its tokens; below by the weights that are read once, whatever their number."""


class StepPace:
    """Learns from every step. `token_s`, seconds per token, is measured at the start on a few tokens, and so rather
    too high."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._small_step_s = 0.0
        self.predicted_s = 0.0
        """Seconds that the step in progress, or the last one, should take."""

    def step_begins(self, num_tokens: int) -> None:
        """Predict the next step; an idle turn (no tokens) keeps the last prediction."""
        if num_tokens:
            self.predicted_s = max(
                self._small_step_s, num_tokens * self._token_s if num_tokens >= _MANY_TOKENS else 0.0
            )

    def step_took(self, seconds: float, num_tokens: int) -> None:
        """Learn from a step that has ended."""
        if num_tokens >= _MANY_TOKENS:
            self._token_s += _SMOOTHING * (seconds / num_tokens - self._token_s)
        else:
            self._small_step_s += _SMOOTHING * (seconds - self._small_step_s)
