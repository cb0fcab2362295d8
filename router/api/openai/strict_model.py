"""JSON objects in requests: parsed strictly by pydantic, wrong members named. Null members mean "not given"."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from router.api.openai.errors import invalid_body


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
