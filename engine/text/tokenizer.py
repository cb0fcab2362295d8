"""Tokenizer of a model's folder: text to token ids and back, with the `tokenizers` library alone (no torch).

Text is encoded through `encode_batch`, which releases the GIL, so `encode` in a thread does not stall an event loop.

Special tokens in text. In a raw prompt they are tokens, as users of vLLM and transformers expect. In chat messages, and
in other values that a client gives the template, they are text: a user who writes `<|im_end|>` does not end the turn.
In the rendered text the user's and the template's would look alike. So the user's are split by a secret mark before
rendering; then the template's are renamed to secret names, the marks are removed, and the text is encoded by a twin of
the tokenizer that knows the special tokens by their secret names only. Messages without such text skip all this. Added
tokens that are not special (`<think>`, `<tool_call>`) are tokens everywhere: clients write them on purpose. So are
special ones that are parts of other tokens, such as a `!` for padding.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ContextExceeded, InvalidCheckpoint, InvalidRequest, NotSupported, UnsupportedModel
from engine.text.chat_output import CHAT_MARKS
from engine.text.chat_template import ChatTemplate, Messages, Tools
from engine.text.token_bytes import TokenBytes

_OTHER_FORMS = ("tekken.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that are not read here, and from which transformers makes a tokenizer.json."""
_NOT_RENAMED = "the tokenizer's special tokens cannot be renamed, as chat messages require"


