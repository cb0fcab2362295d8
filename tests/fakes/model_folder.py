"""A model's folder without weights: what the router needs of one, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.fakes.tokens import VOCAB_SIZE, text_of

EOS_ID = 2
_SPECIAL = ["<pad>", "<bos>", "<eos>", "<turn>"]
_TEMPLATE = (
    "{% if tools %}<turn>tools: {% for tool in tools %}{{ tool.function | tojson }}{% endfor %}<eos>{% endif %}"
    "{% for message in messages %}<turn>{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.name %} ({{ message.name }}){% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant{% if tone is defined %} ({{ tone }}){% endif %}: {% endif %}"
)


def write_model_folder(folder: Path, *, chat_template: str = _TEMPLATE, **generation_config: object) -> Path:
    """Writes a byte-level tokenizer (one id per byte, after the special ones), a chat template and the defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": chat_template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID, **generation_config}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return folder


def write_fakes_tokenizer(folder: Path) -> None:
    """In the place of the folder's tokenizer one whose text of ids is what fake instances send."""
    pieces = [text_of([token_id]) or f"<{token_id}>" for token_id in range(VOCAB_SIZE)]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([piece for piece in pieces if piece.startswith("<")])  # which have no text
    tokenizer.save(str(folder / "tokenizer.json"))
