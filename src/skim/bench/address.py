"""Address and key of a server: checked before use, and shown without a password."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import TYPE_CHECKING

from skim.errors import ConfigError

if TYPE_CHECKING:
    import httpx


def parse_address(url: str, name: str) -> httpx.URL:
    """The server's address without a trailing `/v1`, which other clients need. Errors begin with `name`."""
    import httpx

    reason = "it must begin with http:// or https:// and a host"
    try:
        base = httpx.URL(url.strip().rstrip("/").removesuffix("/v1") + "/")
        if base.scheme in ("http", "https") and base.host:
            return base
    except (httpx.InvalidURL, UnicodeError) as error:
        reason = str(error)
    shown = repr(url) if "@" not in url else "the given URL"  # there may be a password in it
    raise ConfigError(f"{name}: {shown} is not an address such as http://127.0.0.1:8000: {reason}")


def shown_address(base: httpx.URL) -> str:
    """The address without user name, password and query."""
    return f"{base.scheme}://{base.netloc.decode()}{base.path}".rstrip("/")


def check_key(key: str | None, name: str) -> None:
    """Raise unless the key fits an HTTP header. The message never shows it."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{name} must be printable ASCII: a header can carry nothing else", fields=name)


def is_loopback(base: httpx.URL) -> bool:
    """True for this machine's own servers, which a proxy cannot reach."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(base.host).is_loopback
    return base.host == "localhost"
