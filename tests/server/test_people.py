"""The server for people: readable logs, the ready line, web pages of other origins, and its own pages."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from skim import progress
from skim.config import ServerConfig
from skim.errors import ConfigError
from skim.server import logs, pages
from skim.server.openapi import describe
from skim.server.routes import ENDPOINTS
from skim.server.run import ready_in_words
from tests.live import LiveServer
from tests.terminal import Terminal

# -- logs


@pytest.fixture
def restored() -> Iterator[None]:
    root, httpx_log = logging.getLogger(), logging.getLogger("httpx")
    before = root.handlers[:], root.level, httpx_log.level
    yield
    root.handlers[:], root.level, httpx_log.level = before
    progress.say_with(None)


def written(stream: io.StringIO, log_format: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of one request, one warning and one line of progress."""
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("info", log_format)
    line = logs.RequestLog("id7", "POST", "/v1/chat/\x1b[31m", status=200)
    line.fields |= {"prompt_tokens": 812, "cached_tokens": 0, "user": None, "error": "two words"}
    line.write()
    logging.getLogger("skim").warning("careful")
    progress.say("downloading ...")
    return stream.getvalue().splitlines()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("stream", "log_format", "text"),
    [
        (Terminal, "auto", True),
        (io.StringIO, "auto", False),
        (io.StringIO, "text", True),
        (Terminal, "json", False),
    ],
)
def test_logs_are_for_people_on_a_terminal_and_json_elsewhere(
    stream: type[io.StringIO], log_format: str, text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = written(stream(), log_format, monkeypatch)
    assert len(lines) == 3
    if not text:
        parsed = [json.loads(line) for line in lines]
        assert parsed[0]["prompt_tokens"] == 812
        assert [line["message"] for line in parsed[1:]] == ["careful", "downloading ..."]
        return
    path = re.escape(json.dumps("/v1/chat/\x1b[31m"))
    assert re.fullmatch(
        rf'\d\d:\d\d:\d\d POST {path} 200 in \d+ ms  id=id7 prompt_tokens=812 error="two words"', lines[0]
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: careful", lines[1])
    assert lines[2].endswith("downloading ...")
    assert "\x1b" not in "".join(lines)


def test_ready_states_model_dtype_window_pool_and_skimming() -> None:
    facts: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "weight_bytes": 5 * 2**29,
        "weight_bits": 4.63,
        "max_model_len": 8192,
        "kv_pool_bytes": 3 * 2**29,
        "kv_pool_tokens": 65536,
        "kv_format": "int8",
        "slow_fast": "off",
        "slow_fast_layers": 30,
        "sparse_prefill": "auto",
        "scorer": "blend",
        "residency": "both",
        "idle_park": 0.0,
    }
    assert ready_in_words("m", "http://h:1", facts) == (
        "ready: m on http://h:1 (float32 on cpu, weights of 2.5 GiB in 4.6 bits, context window 8,192 "
        "tokens, KV pool 1.5 GiB for 65,536 tokens in int8, skimming auto by blend)"
    )
    assert "skimming off)" in ready_in_words("m", "http://h:1", {**facts, "sparse_prefill": "off"})
    assert ready_in_words("m", "http://h:1", {**facts, "slow_fast": "auto"}).endswith(
        ", slow-fast decode auto)"
    )
    with_drafter = {**facts, "drafter": "small", "drafter_bytes": 92 * 2**20, "drafter_bits": 4.51}
    assert ready_in_words("m", "http://h:1", with_drafter).endswith(
        "by blend, drafter small of 92.0 MiB in 4.5 bits)"
    )
    moving = {**facts, "residency": "swap", "idle_park": 60.0}
    assert ready_in_words("m", "http://h:1", moving).endswith(
        "by blend, residency swap, parked after 60 s without work)"
    )
    idle = {**facts, "slow_fast": "on", "slow_fast_layers": 0}
    assert ready_in_words("m", "http://h:1", idle).endswith(
        ", slow-fast decode on without effect: every layer has a sliding window)"
    )


# -- web pages of other origins

APP = "https://app.example"


def preflight(url: str, origin: str = APP, headers: str = "authorization,content-type") -> httpx.Response:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": headers,
        "Access-Control-Request-Private-Network": "true",
    }
    return httpx.options(f"{url}/v1/chat/completions", headers=asked, trust_env=False)


