"""The bytes of each token, for the two kinds of vocabulary whose tokens have bytes.

- byte-level BPE (GPT-2, Llama 3, Qwen): a token's characters are an alphabet of 256 letters, one per byte;
- pieces with byte fallback (SentencePiece: Llama 2, Mistral, Gemma): "▁" is a space, `<0xE2>` one byte.

For these a text is the UTF-8 of the concatenated bytes, so it can be streamed in constant time per token, and there is
a lower bound on the tokens of a text that needs no tokenising. Other vocabularies (WordPiece, Metaspace) have no
`TokenBytes`.

An intended difference from the `tokenizers` library: with byte fallback it turns a whole run of byte tokens into U+FFFD
if one of them is invalid, including valid characters before it. A stream cannot take back delivered text, so here the
valid characters of such a run stay. On byte-level vocabularies the two agree on every sequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import tokenizers

from engine.text.chat_output import CHAT_MARKS

Kind = Literal["byte_level", "byte_fallback"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE = "\u2581"
_WHITESPACE_BYTES = frozenset(b for c in map(chr, range(0x3001)) if c.isspace() for b in c.encode())
_UNICODE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEPING_NORMALIZERS = {*_UNICODE_NORMALIZERS, "Prepend", "Replace", "Sequence"}
_SPACE_TO_PIECE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_PIECE}
NORMALIZED_CHARS = 4096
"""At once: the library keeps the GIL, and would stop all other threads for a second and more with 4 MiB."""
_JOINED_TOKENS = 64
"""More than two such parts have apart and not in one: the last letter of the first takes three others at most."""
_DROPPING_PRE_TOKENIZERS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 is itself, the rest is U+0100 onwards.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019 (its code: `bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def decode_utf8(data: bytes, *, per_byte: bool, final: bool) -> tuple[str, bytes]:
    """Text of `data`, and its last bytes if they may be the beginning of a character (none when `final`).

    Invalid bytes become U+FFFD: one for each longest beginning of a character (as Unicode recommends and Rust does), or
    one for each byte when `per_byte`.
    """
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        pass
    parts = []
    while data:
        try:
            parts.append(data.decode())
            break
        except UnicodeDecodeError as wrong:
            parts.append(data[: wrong.start].decode())
            if wrong.reason == "unexpected end of data" and not final:
                return "".join(parts), data[wrong.start :]
            parts.append("\ufffd" * (wrong.end - wrong.start if per_byte else 1))
            data = data[wrong.end :]
    return "".join(parts), b""


_ALPHABET = byte_alphabet()


def _bytes_of(token: str, kind: Kind) -> bytes:
    if kind == "byte_fallback":
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(_SPACE_PIECE, " ").encode()
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()


class Vocabulary(NamedTuple):
    """The bytes of all tokens of a model."""

    tokens: list[bytes]
    """By id; empty for an id without a token."""
    special_ids: frozenset[int]
    """Without those of CHAT_MARKS."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    """What `read_vocabulary` needs of a tokenizer.json."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


def read_vocabulary(folder: Path, size: int) -> Vocabulary | None:
    """The `size` tokens of the model in `folder`; None without a tokenizer, or if its tokens have no bytes.

    Without the `tokenizers` library, which holds the GIL while it reads a file: half a second for 152 k tokens.
    """
    try:
        spec = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    if (found := _kind(spec.decoder)) is None:
        return None
    tokens = [b""] * size
    vocab = spec.model.vocab
    ids = vocab.items() if isinstance(vocab, dict) else ((piece, index) for index, (piece, _) in enumerate(vocab))
    for token, token_id in (*ids, *((added.content, added.id) for added in spec.added_tokens)):
        if 0 <= token_id < size:
            tokens[token_id] = _bytes_of(token, found[0])
    special = [added for added in spec.added_tokens if added.special and added.content]
    return Vocabulary(tokens, frozenset(added.id for added in special if added.content not in CHAT_MARKS))


