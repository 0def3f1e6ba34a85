"""The events of a streamed response, made from the chunks of a chat stream. Pure: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skim.engine.tracking import Progress
from skim.server.errors import ApiError
from skim.server.protocol.replies import ChatLogprob, SkimReport, Usage
from skim.server.reply import named_event
from skim.server.responses.replies import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputThought,
    ResponseObject,
    finished,
    item_id,
)
from skim.server.responses.requests import Status

Event = dict[str, Any]


class ResponseEvents:
    """Translates one stream. `response` is the response so far, complete after the last chunk."""

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._items: list[OutputItem] = []
        self._is_open = False  # the last item is in progress
        self._call = -1  # index of the tool call in progress
        self._logprobs: list[dict[str, Any]] = []  # of tokens that have shown no text yet
        self._finish: str | None = None

    def begin(self) -> list[Event]:
        shown = self.response.model_dump()
        return [{"type": f"response.{kind}", "response": shown} for kind in ("created", "in_progress")]

    def push(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events of one chunk. The chunk with the usage ends the response."""
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._logprobs += (choice.get("logprobs") or {}).get("content") or []
            if thought := delta.get("reasoning_content"):
                events += self._thought(thought)
            if text := delta.get("content"):
                events += self._text(text)
            for call in delta.get("tool_calls") or ():
                events += self._called(call)
            self._finish = choice["finish_reason"] or self._finish
        if chunk.get("usage") is not None:
            events += self._end(chunk)
        return events

    def _thought(self, thought: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_in(OutputReasoning):
            events = self._close("completed")
            item = OutputReasoning(id=self._new_id("rs"), status="in_progress", content=[])
            events += self._open(item)
            item.content.append(OutputThought(text=""))
            events.append(self._of_part("response.content_part.added", part=item.content[0].model_dump()))
        self._logprobs = []  # items of other kinds have none
        part = self._items[-1].content[0]  # type: ignore[union-attr]
        part.text += thought
        return [*events, self._of_part("response.reasoning_text.delta", delta=thought)]

    def _text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_in(OutputMessage):
            events = self._close("completed")
            item = OutputMessage(id=self._new_id("msg"), status="in_progress", content=[])
            events += self._open(item)
            item.content.append(OutputText(text="", logprobs=[]))
            events.append(self._of_part("response.content_part.added", part=item.content[0].model_dump()))
        part = self._items[-1].content[0]  # type: ignore[union-attr]
        part.text += text
        logprobs, self._logprobs = self._logprobs, []
        part.logprobs += [ChatLogprob.model_validate(one) for one in logprobs]  # type: ignore[union-attr]
        return [*events, self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _called(self, call: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        function = call["function"]
        if call["index"] != self._call:
            self._call = call["index"]
            events = self._close("completed")
            item = OutputCall(
                id=self._new_id("fc"),
                status="in_progress",
                call_id=call["id"],
                name=function["name"],
                arguments="",
            )
            events += self._open(item)
        self._logprobs = []
        if arguments := function.get("arguments"):
            last = self._items[-1]
            assert isinstance(last, OutputCall)
            last.arguments += arguments
            events.append(self._of_item("response.function_call_arguments.delta", delta=arguments))
        return events

    # -- items

    def _is_in(self, kind: type) -> bool:
        return self._is_open and isinstance(self._items[-1], kind)

    def _new_id(self, kind: str) -> str:
        return item_id(kind, self.response.id, len(self._items))

    def _open(self, item: OutputItem) -> list[Event]:
        self._items.append(item)
        self._is_open = True
        at = len(self._items) - 1
        return [{"type": "response.output_item.added", "output_index": at, "item": item.model_dump()}]

    def _close(self, status: Status) -> list[Event]:
        """End the item in progress, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item.status = status
        events: list[Event] = []
        if isinstance(item, OutputCall):
            whole = {"name": item.name, "arguments": item.arguments}
            events.append(self._of_item("response.function_call_arguments.done", **whole))
        else:
            [part] = item.content
            if isinstance(part, OutputText):
                logprobs = [one.model_dump() for one in part.logprobs]
                done = self._of_part("response.output_text.done", text=part.text, logprobs=logprobs)
            else:
                done = self._of_part("response.reasoning_text.done", text=part.text)
            events += [done, self._of_part("response.content_part.done", part=part.model_dump())]
        at = len(self._items) - 1
        return [*events, {"type": "response.output_item.done", "output_index": at, "item": item.model_dump()}]

    def _of_item(self, kind: str, **fields: Any) -> Event:
        at = len(self._items) - 1
        return {"type": kind, "item_id": self._items[-1].id, "output_index": at, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)

    def _end(self, chunk: Mapping[str, Any]) -> list[Event]:
        events = self._text("") if not self._items or (self._logprobs and self._is_in(OutputMessage)) else []
        events += self._close("incomplete" if self._finish == "length" else "completed")
        usage, skim = Usage.model_validate(chunk["usage"]), SkimReport.model_validate(chunk["skim"])
        self.response = finished(self.response, self._items, self._finish, usage, skim)
        kind = f"response.{self.response.status}"
        return [*events, {"type": kind, "response": self.response.model_dump()}]


class ResponseFraming:
    """OpenAI's named events, numbered in order. Nothing follows the last one; comments break the silence."""

    end = b""

    def __init__(self) -> None:
        self._sent = 0

    def event(self, event: Mapping[str, Any]) -> bytes:
        numbered = {**event, "sequence_number": self._sent}
        self._sent += 1
        return named_event(numbered)

    def error(self, error: ApiError) -> bytes:
        told = {"code": error.code or error.body()["error"]["type"], "message": error.message}
        return self.event({"type": "error", **told, "param": error.param})

    def silence(self, progress: Progress) -> bytes:
        return f": {progress}\n\n".encode()