@pytest.mark.parametrize("api_key", [None, "secret"])
@pytest.mark.parametrize("allow_origin", [f"http://localhost:3000, {APP}", "*"])
def test_a_page_of_an_allowed_origin_may_call_with_its_key(api_key: str | None, allow_origin: str) -> None:
    with LiveServer(None, api_key=api_key, allow_origin=allow_origin) as server:
        asked = preflight(server.url)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in ("*", APP)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert asked.headers["access-control-allow-private-network"] == "true"
        with server.client(headers={"Origin": APP}) as client:
            key = {"Authorization": f"Bearer {api_key}"}
            loading = client.get("/v1/models", headers=key)
            assert loading.status_code == 503  # it came through
            refused = client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
            assert refused.status_code == (503 if api_key is None else 401)
            for reply in (loading, refused):  # a page may read errors as well
                assert reply.headers["access-control-allow-origin"] in ("*", APP)
                assert reply.headers["x-request-id"]


def test_pages_of_other_origins_get_no_permission() -> None:
    other = "https://other.example"
    with LiveServer(None, allow_origin=APP) as server:
        asked = preflight(server.url, other)
        assert asked.status_code == 400
        assert "access-control-allow-origin" not in asked.headers
        reply = httpx.get(f"{server.url}/v1/models", headers={"Origin": other}, trust_env=False)
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers
        rebound = httpx.get(
            f"{server.url}/v1/models", headers={"Origin": APP, "Host": "app.example"}, trust_env=False
        )
        assert rebound.status_code == 403  # an allowed page does not make its name one of this machine's
    with LiveServer(None) as server:
        assert preflight(server.url).status_code in (403, 405)


@pytest.mark.parametrize(
    "wrong", ["app.example", "https://app.example/", "https://u@app.example", "ftp://a", ","]
)
def test_an_origin_that_no_browser_sends_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="allow_origin must be origins such as"):
        ServerConfig(allow_origin=wrong)


# -- its own pages


class Page(HTMLParser):
    """The links, ids and resources of a page, and whether its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert "src" not in found
        self.links |= {found["href"] or ""} if "href" in found else set()
        self.ids |= {found["id"] or ""} if "id" in found else set()
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_pages_say_what_there_is_and_every_link_leads_somewhere() -> None:
    with LiveServer(None) as server, server.client() as client:
        assert "smollm2-135m" in client.get("/").text
        for path in pages.PATHS:
            reply = client.get(path)
            assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
            page = Page(reply.text)
            assert not page.tags & {"script", "img", "link", "iframe"}
            for link in page.links:
                if link.startswith("#"):
                    assert link[1:] in page.ids
                else:
                    assert link.startswith("/")
                    assert client.get(link).status_code in (200, 503)
            assert all(one.path.replace(":path", "") in reply.text for one in ENDPOINTS)


def test_pages_need_no_key_and_do_not_name_the_model_then() -> None:
    with LiveServer(None, api_key="secret") as server, server.client() as client:
        for path in pages.PATHS:
            assert client.get(path).status_code == 200
            assert "smollm2-135m" not in client.get(path).text
        assert client.get("/openapi.json").status_code == 401


def test_the_docs_list_every_field_of_a_request() -> None:
    document = describe(ENDPOINTS, ServerConfig(), "the-model")
    text = pages.docs(document).body.decode()
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"):
            assert all(f"<code>{field}</code>" in text for field in schema["properties"])
    assert "the-model" not in text
    assert pages.in_words({"type": "array", "items": {"type": "integer", "minimum": 0}}) == (
        "list of integer (at least 0)"
    )
