"""special_tokens_map.json: the names of tokens in it count as in transformers, which reads the same folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.errors import InvalidCheckpoint
from engine.text.tokenizer import Tokenizer
from tests.tokenizer_builders import LLAMA_CHAT, byte_fallback_backend, write_folder

CHAT = {"chat_template": LLAMA_CHAT}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
OTHERS = {"bos_token": "</s>", "eos_token": {"content": "<unk>", "lstrip": False, "normalized": False}}
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]


def _folder(folder: Path, config: dict[str, Any], special_tokens_map: str) -> Path:
    write_folder(folder, byte_fallback_backend(), config)
    (folder / "special_tokens_map.json").write_text(special_tokens_map)
    return folder


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        (CHAT, NAMED, (1, 2)),
        (CHAT | NAMED, OTHERS, (2, 0)),
        (CHAT | NAMED, {"eos_token": None}, (1, None)),
        (CHAT | NAMED | {"added_tokens_decoder": {}}, OTHERS, (1, 2)),
    ],
)
def test_its_names_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], names: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    folder = _folder(tmp_path, config, json.dumps(names))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.bos_token_id, ours.eos_token_id) == expected == (theirs.bos_token_id, theirs.eos_token_id)
    if None not in expected:
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(MESSAGES) == text


def test_it_counts_without_a_config(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {}, json.dumps(NAMED))
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("text", "problem"), [("version https://git-lfs", "is not JSON: Expecting"), ("[]", "is not a JSON object")]
)
def test_a_damaged_one_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=rf"^special_tokens_map\.json of the checkpoint {problem}"):
        Tokenizer.from_folder(_folder(tmp_path, CHAT, text))
