"""Earlier messages in the form that chat templates expect. Pure functions on messages as plain dicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_KEY, _VALUE = "first_key", "first_value"


def one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Split messages with several calls, for templates that show or allow one. Results follow their calls."""
    waiting: dict[str, Message] = {}  # later calls of a message, by their ids
    for message in messages:
        if message["role"] == "tool":
            if late := waiting.pop(message.get("tool_call_id", ""), None):
                yield late
        else:
            yield from waiting.values()
            waiting = {}
        calls = list(message.get("tool_calls") or ())
        if len(calls) < 2:
            yield message
        else:
            yield {**message, "tool_calls": [calls[0]]}
            waiting = {call["id"]: _calling(call) for call in calls[1:]}
    yield from waiting.values()


def _calling(call: Mapping[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def with_arguments(message: Mapping[str, Any], *, as_text: bool) -> Message:
    """A copy of the message in which arguments of calls are objects, or JSON text. Clients send JSON text."""
    if not (calls := message.get("tool_calls")):
        return dict(message)
    written = [
        {**call, "function": {**call["function"], "arguments": arguments_of(call, as_text=as_text)}}
        for call in calls
    ]
    return {**message, "content": message.get("content") or "", "tool_calls": written}


def arguments_of(call: Mapping[str, Any], *, as_text: bool = False) -> Any:
    """A call's arguments as an object or as JSON; text that is not JSON stays as it is."""
    given = call["function"].get("arguments")
    if isinstance(given, str) and (given.strip() or as_text):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError):
            return given
        return given if as_text else found
    found = {} if given is None or isinstance(given, str) else given
    return json.dumps(found, ensure_ascii=False) if as_text else found


def wants_text(render: Callable[[list[Message]], str]) -> bool:
    """True if a chat template writes arguments correctly only as JSON text. Tries both on a short chat."""

    def shows(arguments: Any, wrong: str) -> bool:
        function = {"name": "f", "arguments": arguments}
        called = {"id": "call00001", "type": "function", "function": function}
        chat: list[Message] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "{}"},
        ]
        try:
            text = render(chat)
        except Exception:  # templates raise what they like
            return False
        return _KEY in text and _VALUE in text and wrong not in text

    arguments = {_KEY: _VALUE}
    return not shows(arguments, f"'{_KEY}'") and shows(json.dumps(arguments), f'\\"{_KEY}')
