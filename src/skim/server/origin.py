"""The names by which a server may be addressed, and the web pages that may call it.

A server without a key trusts everyone who reaches its port. On a loopback address that is this machine, which
includes any web page in its browser: the page can send requests, or resolve its own name to 127.0.0.1. The
browser then names the page in the headers Origin or Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from skim.config import ServerConfig
from skim.errors import shown
from skim.server.errors import ApiError

Headers = Iterable[tuple[bytes, bytes]]


class HostCheck:
    """Refuses requests that name another host, if the server has `allowed_hosts`, or no key and a loopback
    address. Names of this machine's loopback addresses are always allowed."""

    def __init__(self, config: ServerConfig) -> None:
        given = [name.strip().lower() for name in (config.allowed_hosts or "").split(",")]
        named = {(_origin(name.encode()) or name) if "://" in name else name for name in given if name}
        local = config.api_key is None and is_loopback(config.host)
        self._allowed = named
        self._origins = origins_of(config)
        self.active = "*" not in named and (bool(named) or local)

    def check(self, headers: Headers) -> None:
        """Raise an `ApiError` unless the Host and the Origin are allowed. Either may be missing."""
        if not self.active:
            return
        for header, value in headers:
            if header == b"origin" and {"*", value.decode("latin-1")} & self._origins:
                continue
            if header in _NAMES and not self._allows(host := _NAMES[header](value)):
                name = header.decode()
                named = f"{shown(host)} in --allowed-hosts" if name == "host" else "it in --allow-origin"
                remedy = "" if host is None else f"name {named}, or "
                raise ApiError(
                    403,
                    f"the {name.capitalize()} {shown(value.decode('latin-1'))} is not allowed here; "
                    f"{remedy}start the server with --api-key",
                    code=f"{name}_not_allowed",
                    reason="forbidden",
                )

    def _allows(self, name: str | None) -> bool:
        return name is not None and (name in self._allowed or is_loopback(name))


def origins_of(config: ServerConfig) -> set[str]:
    """The web origins that may call the server (`allow_origin`)."""
    return {origin.strip() for origin in (config.allow_origin or "").split(",")} - {""}


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Answer preflights and add CORS headers for the origins in `allow_origin`; without any, `app` itself.

    A preflight has no key, so it is answered before keys are checked. The server uses no cookies.
    """
    origins = origins_of(config)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=sorted(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_private_network=True,
        max_age=600,
    )


def is_loopback(name: str) -> bool:
    """True for localhost and for addresses that only this machine reaches."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host(value: bytes) -> str | None:
    """The name in a Host header, without the port."""
    return _origin(b"http://" + value)


def _origin(value: bytes) -> str | None:
    """The name in an Origin header; None for `null` and for anything that is not an address."""
    try:
        return urlsplit(value.decode("latin-1")).hostname
    except ValueError:
        return None


_NAMES = {b"host": _host, b"origin": _origin}


def check_json(headers: Headers) -> None:
    """Raise an `ApiError` unless the body is announced as JSON. Web pages cannot announce that unasked."""
    given = dict(headers).get(b"content-type", b"")
    kind = given.partition(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        got = shown(given.decode("latin-1")) if given else "none"
        raise ApiError(
            415, f"send the body with `Content-Type: application/json`, got {got}", code="not_json"
        )
