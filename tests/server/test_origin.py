"""Requests that a web page could make a browser send to a server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from skim.config import ServerConfig
from skim.server.errors import ApiError
from skim.server.origin import HostCheck, check_json, is_loopback
from tests.live import LiveServer

LOCAL = [
    "localhost",
    "localhost:8000",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]:8000",
    "[::1]",
    "skim.localhost",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
]
BROKEN = ["", "[", "a b", "user@localhost@evil.example", "\u00ff"]


def allowed(config: ServerConfig, header: bytes, value: str) -> bool:
    try:
        HostCheck(config).check([(header, value.encode("latin-1"))])
    except ApiError as error:
        return (error.status, "--api-key" in error.message) != (403, True)
    return True


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine_are_allowed(host: str) -> None:
    assert allowed(ServerConfig(), b"host", host)
    assert allowed(ServerConfig(), b"origin", f"http://{host}")


@pytest.mark.parametrize("host", [*FOREIGN, *BROKEN])
def test_other_names_are_refused_on_a_keyless_local_server(host: str) -> None:
    assert not allowed(ServerConfig(), b"host", host)
    assert not allowed(ServerConfig(), b"origin", f"https://{host}")
    assert not allowed(ServerConfig(), b"origin", "null")


def test_a_key_or_another_address_or_a_list_decides() -> None:
    assert allowed(ServerConfig(api_key="k"), b"host", "evil.example")
    assert allowed(ServerConfig(host="0.0.0.0"), b"host", "evil.example")
    listed = ServerConfig(allowed_hosts="skim.example, Other.example")
    assert allowed(listed, b"host", "skim.example:8000")
    assert allowed(listed, b"origin", "https://other.example")
    assert not allowed(listed, b"host", "evil.example")
    assert not allowed(ServerConfig(host="0.0.0.0", allowed_hosts="skim.example"), b"host", "evil.example")
    assert allowed(ServerConfig(allowed_hosts="*"), b"host", "evil.example")


def test_every_header_is_checked() -> None:
    with pytest.raises(ApiError):
        HostCheck(ServerConfig()).check([(b"host", b"evil.example"), (b"host", b"localhost")])
    HostCheck(ServerConfig()).check([])  # no browser leaves both out


@pytest.mark.parametrize("name", ["::1", "127.0.0.1", "localhost"])
def test_loopback(name: str) -> None:
    assert is_loopback(name)
    assert not is_loopback("0.0.0.0")


@pytest.mark.parametrize(
    ("kind", "fine"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("text/plain", False),
        ("text/plain; application/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data", False),
        ("", False),
        (None, False),
    ],
)
def test_a_body_must_be_announced_as_json(kind: str | None, fine: bool) -> None:
    headers = [(b"content-type", kind.encode())] if kind is not None else []
    if fine:
        check_json(headers)
        return
    with pytest.raises(ApiError, match="application/json") as refused:
        check_json(headers)
    assert refused.value.status == 415


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with LiveServer(None) as server, server.client() as client:
        yield client


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 503),  # still loading: the request came through
        ({"Origin": "http://localhost:3000"}, 503),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_web_page_cannot_use_a_keyless_local_server(
    http: httpx.Client, path: str, headers: dict[str, str], status: int
) -> None:
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"model": "m", "prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    reply = http.post(path, json=bodies[path], headers=headers)
    assert reply.status_code == status, reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/health", headers={"Host": "evil.example"}).json()["status"] == "loading"


@pytest.mark.parametrize("named", ["evil.example", "https://evil.example", "https://evil.example:8443/page"])
def test_the_advice_of_a_refusal_works(named: str) -> None:
    host = [(b"host", b"evil.example:8443")]
    with pytest.raises(ApiError, match=r"name 'evil\.example' in --allowed-hosts"):
        HostCheck(ServerConfig()).check(host)
    page = [(b"origin", b"https://evil.example:8443")]
    with pytest.raises(
        ApiError, match=r"'https://evil\.example:8443' .* name it in --allow-origin, or start"
    ):
        HostCheck(ServerConfig()).check(page)
    HostCheck(ServerConfig(allow_origin="https://evil.example:8443")).check(page)
    HostCheck(ServerConfig(allowed_hosts=f"other, {named}")).check(host + page)


def test_an_origin_without_a_name_cannot_be_allowed() -> None:
    with pytest.raises(ApiError, match="not allowed here; start the server with --api-key"):
        HostCheck(ServerConfig()).check([(b"origin", b"null")])
