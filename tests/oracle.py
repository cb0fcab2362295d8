"""The reference for greedy tokens: transformers in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

TOLERANCE = 1e-4
"""A greedy token's logit may be this much below the reference's best: the same arithmetic in another order."""


class GreedyOracle:
    """The reference model of a checkpoint folder, in float32, or in float64: without an error of its own, which in
    float32 depends on the processor and was seen to be five times that of the engine."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        # The other implementations of experts have no float64.
        experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts)
        self._model.eval()

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """[len(output), vocab]: the reference's logits at each output token, given all tokens before it."""
        token_ids = torch.tensor([[*prompt, *output]])
        return self._model(token_ids, logits_to_keep=len(output) + 1).logits[0, :-1]

    def check(self, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Every output token is the reference's greedy choice, and has its log-probability, within TOLERANCE."""
        logits = self.logits(prompt, output)
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        gap = (logits.max(dim=1).values - chosen).max().item()
        assert gap <= TOLERANCE, f"a token's logit is {gap:.2e} below the reference's best (prompt of {len(prompt)})"
        if logprobs is not None:
            gap = (torch.tensor(logprobs) - (chosen - logits.logsumexp(-1))).abs().max().item()
            assert gap <= TOLERANCE, f"a log-probability is {gap:.2e} from the reference's (prompt of {len(prompt)})"


def random_prompts(count: int, *, longest: int, vocab_size: int, seed: int = 0, first_id: int = 3) -> list[list[int]]:
    """`count` prompts of 1 to `longest` random tokens, both lengths among them."""
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    return [[rng.randrange(first_id, vocab_size) for _ in range(length)] for length in lengths]
