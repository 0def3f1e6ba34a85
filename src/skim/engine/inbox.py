"""Commands that any thread sends to the engine's thread, and whether that thread still takes them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from skim.errors import EngineError

Command = Callable[[], None]


class Inbox:
    """Commands in the order in which they were sent.

    Hold `lock` from a check to the `put` that relies on it, so that no other command comes between.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.dead: BaseException | None = None
        """The error that ended the engine's thread."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def qsize(self) -> int:
        return self._commands.qsize()

    def empty(self) -> bool:
        return self._commands.empty()

    def check_running(self) -> None:
        """Raise EngineError if no step follows."""
        if self.closed or self.dead is not None:
            raise EngineError(f"the engine is not running: {self.dead or 'it was closed'}")

    def put(self, command: Command) -> None:
        """Have a command run before the next step. Nothing is checked."""
        self._commands.put(command)

    def close(self) -> None:
        """End the engine's thread, and wake it if it waits."""
        with self.lock:
            first, self.closed = not self.closed, True
        if first:
            self.put(lambda: None)  # after the flag, so the thread sees one of them

    def wait(self, timeout: float | None) -> Command | None:
        """Take the next command out; None if there was none for `timeout` seconds."""
        try:
            return self._commands.get(timeout=timeout)
        except queue.Empty:
            return None

    def run(self) -> None:
        """Run the commands that wait."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()
