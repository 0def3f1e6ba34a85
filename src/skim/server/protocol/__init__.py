"""The HTTP API as pydantic models: request bodies in `requests.py`, replies in `replies.py`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A request or a part of one. Unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)
