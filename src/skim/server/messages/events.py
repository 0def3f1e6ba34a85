"""The events of a streamed message, made from the chunks of a chat stream. Pure: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skim.engine.tracking import Progress
from skim.server.errors import ApiError
from skim.server.messages.replies import error_body, stop_of, usage_of
from skim.server.protocol.replies import Usage
from skim.server.reply import named_event

Event = dict[str, Any]


class MessageEvents:
    """Translates one stream. The result does not depend on how the text is cut into chunks."""

    def __init__(self, message_id: str, model: str) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._open: str | None = None  # kind of the content block in progress
        self._index = -1
        self._call = -1  # index of the tool call in progress
        self._finish: tuple[str | None, str | int | None] = (None, None)

    def begin(self, prompt_tokens: int) -> list[Event]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        empty: Event = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [{"type": "message_start", "message": empty}]

    def push(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events of one chunk. The chunk with the usage ends the message."""
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning_content"):
                events += self._into("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                events.append(self._delta({"type": "thinking_delta", "thinking": thought}))
            if text := delta.get("content"):
                events += self._into("text", {"type": "text", "text": ""})
                events.append(self._delta({"type": "text_delta", "text": text}))
            for call in delta.get("tool_calls") or ():
                events += self._called(call)
            if choice["finish_reason"] is not None:
                self._finish = choice["finish_reason"], choice.get("stop_reason")
        if chunk.get("usage") is not None:
            events += self._end(chunk)
        return events

    def _called(self, call: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        if call["index"] != self._call:
            self._call = call["index"]
            events += self._stop()
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            events += self._into("tool_use", block)
        if arguments := call["function"].get("arguments"):
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _into(self, kind: str, block: Mapping[str, Any]) -> list[Event]:
        """Make sure that a block of this kind is in progress."""
        if self._open == kind:
            return []
        events = self._stop()
        self._open = kind
        self._index += 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _end(self, chunk: Mapping[str, Any]) -> list[Event]:
        reason, sequence = stop_of(*self._finish)
        usage = usage_of(Usage.model_validate(chunk["usage"])).model_dump()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": usage, "skim": chunk.get("skim")}
        return [*self._stop(), last, {"type": "message_stop"}]


class MessageFraming:
    """Anthropic's events: each has a name, a ping breaks the silence, and nothing follows the last one."""

    end = b""

    def event(self, event: Mapping[str, Any]) -> bytes:
        return named_event(event)

    def error(self, error: ApiError) -> bytes:
        return named_event(error_body(error))

    def silence(self, progress: Progress) -> bytes:
        return named_event({"type": "ping", "progress": str(progress)})
