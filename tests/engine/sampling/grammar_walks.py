"""Random outputs that a compiled constraint admits, without a model: what xgrammar really lets through."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from xgrammar import CompiledGrammar, GrammarMatcher

from engine.sampling.grammar import GrammarCompiler
from engine.sampling.params import SamplingParams

_UNUSUAL = [bytes([one]) for one in b'"\\\x00\x01\x1f\t\n\xc2\xe2']


class Walker:
    """Walks over a vocabulary of single bytes and a few longer tokens; `folder` has its tokenizer."""

    def __init__(self, folder: Path, vocabulary: list[bytes], end: int) -> None:
        """`end` is the EOS token."""
        self._vocabulary = vocabulary
        self._end = end
        self._compiler = GrammarCompiler(folder, len(vocabulary), wake=lambda: None)

    def compiled(self, params: SamplingParams) -> CompiledGrammar:
        """Raises InvalidRequest."""
        constraint = params.constraint
        assert constraint is not None
        return self._compiler.compiled(constraint).result().compiled

    def outputs(self, params: SamplingParams, seeds: range) -> list[str]:
        """The texts of the walks that end."""
        grammar = self.compiled(params)
        walks = [self._walk(grammar, random.Random(seed)) for seed in seeds]
        return [walk.decode() for walk in walks if walk is not None]

    def accepts(self, params: SamplingParams, text: str) -> bool:
        """Whether `text` is a finished output."""
        matcher = GrammarMatcher(self.compiled(params), override_stop_tokens=[self._end])
        return all(map(matcher.accept_token, self._spelt(text))) and matcher.accept_token(self._end)

    def _spelt(self, text: str) -> list[int]:
        """In tokens of one byte."""
        return [self._vocabulary.index(bytes([one])) for one in text.encode()]

    def _walk(self, grammar: CompiledGrammar, source: random.Random, *, longest: int = 300) -> bytes | None:
        matcher = GrammarMatcher(grammar, override_stop_tokens=[self._end])
        mask = np.zeros((1, -(-len(self._vocabulary) // 32)), np.int32)
        output = b""
        for length in range(longest):
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self._vocabulary)]
            allowed = np.flatnonzero(bits).tolist()
            if output.endswith(b"\xed"):  # negated classes admit the bytes of a lone surrogate, which no text has
                allowed = [one for one in allowed if self._vocabulary[one] < b"\xa0"]
            assert allowed, f"nothing may follow {output!r}"
            if self._end in allowed and (len(allowed) == 1 or source.random() < 0.3):
                return output
            token_id = self._drawn([one for one in allowed if one != self._end], source, length)
            assert matcher.accept_token(token_id)
            output += self._vocabulary[token_id]
        return None

    def _drawn(self, allowed: list[int], source: random.Random, length: int) -> int:
        """Mostly a letter; sooner or later what closes a value; sometimes anything, or what JSON must escape."""
        point = source.random()
        if point < min(0.7, 0.1 + length / 100):
            wanted = [one for one in allowed if self._vocabulary[one] in (b"]", b"}", b'"')]
        elif point < 0.9:
            wanted = [one for one in allowed if self._vocabulary[one].isalnum()]
        else:
            wanted = [one for one in allowed if self._vocabulary[one] in _UNUSUAL] if point > 0.95 else []
        return source.choice(wanted or allowed)
