"""JSON objects in requests: parsed strictly by pydantic, wrong members named. Null members mean "not given"."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from engine.errors import shown
from serving.errors import ServiceError, invalid_argument

UNION_TAGS = FUNCTION, NAMESPACE, WEB_SEARCH = "<function>", "<namespace>", "<web_search>"
"""Which class a value is validated as; pydantic places them among the names of members."""


class StrictModel(BaseModel):
    """A JSON object with exactly these members, and those that are ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Members that clients send and that do not change an answer."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null_and_ignored(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        members = {name: value for name, value in given.items() if value is not None and name not in cls.ignored}
        return cls._supported(members)

    @classmethod
    def _supported(cls, members: dict[str, Any]) -> dict[str, Any]:
        """The members to validate, of those that are left. Raises InvalidArgument."""
        return members

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises InvalidArgument, which names the first wrong parameter."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise invalid_body(error) from None


def invalid_body(error: ValidationError) -> ServiceError:
    """The first of pydantic's errors as an InvalidArgument."""
    first = error.errors(include_url=False, include_context=False)[0]
    # tools[0].name of ("tools", 0, "<function>", "name")
    parts = [part for part in first["loc"] if part not in UNION_TAGS]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if first["type"] == "json_invalid":
        return invalid_argument("body", first["msg"], "a JSON object")
    if first["type"] == "missing":
        return invalid_argument(field, "is required")
    if not field:
        return invalid_argument("body", "is not a JSON object", "a JSON object")
    return invalid_argument(field, f"{shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}")
