"""Constraints on a request's output: a JSON object, a JSON schema, a regular expression, a choice of texts, a grammar,
a structural tag.

    SamplingParams ─▶ checked here, at the edge ─▶ `Constraint` ─▶ grammar.py compiles it (xgrammar)

xgrammar accepts, and ignores, much of what it cannot do. The checks admit only what it follows exactly, so that a
finished output always satisfies its constraint, and they bound the work of compiling it. JSON schemas: json_schema.py;
structural tags: structural_tag.py.
Free of torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

from engine.errors import InvalidRequest, shown, to_install
from engine.sampling.json_schema import checked_schema, json_text
from engine.sampling.structural_tag import checked_structural_tag

MAX_CONSTRAINT_BYTES = 2**16
MAX_REGEX_CHARS = 4096
MAX_TEXTS = 1000
_MAX_GROUPS = 100
"""Groups of a regular expression inside each other."""
MAX_WHITESPACE = 16
"""Between two elements of JSON: a model that may write spaces for ever sometimes does."""
_IN_A_GRAMMAR = re.compile(
    r"""
      "(?: \\. | [^"\\] )* (?: " | \\?\Z )                    # a text
    | \#[^\r\n]*
    | (?: (?<=[\w.-])\[                                       # attributes
            (?: [ \t]*[a-z_]+[ \t]* (?: =[ \t]* (?: [\d.eE+-]+ | "[^"\\\r\n]*" ) [ \t]* )? (?: , | (?=\]) ) )+
            \] (?=[ \t]*::=)
        | \[(?: \\. | [^\]\\] )* (?: \] | \\?\Z )             # a class of characters
      ) (?P<defines>[ \t]*::=)?
    | (?P<lookahead>\(=)
    | (?P<macro>(?<![\w.-]) (?: Token | ExcludeToken | TokenTagDispatch | Regex ) (?![\w.-]))
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_GRAMMARS = "texts, classes, names of rules, groups, alternatives, * + ? {m} {m,} {m,n}, TagDispatch, Substring"

INSTALL_XGRAMMAR = to_install("structured-output")

CONSTRAINTS = ("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag")
"""The fields of SamplingParams of which at most one may be set."""


class Constraint(NamedTuple):
    """What xgrammar compiles; equal constraints share one compiled grammar."""

    kind: Literal["json_schema", "regex", "grammar", "structural_tag"]
    source: str
    limits_whitespace: bool = False
    """To MAX_WHITESPACE, by the masks (`WhitespaceLimit`): its grammar does not."""
    is_json: bool = False
    """At least in part: the output has no control characters but line feeds."""


def has_xgrammar() -> bool:
    """Whether this installation can compile constraints; it takes 1 GB, so xgrammar is an extra."""
    return importlib.util.find_spec("xgrammar") is not None


def check_constraint(fields: dict[str, Any]) -> Constraint | None:
    """The constraint of `fields`, the values of CONSTRAINTS; None if none is set. Raises InvalidRequest."""
    if not isinstance(fields["json_object"], bool):
        raise InvalidRequest("json_object", f"{shown(fields['json_object'])} is not a boolean", "true, false")
    given = [name for name in CONSTRAINTS if fields[name] is not None and fields[name] is not False]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(given[1], f"is given together with {given[0]}", f"at most one of {', '.join(CONSTRAINTS)}")
    [name] = given
    value = fields[name]
    match name:
        case "json_object":
            return Constraint("json_schema", '{"type": "object"}', limits_whitespace=True, is_json=True)
        case "choice":
            return Constraint("grammar", _grammar_of_choice(value))
        case "json_schema":
            text = _text(name, value, MAX_CONSTRAINT_BYTES)
            schema = checked_schema(text, partial(translated_regex, "pattern", in_json=True))
            return Constraint("json_schema", schema, limits_whitespace=True, is_json=True)
        case "regex":
            return Constraint("regex", translated_regex(name, _text(name, value, MAX_REGEX_CHARS)))
        case "grammar":
            return Constraint("grammar", _followed_exactly(_text(name, value, MAX_CONSTRAINT_BYTES)))
        case _:
            text = _text(name, value, MAX_CONSTRAINT_BYTES)
            tag, kinds = checked_structural_tag(text, _part_of_tag, MAX_WHITESPACE)
            is_json = "json_schema" in kinds
            return Constraint("structural_tag", tag, limits_whitespace=kinds == {"json_schema"}, is_json=is_json)


def _followed_exactly(grammar: str) -> str:
    """The grammar. Raises InvalidRequest for a NUL, where xgrammar takes the grammar to end, and for

    - a rule with attributes: xgrammar enforces `max_tokens` by what it has masked before, so that an output could not
      go on from its tokens alone, and ignores `temperature`;
    - a lookahead, which xgrammar ignores, and `Regex(…)`, inside which it ignores some, too;
    - tokens by their ids: special tokens and the end of the output are never sampled inside of an output."""
    if "\0" in grammar:
        raise InvalidRequest("grammar", "contains the character U+0000", r"its escape, \u0000")
    for match in _IN_A_GRAMMAR.finditer(grammar):
        if match["defines"]:
            raise InvalidRequest("grammar", f"has a rule with attributes: {shown(match[0])}", "name ::= …")
        if match["lookahead"]:
            raise InvalidRequest("grammar", "has a lookahead, (= …), which is not supported", _IN_GRAMMARS)
        if match["macro"]:
            raise InvalidRequest("grammar", f"has {match[0]}, which is not supported", _IN_GRAMMARS)
    return grammar


def _part_of_tag(kind: str, source: Any) -> str:
    """The source of a constraint inside a structural tag, checked like that of a whole output."""
    if kind == "json_schema":
        source = json_text(source)
    checked = check_constraint({**dict.fromkeys(CONSTRAINTS), "json_object": False, kind: source})
    if checked is None:
        raise InvalidRequest(kind, f"{shown(source)} is not a string")
    return checked.source


def _text(field: str, value: Any, max_bytes: int) -> str:
    allowed = f"a text of 1..{max_bytes} bytes"
    if not isinstance(value, str):
        raise InvalidRequest(field, f"{shown(value)} is not a string", allowed)
    try:
        num_bytes = len(value.encode()) if len(value) <= max_bytes else len(value)
    except UnicodeEncodeError:
        raise InvalidRequest(field, f"{shown(value)} is not valid Unicode", "text without lone surrogates") from None
    if not 0 < num_bytes <= max_bytes:
        raise InvalidRequest(field, f"has {num_bytes} bytes", allowed)
    return value


def _grammar_of_choice(texts: Any) -> str:
    allowed = f"1..{MAX_TEXTS} texts of at least one byte, together at most {MAX_CONSTRAINT_BYTES} bytes"
    if not isinstance(texts, tuple) or not 0 < len(texts) <= MAX_TEXTS:
        raise InvalidRequest("choice", f"{shown(texts)} is not a list of texts", allowed)
    checked = [_text(f"choice[{index}]", text, MAX_CONSTRAINT_BYTES) for index, text in enumerate(texts)]
    if sum(len(text.encode()) for text in checked) > MAX_CONSTRAINT_BYTES:
        raise InvalidRequest("choice", "the texts are too long", allowed)
    return "root ::= " + " | ".join(f'"{_escaped(text)}"' for text in checked)


def _escaped(text: str) -> str:
    """`text` inside the quotes of an EBNF string."""
    return re.sub(r'["\\\x00-\x1f\x7f]', lambda match: f"\\u{ord(match[0]):04x}", text)


# Regular expressions: Python's syntax and, with re.ASCII, its meaning; the whole output must match.

_UNESCAPED = "".join(char for char in map(chr, range(0x20, 0x80)) if char not in '"\\')
"""The characters of ASCII that JSON does not escape."""
_NUM_CLASSES = 256
"""That are kept with their translation; the longest has MAX_PATTERN_CHARS."""
_SPACES = r" \t\n\r\f\v"
_CLASS_ESCAPES = "dDwWsS"
_CHARACTER_ESCAPES = "nrtfv"
_REPEAT = re.compile(r"\{[0-9]{1,9}(,[0-9]{0,9})?\}")
_HEX = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4})")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|.)", re.DOTALL)
_CARET = r"\^"
"""xgrammar takes an escaped caret at the beginning of a class for its negation."""
_BEGINS_WITH_CARET = re.compile(r"\[(?:\\\^|\\u005e)(?:\^|\\\^|\\u005e)*", re.IGNORECASE)
_AS_GRAMMAR = "é{0}"
"""Changes no text of a pattern. xgrammar makes an automaton of a pattern that is ASCII alone, at times a wrong one:
that of `a(x[0-9]+)?b` has `a1b`. Of others, and of regular expressions outside of JSON, it makes a grammar."""
_ALLOWED = (
    "characters, classes, groups without names, alternatives, * + ? {m} {m,} {m,n}, "
    r"\d \D \w \W \s \S, ^ and $ at the ends of alternatives"
)


