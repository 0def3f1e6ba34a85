"""Messages typed at a terminal: with editing, history, and pasted lines as one message."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEPT = 1000  # messages of the history
PASTE_SECONDS = 0.05
"""Lines that follow within this time were pasted, for terminals or libraries without bracketed paste."""


def typed_messages(hint: str, history: Path) -> Iterator[str]:
    """Messages from the terminal until Ctrl-D. `history` keeps those of earlier chats."""
    readline = _readline()
    known = _recall(history) if readline is not None else []
    for earlier in known:
        readline.add_history(earlier)
    print(f"({hint})", file=sys.stderr)
    while True:
        try:
            message = input("> ")
            if not _pastes_whole(readline) and (more := list(_waiting_lines())):
                message = "\n".join([message, *more])
                _join_last(readline, 1 + len(more), message)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n({hint})", file=sys.stderr)
            continue
        if message.strip() and known[-1:] != [message]:
            known.append(message)
            _remember(history, known)
        yield message


def _readline() -> Any:
    """The module, which `input` uses once imported; None if this Python has none."""
    try:
        import readline
    except ImportError:
        return None
    with contextlib.suppress(Exception):  # libedit refuses settings of GNU readline
        readline.parse_and_bind("set enable-bracketed-paste on")
    return readline


def _pastes_whole(readline: Any) -> bool:
    """True if the terminal marks pasted text, and the library returns it with its line ends."""
    gnu = readline is not None and "libedit" not in (readline.__doc__ or "")
    return gnu and os.environ.get("TERM") not in (None, "dumb")


def _waiting_lines() -> Iterator[str]:
    while select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
        yield input()


def _join_last(readline: Any, count: int, message: str) -> None:
    """Make one entry of the last `count` entries of the library's history. Blank lines have none."""
    if readline is not None:
        lines = set(message.split("\n"))
        for _ in range(count):
            last = readline.get_current_history_length()
            if last and readline.get_history_item(last) in lines:
                readline.remove_history_item(last - 1)
        readline.add_history(message)


def _recall(history: Path) -> list[str]:
    """Messages of earlier chats, one JSON text per line. A damaged file is an empty one."""
    try:
        found = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
        return [message for message in found if isinstance(message, str)][-KEPT:]
    except (OSError, ValueError):
        return []


def _remember(history: Path, messages: list[str]) -> None:
    """Write the last messages, readable by this user only. Without a place for them, nothing happens."""
    with contextlib.suppress(OSError):
        history.parent.mkdir(parents=True, exist_ok=True)
        new = history.with_name(f".{history.name}.{os.getpid()}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(message) + "\n" for message in messages[-KEPT:])
        os.replace(new, history)
