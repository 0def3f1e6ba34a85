"""Responses kept in memory for `previous_response_id`, within a number and a size.

The least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from skim.server.responses.replies import response_of

Item = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A response and the items that it answered."""

    response: dict[str, Any]
    input: tuple[Item, ...]  # of the whole conversation, in order
    size: int  # bytes of both as JSON, or more

    @property
    def conversation(self) -> list[Item]:
        """The items that the next response continues."""
        return [*self.input, *self.response["output"]]


class ResponseStore:
    """At most `most` responses of at most `most_bytes`. Each counts with its whole conversation.

    Items that conversations share are stored once and counted each time, so memory stays below the limit.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, response_id: str) -> Stored | None:
        """A stored response, which becomes the newest."""
        found = self._stored.get(response_id)
        if found is not None:
            self._stored.move_to_end(response_id)
        return found

    def find_item(self, name: str) -> Item | None:
        """An output item of a stored response, by its id."""
        stored = self._stored.get(response_of(name))
        output = stored.response["output"] if stored is not None else ()
        return next((item for item in output if item["id"] == name), None)

    def put(self, response_id: str, stored: Stored) -> bool:
        """Store a response; False if it exceeds the limits alone."""
        if self.most < 1 or stored.size > self.most_bytes:
            return False
        self.delete(response_id)
        self._stored[response_id] = stored
        self.bytes += stored.size
        while len(self._stored) > self.most or self.bytes > self.most_bytes:
            _, oldest = self._stored.popitem(last=False)
            self.bytes -= oldest.size
        return True

    def delete(self, response_id: str) -> bool:
        """Forget a response; False if it is not there."""
        found = self._stored.pop(response_id, None)
        if found is not None:
            self.bytes -= found.size
        return found is not None
