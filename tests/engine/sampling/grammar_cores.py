"""A model whose tokenizer has the bytes of its tokens, and engine cores that run to an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.core.core import EngineCore
from engine.core.messages import TokensEvent
from tests.builders import lively_checkpoint
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder
from tests.waiting import wait_until

END: Any = byte_level_backend().token_to_id("<|im_end|>")


def grammar_checkpoint(folder: Path) -> Path:
    """Written into `folder`."""
    backend = byte_level_backend()
    # 21 rows of the output matrix have no token
    size = backend.get_vocab_size() + 21
    folder = lively_checkpoint(folder, vocab_size=size, eos_token_id=END, bos_token_id=None)
    return write_folder(folder, backend, BYTE_LEVEL_CONFIG)


def gathered(core: EngineCore, num_requests: int) -> dict[str, list[int]]:
    """Run until so many requests have finished: their tokens by request id."""
    tokens: dict[str, list[int]] = {}
    num_finished = 0

    def all_finished() -> bool:
        nonlocal num_finished
        for event in core.step():
            assert isinstance(event, TokensEvent)
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            num_finished += event.finish_reason is not None
        return num_finished == num_requests

    wait_until(all_finished, lambda: f"{num_finished} of {num_requests} have finished", 60)
    return tokens