class Tokenizer:
    """A model's tokenizer and chat template. Immutable and thread-safe.

    `source` is the text of tokenizer.json, `config` the parsed tokenizer_config.json, `templates` jinja sources:
    "default", and maybe "tool_use", for chats with tools.
    """

    def __init__(self, source: str, config: Mapping[str, Any], templates: Mapping[str, str] | None = None) -> None:
        try:
            spec = json.loads(source)
            self._backend = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library's have no base of their own
            raise InvalidCheckpoint(f"tokenizer.json of the checkpoint cannot be read: {error}") from error
        # tokenizer.json may contain its trainer's truncation; prompts must not be truncated.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._config = config
        added = spec.get("added_tokens", ())
        self._special = {t["content"]: int(t["id"]) for t in added if t["special"] and t["content"]}
        self.special_ids = frozenset(i for token, i in self._special.items() if token not in CHAT_MARKS)
        """Ids that `skip_special_tokens` omits."""
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Largest id plus one, added tokens included; a model's output may be padded beyond it."""
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.token_bytes = TokenBytes.of_tokenizer(self._backend, spec)
        self.chat_template = self._compiled(templates or {})
        """For ids use `encode_chat`: in its text a user's special tokens look like the template's."""
        self._reserved = self._special.keys() - _parts(spec["model"])
        """Special tokens that are text in a message."""
        self._special_literal = re.compile(longest_of(sorted(self._reserved)) if self._reserved else "(?!)")
        self._beginnings = {token[:i] for token in self._reserved for i in range(1, len(token))}
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._secret = secrets.token_hex(8)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json, and what there is of tokenizer_config.json, special_tokens_map.json and the templates'
        files.

        As in transformers, special_tokens_map.json counts, and then before tokenizer_config.json, where that has no
        added_tokens_decoder.
        """
        folder = Path(path)
        if problem := missing_tokenizer(folder):
            raise UnsupportedModel(problem)
        config = _read_object(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_object(folder / "special_tokens_map.json")
        return cls(_read_text(folder / "tokenizer.json"), config, _templates_in(folder) or _templates_of(config))

    def warm_up(self) -> None:
        """Build what the first long or marked text would wait for: half a second with 152 k tokens."""
        if self.token_bytes is not None:
            self.token_bytes.min_tokens("")
        with contextlib.suppress(UnsupportedModel):  # an error of the chats that need it
            _ = self._twin

    # Text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what tokenizer.json's post-processor adds (usually a BOS). As in transformers 5 that
        file alone decides: add_bos_token in tokenizer_config.json is ignored.
        With `max_tokens` a text that cannot fit is rejected without tokenising it. Raises `InvalidRequest`.
        """
        self._check_text(text, max_tokens)
        return _encode(self._backend, text, add_special_tokens)

    def _check_text(self, text: str, max_tokens: int | None) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            problem = f"the text is not valid Unicode: lone surrogate at character {error.start}"
            raise InvalidRequest("prompt", problem) from None
        if max_tokens is None or num_bytes <= max_tokens or self.token_bytes is None:
            return
        if (bound := self.token_bytes.min_tokens(text)) > max_tokens:
            problem = f"prompt is too long: {num_bytes} bytes have at least {bound} tokens, limit {max_tokens}"
            raise ContextExceeded("prompt", problem, f"at most {max_tokens} tokens")

    # Ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids without a token have no text; invalid bytes become U+FFFD."""
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self.special_ids]
        if self.token_bytes is not None:
            return self.token_bytes.text(token_ids)
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Id of a token as written in tokenizer.json; None if there is none."""
        token_id = self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    # Chat

    def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the rendered messages. Only the template adds a BOS.

        Special tokens in the messages are text. Raises `InvalidRequest`.
        """
        try:
            messages, tools, template_variables = map(self._marked, (messages, tools, template_variables))
        except RecursionError:
            raise InvalidRequest("messages", "nested too deeply") from None
        text = self.render_chat(messages, tools=tools, template_variables=template_variables)
        if self._mark not in text:
            return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        # The secret names are no text: each is one token.
        self._check_text(text.replace(self._mark, ""), max_tokens)
        secret_text = self._special_literal.sub(lambda match: self._secret_name(match[0]), text).replace(self._mark, "")
        return _encode(self._twin, secret_text, False)

    def render_chat(
        self, messages: Messages, *, tools: Tools | None = None, template_variables: Mapping[str, Any] | None = None
    ) -> str:
        """The text of the messages and of the answer's beginning. Raises `InvalidRequest`."""
        if self.chat_template is None:
            raise InvalidRequest("messages", "this model has no chat template", "prompt")
        return self.chat_template.render(messages, tools=tools, variables=template_variables)

    def apply_chat_template(
        self,
        conversation: Messages,
        tools: Tools | None = None,
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> str:
        """`render_chat` by transformers' name, for callers that pass `tokenize=False, add_generation_prompt=True`."""
        if tokenize:
            raise NotSupported("tokenize", "True", "False; encode_chat returns token ids")
        if not add_generation_prompt:
            raise NotSupported("add_generation_prompt", "False", "True")
        if continue_final_message:
            raise NotSupported("continue_final_message", "True", "False")
        renderer = self if chat_template is None else self.with_chat_template(chat_template)
        return renderer.render_chat(conversation, tools=tools, template_variables=template_variables)

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another template, jinja source."""
        other = copy.copy(self)
        other.chat_template = self._compiled({"default": source})
        return other

    def _compiled(self, templates: Mapping[str, str]) -> ChatTemplate | None:
        if "default" not in templates:
            return None
        return ChatTemplate(templates["default"], self._named_tokens(), templates.get("tool_use"))

    @property
    def _mark(self) -> str:
        return f"{self._secret}m"

    def _secret_name(self, token: str) -> str:
        return f"<{self._secret}n{self._special[token]}>"

    def _marked(self, value: Any) -> Any:
        """`value` with the mark inside each special token in its strings, and inside the beginning of one at a string's
        end, because a template may join two strings. Keys that are identifiers keep such an end: it looks them up."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self._marked_key(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._marked(item) for item in value]
        return value

    def _marked_key(self, key: str) -> str:
        return self._marked_tokens(key) if key.isidentifier() else self._marked_text(key)

    def _marked_tokens(self, text: str) -> str:
        return self._special_literal.sub(lambda match: match[0][0] + self._mark + match[0][1:], text)

    def _marked_text(self, text: str) -> str:
        text = self._marked_tokens(text)
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest_beginning), end):
            if text[start:end] in self._beginnings:
                return text[: start + 1] + self._mark + text[start + 1 :]
        return text

    @cached_property
    def _twin(self) -> tokenizers.Tokenizer:
        """The same tokenizer with its special tokens renamed to secret names."""
        spec = json.loads(self._backend.to_str())
        for token in spec["added_tokens"]:
            if token["content"] in self._reserved:
                token["content"] = self._secret_name(token["content"])
        vocab = spec["model"]["vocab"]
        if isinstance(vocab, dict):
            spec["model"]["vocab"] = {self._renamed(piece): i for piece, i in vocab.items()}
        else:
            spec["model"]["vocab"] = [[self._renamed(piece), score] for piece, score in vocab]
        if merges := spec["model"].get("merges"):  # text must not become a special token by these either
            spec["model"]["merges"] = [merge for merge in merges if "".join(_pair(merge)) not in self._reserved]
        if spec["model"].get("unk_token"):
            spec["model"]["unk_token"] = self._renamed(spec["model"]["unk_token"])
        try:
            twin = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library's have no base of their own
            raise UnsupportedModel(_NOT_RENAMED) from error
        if any(twin.token_to_id(self._secret_name(token)) != self._special[token] for token in self._reserved):
            raise UnsupportedModel(_NOT_RENAMED)
        return twin

    def _renamed(self, piece: str) -> str:
        return self._secret_name(piece) if piece in self._reserved else piece

    # Named special tokens

    def _named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token… of tokenizer_config.json, each a string or an object with `content`."""
        named = {}
        for name, token in self._config.items():
            content = token.get("content") if isinstance(token, Mapping) else token
            if name.endswith("_token") and isinstance(content, str):
                named[name] = content
        return named

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens().get(name)
        return None if token is None else self.token_id(token)


def missing_tokenizer(folder: Path) -> str | None:
    """The problem of a folder without tokenizer.json and its remedy; None where it has one."""
    if (folder / "tokenizer.json").is_file():
        return None
    others = " and ".join(name for name in _OTHER_FORMS if (folder / name).is_file())
    return (
        f"{folder} has no tokenizer.json{others and f', only {others}'}; transformers writes it: "
        f'python -c "from transformers import AutoTokenizer; '
        f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def supports_constraints(tokenizer: Tokenizer | None) -> bool:
    """Whether the bytes of its tokens are known, on which grammars work."""
    return tokenizer is not None and tokenizer.token_bytes is not None


def _read_text(path: Path) -> str:
    """Raises InvalidCheckpoint."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{path.name} of the checkpoint cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file. Raises InvalidCheckpoint."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise InvalidCheckpoint(f"{path.name} of the checkpoint is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path.name} of the checkpoint is not a JSON object")
    return value


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return list(backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)