def translated_regex(field: str, regex: str, *, in_json: bool = False) -> str:
    """`regex` in xgrammar's syntax, or `field` is rejected for a construct without the same meaning there.

    `in_json`: for the inside of a JSON string, where no character may need an escape.
    """
    parts, depth, position, before = [], 0, 0, ""
    for token in _tokens(field, regex):
        problem = _problem(regex, position, before, token, depth, in_json=in_json)
        if problem is not None:
            raise InvalidRequest(field, f"at position {position}: {problem} is not supported", _ALLOWED)
        depth += (token in ("(", "(?:")) - (token == ")")
        if depth > _MAX_GROUPS or depth < 0:
            problem = f"groups are nested more than {_MAX_GROUPS} deep" if depth > 0 else "')' closes no group"
            raise InvalidRequest(field, f"at position {position}: {problem}", _ALLOWED)
        parts.append(_translated_in_json(token) if in_json else _translated(token))
        position += len(token)
        before = token
    return "".join(parts) + (_AS_GRAMMAR if in_json else "")


def _tokens(field: str, regex: str) -> Iterator[str]:
    """`regex` in pieces: a class, an escape, a group's beginning, a repetition, or one character."""
    position = 0
    while position < len(regex):
        end = _end_of_token(regex, position)
        if end is None:
            raise InvalidRequest(field, f"at position {position}: {shown(regex[position:])} cannot be read", _ALLOWED)
        yield regex[position:end]
        position = end


