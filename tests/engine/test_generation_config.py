"""Where a checkpoint's end-of-text ids and sampling defaults come from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine.errors import InvalidCheckpoint, UnsupportedModel
from engine.generation_config import GenerationDefaults
from engine.text.tokenizer import Tokenizer
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder


def test_eos_ids_are_those_of_the_first_file_that_has_them_and_the_tokenizers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_backend(), BYTE_LEVEL_CONFIG)
    tokenizer = Tokenizer.from_folder(folder)
    own = tokenizer.eos_token_id
    assert own is not None
    assert own not in range(3, 9), "the ids of the files below"
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (own,)
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (7, own)
    (folder / "config.json").write_text('{"eos_token_id": null, "text_config": {"eos_token_id": 8}}')
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (8, own)
    (folder / "config.json").write_text('{"text_config": null}')
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (own,)
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (5, own)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (3, 4, own)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, 3]}))
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (own, 3)
    (folder / "tokenizer.json").unlink()
    assert GenerationDefaults.from_folder(folder, tokenizer).eos_token_ids == (own, 3)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert GenerationDefaults.from_folder(folder, tokenizer).eos_token_ids == (3, own)
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (3,)


def test_sampling_defaults_are_what_the_file_says(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 99}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    defaults = GenerationDefaults.from_folder(tmp_path)
    assert defaults.repetition_penalty == 1.05
    assert defaults.sampling_fields() == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }
    assert GenerationDefaults.from_folder(tmp_path / "empty") == GenerationDefaults()
    (tmp_path / "generation_config.json").write_text('{"top_k": "many"}')
    with pytest.raises(UnsupportedModel, match="top_k"):
        GenerationDefaults.from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"generation_config\.json of the checkpoint is not JSON"):
        GenerationDefaults.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_eos_that_is_no_id_is_an_error_of_the_file_that_has_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UnsupportedModel, match=rf"^{re.escape(name)}: eos_token_id is '</s>'; "):
        GenerationDefaults.from_folder(tmp_path)
