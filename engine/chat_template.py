"""A model's chat template: from messages to the text that the model was trained on.

Rendered in jinja2's immutable sandbox with what the templates of the Hugging Face hub expect: `raise_exception`,
`strftime_now`, a `tojson` that leaves HTML characters alone, `break` and `continue`, and `{% generation %}`, which
marks nothing here.
Templates come with the model and are trusted to end; messages and variables are not trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest, UnsupportedModel, shown

Messages = Sequence[Mapping[str, Any]]
"""As OpenAI has them: role, content (a string, or a list of parts), tool_calls…"""
Tools = Sequence[Mapping[str, Any]]

_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: training tools mark assistants' text with it; rendering passes it on."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `special_tokens` (bos_token, eos_token…) are variables it may use. Free of state."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UnsupportedModel(f"the chat template does not compile: {shown(str(error))}") from error
        self._special_tokens = dict(special_tokens)
        self.own_names = frozenset(
            {"messages", "tools", "add_generation_prompt", *special_tokens, *environment.globals}
        )
        """What a template has from here: variables cannot have these names."""

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` are the template's own switches (enable_thinking…) and replace none of ours.

        Raises `InvalidRequest` for messages the template refuses or stumbles over, and for variables by a name of ours.
        """
        if not messages:
            raise InvalidRequest("messages", "the list is empty", "at least one message")
        self._check(variables or {})
        ours = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**(variables or {}), **self._special_tokens, **ours})
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {shown(str(error))}") from error
        except RecursionError:
            raise InvalidRequest("messages", "nested too deeply for the chat template") from None

    def _check(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if not _VARIABLE.fullmatch(name) or name in self.own_names:
                taken = "its own" if name in self.own_names else "no name of a variable"
                raise InvalidRequest(
                    "template_variables",
                    f"{shown(name)} is {taken}",
                    f"1..64 of [A-Za-z0-9_], a letter first, and none of {', '.join(sorted(self.own_names))}",
                )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