def _end_of_token(regex: str, start: int) -> int | None:
    match regex[start]:
        case "\\":
            hexadecimal = _HEX.match(regex, start)
            return hexadecimal.end() if hexadecimal else start + 2 if start + 2 <= len(regex) else None
        case "[":
            ended = re.compile(r"\[(?!\^\])\^?(?:\\.|[^\]\\])+\]", re.DOTALL).match(regex, start)
            return ended.end() if ended else None
        case "(" if regex.startswith("(?:", start):
            return start + 3
        case "{":
            repeat = _REPEAT.match(regex, start)
            return repeat.end() if repeat else None
        case _:
            return start + 1


def _problem(regex: str, position: int, before: str, token: str, depth: int, *, in_json: bool) -> str | None:
    """What xgrammar would ignore or read otherwise than Python. `before` is the token before."""
    end = position + len(token)
    after = regex[end : end + 1]
    if token == "(" and after == "?":
        return shown(regex[position : position + 4])
    if token == "^" and not (depth == 0 and before in ("", "|")):
        return "^ here"
    if token == "$" and not (depth == 0 and after in ("", "|")):
        return "$ here"
    pieces: list[str] = re.findall(r"\\.", token, re.DOTALL)
    has_hexadecimal = _HEX.search(token) is not None
    for escape in pieces:
        is_hexadecimal = escape[1] in "xu" and has_hexadecimal
        if escape[1].isalnum() and not is_hexadecimal and escape[1] not in _CLASS_ESCAPES + _CHARACTER_ESCAPES:
            return escape
    if in_json and ('"' in token or "\\\\" in token or not token.isascii() or not token.isprintable()):
        return f"{shown(token)}, which JSON would escape,"
    if in_json and any(escape[1] in _CHARACTER_ESCAPES + "xu" for escape in pieces):
        return f"{shown(token)}, which JSON would escape,"
    if in_json and _is_class(token) and not _class_in_json(token):
        return f"{shown(token)}, which matches no character that JSON does not escape,"
    if not in_json and not _translated(token):
        return f"{shown(token)}, which matches no character,"
    return None


