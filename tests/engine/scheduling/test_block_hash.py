"""Block identity does not depend on the process, and no two contents share one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

from engine.scheduling.block_hash import block_hash, extend_block_hashes, root_hash


def test_hash_is_the_published_formula() -> None:
    parent = bytes(range(32))
    tokens = [1, 2**40, 7]
    expected = hashlib.sha256(parent + b"".join(token.to_bytes(8, "little", signed=True) for token in tokens))
    assert block_hash(parent, tokens) == expected.digest()


def test_hashes_are_equal_whatever_pythonhashseed_says() -> None:
    code = (
        "from engine.scheduling.block_hash import *; print(block_hash(root_hash('f', cache_salt='s'), range(16)).hex())"
    )
    found = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("0", "1", "random")
    }
    assert len(found) == 1


def test_salt_adapter_and_fingerprint_each_separate() -> None:
    roots = [
        root_hash("f"),
        root_hash("g"),
        root_hash("f", cache_salt="x"),
        root_hash("f", lora="x"),
        root_hash("fx"),
        root_hash("f", cache_salt="xl", lora="o"),
        root_hash("f", cache_salt="x", lora="lo"),
    ]
    assert len(set(roots)) == len(roots)


def test_extending_in_pieces_gives_the_hashes_of_the_whole() -> None:
    tokens = list(range(100))
    whole: list[bytes] = []
    extend_block_hashes(whole, b"r", tokens, 16)
    pieces: list[bytes] = []
    for end in (5, 16, 40, 47, 48, 100):
        extend_block_hashes(pieces, b"r", tokens[:end], 16)
    assert whole == pieces
    assert len(whole) == 6


def test_one_changed_token_changes_every_later_block() -> None:
    first, second = [], []
    extend_block_hashes(first, b"r", [0] * 64, 16)
    extend_block_hashes(second, b"r", [0] * 20 + [1] + [0] * 43, 16)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False, False]
