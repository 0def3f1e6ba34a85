"""The HTTP API as pydantic models: request bodies in `requests.py`, replies in `replies.py`.

Clients send more fields than a server needs, so a `Body` is tolerant. A field of the model is *used*. A field
in `Body.refused` would change the answer in a way that is not supported: its request is *refused*. Any other
field is *ignored*, and named in the reply's `X-Skim-Ignored` header. A field that is null counts as left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from skim.config import ServerConfig

TOO_MANY = "too_many"
"""Type of the error that `AtMost` raises."""
REFUSED = "refused"
"""Type of the error for a field that is not supported; its message is the reason."""
MISSPELLED = "misspelled"
"""Type of the error for an unknown field of Skim's own options that resembles a known one."""

_MOST_NAMES, _LONGEST_NAME = 32, 64  # of ignored fields that are reported


@dataclass
class Checking:
    """Context of one validation: the server's limits, and the fields that were ignored so far."""

    config: ServerConfig
    ignored: set[str] = field(default_factory=set)

    def ignore(self, name: str) -> None:
        if len(self.ignored) < _MOST_NAMES:
            self.ignored.add(re.sub(r"[^!-~]|,", "?", name[:_LONGEST_NAME]))


class Body(BaseModel):
    """A request or a part of one. Values of another type are refused, unknown fields are ignored.

    A whole number may be written as a float, such as `8.0`: JSON has only one kind of number.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    place: ClassVar[str] = ""
    """Where the object stands in a body, such as `messages[]`: the beginning of the names it ignores."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that are not supported, with the reason. Null, false and empty values are harmless."""
    repeated: ClassVar[Collection[str]] = ()
    """Fields of the model that are ignored too: the reply only repeats them."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        """Drop null and unknown fields, and report the unknown ones."""
        if not isinstance(value, dict):
            return value
        known = field_names(cls)
        kept = {name: _whole(given) for name, given in value.items() if name in known and given is not None}
        if len(kept) < len(value):
            for name, given in value.items():
                if name not in known and given is not None:
                    cls._ignore(name, given, info.context)
        for name in cls.repeated:
            if name in kept:
                cls._ignore(name, kept[name], info.context)
        return kept

    @classmethod
    def _ignore(cls, name: str, given: Any, context: Any) -> None:
        if name in cls.refused and given not in (False, "", [], {}):
            reason = PydanticCustomError(REFUSED, "{reason}", {"reason": cls.refused[name]})
            raise ValidationError.from_exception_data(
                cls.__name__, [InitErrorDetails(type=reason, loc=(name,), input=given)]
            )
        if isinstance(context, Checking):
            context.ignore(f"{cls.place}.{name}" if cls.place else name)


class StrictBody(BaseModel):
    """Options that only Skim has. An unknown one is a mistake, so it is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    refused: ClassVar[Mapping[str, str]] = {}
    """Names that are not options, with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """Keep one unknown field of many: pydantic would make an error of each. A misspelled one is named."""
        if not isinstance(value, dict):
            raise PydanticCustomError("object", "must be an object with options")
        known = field_names(cls)
        unknown = next((name for name in value if name not in known), None)
        reason = None
        if unknown is not None and unknown in cls.refused:
            reason = PydanticCustomError(REFUSED, "{reason}", {"reason": cls.refused[unknown]})
        elif unknown is not None and (close := difflib.get_close_matches(unknown[:64], known, n=1)):
            reason = PydanticCustomError(MISSPELLED, "did you mean {name}?", {"name": close[0]})
        if unknown is not None and reason is not None:
            raise ValidationError.from_exception_data(
                cls.__name__, [InitErrorDetails(type=reason, loc=(unknown,), input=value[unknown])]
            )
        return {name: _whole(given) for name, given in value.items() if name in known or name == unknown}


def _whole(value: Any) -> Any:
    """A float that is a whole number, as an int; strict float fields take it too."""
    if type(value) is float and abs(value) <= 2**53 and value.is_integer():
        return int(value)
    return value


@cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@dataclass(frozen=True)
class AtMost:
    """Refuses a list or an object that is longer than a setting of the server allows, before its items.

    The setting is in the `Checking` of the validation. Without one nothing is refused.
    """

    setting: str
    unit: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        if not isinstance(info.context, Checking) or not isinstance(value, (list, dict)):
            return value
        limit = getattr(info.context.config, self.setting)
        if len(value) > limit:
            raise PydanticCustomError(
                TOO_MANY, "this server allows at most {limit} {unit}", {"limit": limit, "unit": self.unit}
            )
        return value