def longest_of(words: Sequence[str]) -> str:
    """A regular expression of the longest of the sorted `words` that a text has at a place. Where two differ, one
    character decides: alternatives one after the other would take seconds with a thousand special tokens and a text of
    their beginnings, and a match keeps the GIL."""
    common = takewhile(lambda pair: pair[0] == pair[1], zip(words[0], words[-1], strict=False))
    beginning = "".join(one for one, _ in common)
    rest = [word[len(beginning) :] for word in words]
    inner = "|".join(longest_of([*group]) for _, group in groupby(filter(None, rest), key=itemgetter(0)))
    return re.escape(beginning) + (f"(?:{inner}){'?' if '' in rest else ''}" if inner else "")


def _pair(merge: str | Sequence[str]) -> Sequence[str]:
    """The two pieces that a merge of BPE joins."""
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _parts(model: Mapping[str, Any]) -> set[str]:
    """The pieces of which BPE makes others: single characters, and what merges join."""
    if "merges" not in model:
        return set()
    parts = {piece for merge in model["merges"] for piece in _pair(merge)}
    return parts.union(piece for piece in model["vocab"] if len(piece) == 1)


def _templates_in(folder: Path) -> dict[str, str]:
    """The templates that have files of their own; then those in tokenizer_config.json do not count."""
    default, tools = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if not default.is_file():
        return {}
    named = {name: _read_text(path) for name, path in (("default", default), ("tool_use", tools)) if path.is_file()}
    return {name: source for name, source in named.items() if source}


def _templates_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The templates in tokenizer_config.json: one text, or a list of named ones."""
    templates = config.get("chat_template")
    default: list[dict[str, Any]] = [{"name": "default", "template": templates}]
    named = templates if isinstance(templates, list) else default
    return {one["name"]: one["template"] for one in named if isinstance(one["template"], str) and one["template"]}
