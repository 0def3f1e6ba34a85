"""Logs: one line per request, as JSON for programs or as text for people."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from skim import progress

requests = logging.getLogger("skim.requests")


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON. `extra={"fields": {...}}` adds top-level fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record for a terminal: the local time, the message, and fields that say something.

    `12:03:44 POST /v1/chat/completions 200 in 1.2 s  prompt_tokens=812 generated_tokens=40`

    `extra={"told": True}` leaves the fields out: the message has them in words.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        head = request_in_words(fields) if record.name == requests.name else record.getMessage()
        if record.levelno >= logging.WARNING:
            head = f"{record.levelname.lower()}: {head}"
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        rest = "" if getattr(record, "told", False) else " ".join(_pairs(fields))
        line = f"{at} {head}  {rest}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def request_in_words(fields: dict[str, Any]) -> str:
    """The main figures of a request, which are taken out of its fields."""
    method, path, status = (fields.pop(name, None) for name in ("method", "path", "status"))
    took = fields.pop("total_ms", 0.0)
    shown = f"{took / 1e3:.1f} s" if took >= 1000 else f"{took:.0f} ms"
    return f"{method} {_value(path)} {status or 'no status'} in {shown}"


def _pairs(fields: dict[str, Any]) -> list[str]:
    """Fields as `name=value`, without those that are empty, zero or None. Texts with blanks are quoted."""
    told = {name: value for name, value in fields.items() if value not in (None, 0, "", [], {})}
    return [f"{name}={_value(value)}" for name, value in told.items()]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_value, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and " " not in text else json.dumps(text, ensure_ascii=False)


def is_text(log_format: str) -> bool:
    """True if lines are for people: `auto` decides by whether stderr is a terminal."""
    return log_format == "text" or (log_format == "auto" and sys.stderr is not None and sys.stderr.isatty())


def configure(level: str, log_format: str) -> None:
    """Send this process's logs to stderr. Without a terminal for bars, progress becomes log lines."""
    text = is_text(log_format)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    progress.say_with(None if text and sys.stderr.isatty() else logging.getLogger("skim.progress").info)


@dataclass
class RequestLog:
    """The log line of one request, filled in while it runs and written when it ends."""

    id: str
    method: str
    path: str
    size: int = 0  # bytes of the body; not logged
    status: int | None = None
    failure: str | None = None  # the reason it was refused, failed or aborted
    ignored: set[str] = field(default_factory=set)  # fields of the body, named in a header of the reply
    fields: dict[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.perf_counter)

    def fail(self, reason: str, message: str | None = None) -> None:
        self.failure = reason
        if message is not None:
            self.fields["error"] = message

    def write(self) -> None:
        quiet = self.failure is None and self.path in ("/health", "/metrics")
        level = logging.DEBUG if quiet else logging.INFO
        line = {"id": self.id, "method": self.method, "path": self.path, "status": self.status}
        if self.failure is not None:
            line["failure"] = self.failure
        took = {"total_ms": round((time.perf_counter() - self.started_at) * 1e3, 1)}
        requests.log(level, "request", extra={"fields": {**line, **self.fields, **took}})
