"""One streamed request to a server with OpenAI's API: the arrival times of its chunks, or its failure.

Times count from the moment the request was due. TTFT ends with the first chunk that has text (a chat's
opening chunk has only a role), the request with the last chunk that has a choice. A chunk may hold several
tokens, so they are counted by the server's `usage`; a server without it cannot be measured.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from skim.bench.address import check_key, is_loopback, parse_address, shown_address
from skim.measure.report import MeasurementError, reason_of

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT = 10.0
NO_CONNECTION = "no connection"
Api = Literal["completions", "chat"]
_PATHS = {"completions": "v1/completions", "chat": "v1/chat/completions"}
_WHOLE = ("stop", "length")


class Unreachable(MeasurementError):
    """No server answers at the address."""


@dataclass(frozen=True)
class Reply:
    """A complete reply: times in seconds, and the server's token counts."""

    ttft: float
    e2e: float
    gaps: tuple[float, ...]  # between chunks with text
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Failure:
    """The reason that a request does not count."""

    kind: str  # failures of one kind are counted together
    detail: str


@dataclass(frozen=True)
class Target:
    """A server, and the settings of requests to it."""

    url: str  # with or without the `/v1` that other clients need
    api: Api = "completions"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = False
    timeout: float = 600.0  # seconds without a byte

    def __post_init__(self) -> None:
        check_key(self.api_key, "SKIM_API_KEY")
        object.__setattr__(self, "url", str(parse_address(self.url, "URL")))

    @property
    def shown(self) -> str:
        """The address without a password."""
        import httpx

        return shown_address(httpx.URL(self.url))

    def client(self) -> httpx.AsyncClient:
        """A client that opens a connection per request: servers may close a kept one just as it is reused."""
        import httpx

        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=httpx.Timeout(self.timeout, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=not is_loopback(httpx.URL(self.url)),
        )

    def body(self, text: str, max_tokens: int) -> dict[str, Any]:
        prompt: dict[str, Any] = (
            {"prompt": text}
            if self.api == "completions"
            else {"messages": [{"role": "user", "content": text}]}
        )
        return {
            "model": self.model,
            **prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


async def first_model(client: httpx.AsyncClient, target: Target) -> str:
    """Name of the first model that the server lists."""
    import httpx

    try:
        answer = await client.get("v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        detail = _message(error.response.content) or error.response.reason_phrase
        key = "; set SKIM_API_KEY to the server's key" if answer.status_code in (401, 403) else ""
        raise MeasurementError(
            f"{target.shown}/v1/models answered {answer.status_code} {detail}{key}"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise unreachable(target, str(error) or type(error).__name__) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise MeasurementError(
            f"{target.shown}/v1/models lists no model; check the URL, or name one with --model"
        ) from error


def unreachable(target: Target, detail: str) -> Unreachable:
    return Unreachable(f"cannot reach {target.shown}: {detail}; start a server there, or correct the URL")


async def ask(
    client: httpx.AsyncClient, target: Target, text: str, max_tokens: int, due: float
) -> Reply | Failure:
    """Send one request and read its stream. Every error is returned as a `Failure`, never raised.

    That includes errors of the client and of this code: an exception would end all requests of the load.
    """
    import httpx

    stream = Stream(due)
    try:
        body = target.body(text, max_tokens)
        async with client.stream("POST", _PATHS[target.api], json=body) as answer:
            if not answer.is_success:
                detail = _message(await answer.aread()) or answer.reason_phrase
                return Failure(f"HTTP {answer.status_code}", detail)
            async for line in answer.aiter_lines():
                if failure := stream.add(line, time.perf_counter()):
                    return failure
        return stream.reply()
    except httpx.TimeoutException as error:
        return Failure("timeout", f"{type(error).__name__}: no byte within {target.timeout:g} s")
    except httpx.ConnectError as error:
        return Failure(NO_CONNECTION, str(error))
    except httpx.HTTPError as error:
        return Failure("connection broke", str(error) or type(error).__name__)
    except Exception as error:
        return Failure("error", reason_of(error))


class Stream:
    """Reads an event stream line by line and records arrival times."""

    def __init__(self, due: float) -> None:
        self._due = due
        self._texts: list[float] = []
        self._last = due
        self._usage: dict[str, Any] | None = None
        self._finish: str | None = None
        self._events = 0
        self._done = False

    def add(self, line: str, now: float) -> Failure | None:
        name, _, data = line.partition(":")
        if name == "error":  # older llama.cpp servers
            return Failure("error in the stream", data.strip()[:200])
        if name != "data":
            return None
        self._events += 1
        if data.strip() == "[DONE]":
            self._done = True
            return None
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                return Failure("error in the stream", (_message(data.encode()) or data)[:200])
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk.get("choices") or ():
                self._last = now
                self._finish = choice.get("finish_reason") or self._finish
                if _text(choice):
                    self._texts.append(now)
        except (ValueError, AttributeError, TypeError):
            return Failure("garbled stream", data[:100])
        return None

    def reply(self) -> Reply | Failure:
        """The reply, if it is complete and has token counts."""
        if not self._events:
            return Failure("no stream", "the response has no events although a stream was requested")
        if not self._done:
            return Failure("cut stream", "the stream ended without [DONE]")
        if not self._texts:
            return Failure("empty reply", f"no text arrived (finish_reason {self._finish!r})")
        if self._finish not in _WHOLE:
            return Failure("unfinished reply", f"finish_reason is {self._finish!r}")
        try:
            usage = self._usage or {}
            details = usage.get("prompt_tokens_details") or {}
            return Reply(
                ttft=self._texts[0] - self._due,
                e2e=self._last - self._due,
                gaps=tuple(b - a for a, b in pairwise(self._texts)),
                prompt_tokens=int(usage["prompt_tokens"]),
                output_tokens=int(usage["completion_tokens"]),
                cached_tokens=details.get("cached_tokens"),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return Failure(
                "no usage", "the stream has no token counts although stream_options.include_usage was set"
            )


def _text(choice: dict[str, Any]) -> str:
    """Text that a chunk adds to the reply, reasoning included."""
    delta = choice.get("delta") or choice
    return next(
        (delta[name] for name in ("text", "content", "reasoning_content", "reasoning") if delta.get(name)), ""
    )


def _message(content: bytes) -> str | None:
    """The message in OpenAI's error format: `{"error": {"message": ...}}`."""
    with contextlib.suppress(ValueError, AttributeError):
        error = json.loads(content).get("error")
        found = error.get("message") if isinstance(error, dict) else error
        return str(found)[:200] if found else None
    return None
