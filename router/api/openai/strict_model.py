"""JSON objects in requests: parsed strictly by pydantic, wrong members named."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from router.api.openai.errors import invalid_body


class StrictModel(BaseModel):
    """A JSON object with exactly these members."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises InvalidArgument, which names the first wrong parameter."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise invalid_body(error) from None
