"""The HTTP API as pydantic models: request bodies in `requests.py`, replies in `replies.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

TOO_MANY = "too_many"
"""Type of the error that `AtMost` raises."""


class Body(BaseModel):
    """A request or a part of one. Unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """Keep one unknown field of many: pydantic would make an error of each."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = field_names(cls)
        unknown = next((name for name in value if name not in known), None)
        return {name: given for name, given in value.items() if name in known or name == unknown}


@cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@dataclass(frozen=True)
class AtMost:
    """Refuses a list or an object that is longer than a setting of the server allows, before its items.

    The `ServerConfig` is the context of the validation. Without one nothing is refused.
    """

    setting: str
    unit: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        limit = getattr(info.context, self.setting, None)
        if limit is not None and isinstance(value, (list, dict)) and len(value) > limit:
            raise PydanticCustomError(
                TOO_MANY, "this server allows at most {limit} {unit}", {"limit": limit, "unit": self.unit}
            )
        return value
