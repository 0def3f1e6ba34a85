"""Structured logs: one JSON object per line, one line per request."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

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


def configure(level: str) -> None:
    """Send this process's logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


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
