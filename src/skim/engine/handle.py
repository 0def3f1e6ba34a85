"""A submitted request, as its caller sees it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from skim.engine.sequence import Delta, Event, Failed, Finished
from skim.engine.tracking import Progress, Tracker


class RequestHandle:
    """A submitted request: iterate it for its events, `abort()` it at any time."""

    def __init__(self, request_id: int, abort: Callable[[int], None]) -> None:
        self.id = request_id
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.tracker = Tracker()  # until `Engine.submit` puts that of the request in its place
        self._abort = abort

    @property
    def progress(self) -> Progress:
        return self.tracker.latest

    def abort(self) -> None:
        self._abort(self.id)

    def __iter__(self) -> Iterator[Delta | Finished]:
        """Yield deltas, then `Finished`, or raise the request's error. Iterating again repeats the end."""
        while True:
            event = self.events.get()
            if isinstance(event, (Failed, Finished)):
                self.events.put(event)
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished):
                return