def _is_class(token: str) -> bool:
    return token == "." or token[0] == "[" or (token[0] == "\\" and token[1] in _CLASS_ESCAPES)


def _translated(token: str) -> str:
    """xgrammar's `.` includes the line feed, its `\\s` the no-break space, and its `\\x` all digits that follow."""
    if token == ".":
        return r"[^\n]"
    if token in (r"\s", r"\S"):
        return f"[{'^' if token[1] == 'S' else ''}{_SPACES}]"
    if token[0] == "[" and any(escape[0] == r"\S" for escape in _ESCAPE.finditer(token)):
        return _class_by_its_spaces(token)
    token = _ESCAPE.sub(_translated_escape, token)
    return _with_caret_apart(token) if token[0] == "[" else token


def _translated_escape(escape: re.Match[str]) -> str:
    if escape[0] == r"\s":
        return _SPACES
    return f"\\u00{escape[1]}" if escape[1] else escape[0]


def _class_by_its_spaces(token: str) -> str:
    """For a class with `\\S`, which xgrammar takes to be without the no-break space. It has all characters but some
    spaces or, negated, some spaces alone; empty if it has no character."""
    try:
        matches = re.compile(token, re.ASCII).fullmatch
    except re.error:
        return token  # the compiler says why
    is_negated = token[1] == "^"
    spaces = "".join(f"\\u{ord(char):04x}" for char in " \t\n\r\f\v" if (matches(char) is not None) == is_negated)
    if is_negated:
        return f"[{spaces}]" if spaces else ""
    return f"[^{spaces}]" if spaces else r"[\d\D]"


def _translated_in_json(token: str) -> str:
    """For the inside of a JSON string. The whole string matches in any case, so that `^` and `$` may be left out."""
    return "" if token in ("^", "$") else _class_in_json(token) if _is_class(token) else token


@lru_cache(_NUM_CLASSES)
def _class_in_json(token: str) -> str:
    """The characters of `token` that JSON does not escape; empty if there are none."""
    try:
        compiled = re.compile(token, re.ASCII)
    except re.error:
        return token  # the compiler says why
    members = set(compiled.findall(_UNESCAPED))
    is_part = [chr(code) in members for code in range(0x80)]
    if compiled.fullmatch("é"):  # as all characters do that are not ASCII
        return f"[^{_ranges(not one for one in is_part)}]"
    caret, is_part[ord("^")] = _CARET if is_part[ord("^")] else "", False
    return f"[{_ranges(is_part)}{caret}]" if any(is_part) else caret


def _with_caret_apart(token: str) -> str:
    """A caret at the beginning of a class as an alternative to the rest."""
    begins = _BEGINS_WITH_CARET.match(token)
    if begins is None:
        return token
    rest = re.sub(r"^-(?:\^|\\\^|\\u005e)", "", token[begins.end() : -1], flags=re.IGNORECASE)  # a range of one
    if len(rest) > 1 and rest[0] == "-":  # a range from the caret
        rest = chr(ord("^") + 1) + rest
    return f"(?:{_CARET}|[{rest}])" if rest else _CARET


def _ranges(is_part: Iterable[bool]) -> str:
    """The codes that are part of it, as inside a class."""
    runs = [(one, [code for code, _ in run]) for one, run in groupby(enumerate(is_part), key=lambda pair: pair[1])]
    return "".join(f"\\x{codes[0]:02x}-\\x{codes[-1]:02x}" for one, codes in runs if one)
