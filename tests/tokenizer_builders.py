"""Tiny tokenizers, trained on the spot: a byte-level BPE and a byte-fallback one, in a model folder's form."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from engine.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "user assistant system: hello world! Hello, world? STOP here. stop there\nEND of the END",
    "na\u00efve caf\u00e9 \u6f22\u5b57\u6f22\u5b57 \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f600 e\u0301",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "[{{ message.role }}] {{ message.content | trim }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def byte_level_backend() -> Backend:
    """Qwen's way: 256 letters, merges, special tokens, one added token that is not special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return backend


def byte_fallback_backend() -> Backend:
    """Llama 2's way: <unk> <s> </s>, 256 byte tokens, spaces as U+2581, one space before the text."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=specials + byte_tokens, show_progress=False)
    backend.train_from_iterator(CORPUS[:2], trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]  # byte tokens belong to the vocabulary alone
    backend = Backend.from_str(json.dumps(spec))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def write_folder(folder: Path, backend: Backend, config: dict[str, Any]) -> Path:
    """A model folder that `Tokenizer.from_folder` and transformers can read."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


BYTE_LEVEL_CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
BYTE_FALLBACK_CONFIG = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": LLAMA_CHAT,
}


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend().to_str(), BYTE_LEVEL_CONFIG, {"default": CHATML})


@cache
def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_backend().to_str(), BYTE_FALLBACK_CONFIG, {"default": LLAMA_CHAT})


def word_piece_backend() -> Backend:
    """A vocabulary without bytes: BERT's way."""
    words = ["[UNK]", "hello", "world", "##ing", "##s", "sing", "stop", "!", "the"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return backend


@cache
def word_piece() -> Tokenizer:
    return Tokenizer(word_piece_backend().to_str(), {})