class TokenBytes:
    """Token id -> bytes of one tokenizer, filled on demand. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, spec: dict[str, Any], kind: Kind, num_stripped: int) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self._may_drop_text = _may_drop_text(spec)
        self._normalizes_unicode = not _UNICODE_NORMALIZERS.isdisjoint(
            s["type"] for s in _steps(spec.get("normalizer"))
        )
        self._swallows_whitespace = any(token["lstrip"] or token["rstrip"] for token in spec.get("added_tokens", ()))
        self.kind = kind
        self.num_stripped = num_stripped
        """Spaces removed from the beginning of a text (SentencePiece adds one)."""

    @classmethod
    def of_tokenizer(cls, backend: tokenizers.Tokenizer, spec: dict[str, Any]) -> TokenBytes | None:
        """`spec` is the parsed tokenizer.json; None for a vocabulary without bytes."""
        if (found := _kind(spec.get("decoder"))) is None:
            return None
        return cls(backend, spec, *found)

    @property
    def per_byte(self) -> bool:
        """Whether each invalid byte becomes a U+FFFD, as in `tokenizers` for byte fallback."""
        return self.kind == "byte_fallback"

    def of(self, token_id: int) -> bytes:
        """Bytes of a token; empty for an id without a token (a padded vocabulary)."""
        data = self._cache.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = self._cache[token_id] = b"" if token is None else _bytes_of(token, self.kind)
        return data

    def text(self, token_ids: Iterable[int]) -> str:
        """The whole text of `token_ids`."""
        text, _ = decode_utf8(b"".join(map(self.of, token_ids)), per_byte=self.per_byte, final=True)
        return self.strip(text, self.num_stripped)[0]

    @staticmethod
    def strip(text: str, num_left: int) -> tuple[str, int]:
        """Remove up to `num_left` spaces from the front; also returns how many may be removed from what follows."""
        num_spaces = min(num_left, len(text) - len(text.lstrip(" ")))
        left = num_left - num_spaces
        return text[num_spaces:], left if num_spaces == len(text) else 0

    def min_tokens(self, text: str) -> int:
        """A lower bound on the tokens of any encoding of `text`; 0 if the tokenizer may drop part of a text.

        Let L(b) be the length of the longest token that contains byte b. A token of length l has l bytes with
        L(b) >= l, so its bytes' 1/L(b) sum to at most 1, and a text needs at least the sum of 1/L(b) over its bytes.
        """
        if not self._share:
            return 0
        if not self._normalizes_unicode or text.isascii():
            return math.ceil(self._shares_of(text) - 1e-6)
        parts = [text[at : at + NORMALIZED_CHARS] for at in range(0, len(text), NORMALIZED_CHARS)]
        shares = sum(self._shares_of(self._backend.normalizer.normalize_str(part)) for part in parts)
        return max(0, math.ceil(shares - _JOINED_TOKENS * (len(parts) - 1) - 1e-6))

    def _shares_of(self, text: str) -> float:
        if self.kind == "byte_fallback":
            text = text.replace(_SPACE_PIECE, " ")
        data = text.encode()
        return sum(data.count(b) * self._share.get(b, 0.0) for b in set(data))

    @cached_property
    def _share(self) -> dict[int, float]:
        """1 / L(b) of each byte that no encoding can drop."""
        if self._may_drop_text:
            return {}
        vocab = sorted((_bytes_of(token, self.kind) for token in self._backend.get_vocab()), key=len, reverse=True)
        shares: dict[int, float] = {}
        missing = {data[0] for data in vocab if len(data) == 1}
        if self._swallows_whitespace:
            missing -= _WHITESPACE_BYTES
        for data in vocab:
            if not missing.isdisjoint(data):
                shares |= dict.fromkeys(missing.intersection(data), 1 / len(data))
                missing.difference_update(data)
        return shares


def _kind(decoder: Any) -> tuple[Kind, int] | None:
    """The kind of a tokenizer.json's decoder, and how many leading spaces it strips."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    types = [step and step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return "byte_level", 0
    if types[:3] != ["Replace", "ByteFallback", "Fuse"] or types[3:] not in ([], ["Strip"]):
        return None
    if steps[0]["pattern"] != {"String": _SPACE_PIECE} or steps[0]["content"] != " ":
        return None
    if not types[3:]:
        return "byte_fallback", 0
    strip = steps[3]
    return ("byte_fallback", int(strip["start"])) if strip["content"] == " " and strip["stop"] == 0 else None


def _may_drop_text(spec: dict[str, Any]) -> bool:
    """Whether the tokenizer may drop part of a text, so that there is no bound."""
    if spec["model"].get("type") not in ("BPE", "Unigram"):
        return True
    for step in _steps(spec.get("normalizer")):
        if step["type"] not in _KEEPING_NORMALIZERS or (step["type"] == "Replace" and step != _SPACE_TO_PIECE):
            return True
    for step in _steps(spec.get("pre_tokenizer")):
        if step["type"] in _DROPPING_PRE_TOKENIZERS or step.get("behavior") == "Removed":
            return True
    return (spec.get("decoder") or {}).get("type") != "ByteLevel" and not spec["model"].get("byte_fallback")


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """The steps of a pipeline: None, one, or a Sequence."""
    if step is not None:
        yield step
        for inner in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
            yield from _steps(inner)
