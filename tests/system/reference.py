"""Fault-free answers: what the aggregated engine generates for a request, computed once per request.

This is the oracle of the system tests. It shares no process, no scheduler state and no transferred KV with the stack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that a stack must give. `text` is None where the reference has no tokenizer."""

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str


class Reference:
    """The aggregated engine on one checkpoint, in this process, one thread. Loaded when it is first needed."""

    def __init__(self, folder: Path, *, dtype: str = "float32", **engine_options: Any) -> None:
        self.folder = folder
        self._options = {"dtype": dtype, "num_threads": 1, **engine_options}
        self._llm: Any = None
        self._answers: dict[str, Answer] = {}

    def answer(self, prompt: str | Sequence[int], **sampling: Any) -> Answer:
        """The answer to one prompt; `sampling` are the client's own names, `lora` among them."""
        key = request_digest(prompt, sampling)
        if key not in self._answers:
            self._answers[key] = self._generate(prompt, sampling)
        return self._answers[key]

    @property
    def llm(self) -> Any:
        """The engine itself."""
        from engine import LLM

        if self._llm is None:
            has_tokenizer = (self.folder / "tokenizer.json").exists()
            self._llm = LLM(self.folder, skip_tokenizer_init=not has_tokenizer, **self._options)
        return self._llm

    def _generate(self, prompt: str | Sequence[int], sampling: Mapping[str, Any]) -> Answer:
        from engine import SamplingParams

        params = SamplingParams(**{name: value for name, value in sampling.items() if name != "lora"})
        [output] = self.llm.generate([prompt], params, use_tqdm=False, lora=sampling.get("lora", ""))
        [choice] = output.outputs
        text = choice.text if self.llm.tokenizer is not None else None
        return Answer(tuple(choice.token_ids), text, str(choice.finish_reason))


def request_digest(prompt: str | Sequence[int], sampling: Mapping[str, Any]) -> str:
    """Names a request by its content: equal in every process."""
    content = json.dumps([prompt if isinstance(prompt, str) else list(prompt), sampling], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
