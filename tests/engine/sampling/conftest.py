"""What the tests of constraints share: a compiler over a small vocabulary."""

from __future__ import annotations

import pytest

from engine.text.tokenizer import Tokenizer
from tests.engine.sampling.grammar_walks import Walker
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = byte_level_backend()
    write_folder(folder, backend, BYTE_LEVEL_CONFIG)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.token_bytes is not None
    vocabulary = [tokenizer.token_bytes.of(token_id) for token_id in range(backend.get_vocab_size())]
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    return Walker(folder, vocabulary, end)
