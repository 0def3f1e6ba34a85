"""A model served over HTTP: any server with OpenAI's chat API, such as `skim serve`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from skim.bench.address import check_key, is_loopback, parse_address, shown_address
from skim.cli.reply import Piece
from skim.errors import EngineError, RequestError
from skim.progress import progress

CONNECT_TIMEOUT = 10.0
"""Seconds to reach the server. Its answer has no limit: long prompts take time."""

_KEY_REFUSED = (401, 403)
_CALLER_AT_FAULT = (400, 404, 413, 422)


class RemoteModel:
    """A server at `url` and one of its models: the named one, or the first it lists."""

    def __init__(
        self, url: str, key: str | None = None, model: str | None = None, *, setting: str = "api_key"
    ) -> None:
        """`setting` is the one that `key` comes from, which errors name."""
        base = parse_address(url, "--url")
        check_key(key, setting)
        self.model = model
        self._setting = setting
        self.url = shown_address(base)
        self._report: dict[str, Any] | None = None  # of the last reply, from a server of Skim
        self._client = httpx.Client(
            base_url=base,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            trust_env=not is_loopback(base),
        )

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def connect(self) -> None:
        """Reach the server, and ask for the model's name if it was not given."""
        with self._transport_errors(), progress(f"asking {self.url} for its models"):
            answer = self._client.get("v1/models")
        self._refuse(answer)
        try:
            names = [str(entry["id"]) for entry in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{self.url}/v1/models did not answer with a list of models; check that --url is a server "
                "with OpenAI's API"
            ) from error
        if self.model is None and not names:
            raise EngineError(f"{self.url} lists no model; name one as MODEL")
        self.model = self.model or names[0]

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, accepts: Collection[int] = ()
    ) -> Any:
        """Call a route and return its JSON. Raises for an error status, with the server's own reason.

        Statuses that it `accepts` are no errors.
        """
        with self._transport_errors():
            answer = self._client.request(
                method,
                path,
                content=None if body is None else json.dumps(body),
                headers={"Content-Type": "application/json"} if body is not None else {},
            )
        if answer.status_code not in accepts:
            self._refuse(answer)
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(f"{self.url}/{path} did not answer with JSON; check --url") from error

    @property
    def reading(self) -> str:
        """How much of the last prompt the server read, in words."""
        found = self._report
        if found is None:
            return f"{self.url} has not said what it read; start it with `skim serve`"
        prompt, kept = found.get("prompt_tokens"), found.get("kept_tokens")
        if prompt == kept:
            return f"{prompt} prompt tokens, all read"
        return f"{prompt} prompt tokens, {kept} read ({found.get('scorer')})"

    def reply(
        self, messages: Sequence[Mapping[str, Any]], *, temperature: float, max_tokens: int
    ) -> Generator[Piece, None, None]:
        """Stream the reply. Closing the iterator disconnects, which ends the request at the server."""
        self._report = None
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        request = self._client.build_request(
            "POST",
            "v1/chat/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        with self._transport_errors(), contextlib.ExitStack() as stack:
            with progress(f"waiting for {self.model}"):
                answer = self._client.send(request, stream=True)
                stack.callback(answer.close)
                if not answer.is_success:
                    answer.read()
                self._refuse(answer)
                pieces = self._pieces(answer)
                first = next(pieces, Piece("", "abort"))
            yield first
            yield from pieces

    def _pieces(self, answer: httpx.Response) -> Iterator[Piece]:
        """Every chunk with text or a finish reason, up to the stream's `[DONE]`."""
        for line in answer.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            try:
                chunk = json.loads(data)
                if "error" in chunk:
                    raise EngineError(_message(chunk) or f"{self.url} failed without a reason")
                if isinstance(chunk.get("skim"), dict) and "prompt_tokens" in chunk["skim"]:
                    self._report = chunk["skim"]
                for choice in chunk["choices"]:
                    piece = Piece(choice["delta"].get("content") or "", choice.get("finish_reason"))
                    if any(piece):
                        yield piece
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EngineError(f"{self.url} sent an invalid chat chunk: {data[:100]!r}") from error
        raise EngineError(f"{self.url} ended the reply before it was complete; see the server's log")

    def _refuse(self, answer: httpx.Response) -> None:
        """Raise for an error status, with the server's own reason."""
        if answer.is_success:
            return
        body = None
        with contextlib.suppress(ValueError):
            body = answer.json()
        reason = _message(body)
        status = f"{answer.status_code} {answer.reason_phrase}".strip()
        if reason is None:
            reason = f"{self.url} answered {status}; check that --url is a server with OpenAI's API"
        if answer.status_code in _KEY_REFUSED and _code(body) in (None, "invalid_api_key"):
            flag = "--" + self._setting.replace("_", "-")
            variable = f"SKIM_{self._setting.upper()}"
            reason += f" (give the server's key as {variable}, {self._setting} in the file, or {flag})"
        raise (RequestError if answer.status_code in _CALLER_AT_FAULT else EngineError)(reason)

    @contextlib.contextmanager
    def _transport_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineError(
                f"cannot reach {self.url}: {error}; start a server there with `skim serve`, or correct --url"
            ) from error
        except httpx.HTTPError as error:
            detail = str(error) or type(error).__name__
            raise EngineError(
                f"the connection to {self.url} broke: {detail}; see the server's log"
            ) from error


def _code(answer: Any) -> object:
    """The code in OpenAI's error format, or None."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _message(answer: Any) -> str | None:
    """The message in OpenAI's error format: `{"error": {"message": ...}}`."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None
