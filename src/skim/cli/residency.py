"""What `skim park`, `skim unpark` and `skim status` share: a running server, and its models as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from skim.cli.settings.client import key_of, key_setting
from skim.cli.settings.parser import Parser, add_config, add_setting
from skim.config import ServerConfig
from skim.errors import ConfigError, shown

ADMIN_KEY = key_setting("admin_key", "Admin key of the server. Default: no key.")
URL = f"http://{ServerConfig.host}:{ServerConfig.port}"
ROLES = ("target", "drafter")
HEAD = ("model", "place", "device", "host", "disk", "last transfer", "")
STANDING = {
    "park_waits": "a park waits for running requests",
    "held": "parked by an administrator",
    "idle": "idle: the next request brings it back",
    "policy": "away by policy: it comes when needed",
}


def add_server(parser: Parser) -> None:
    """Options of a command that asks a server."""
    parser.add_argument("--url", default=URL, help="the server's address (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    add_config(parser)


def add_models(parser: Parser) -> None:
    """Options of a command that moves models."""
    parser.add_argument("models", metavar="MODEL", nargs="*", help="target or drafter (default: both)")
    add_setting(parser, ADMIN_KEY)
    add_server(parser)


def move(args: argparse.Namespace, path: str, **body: Any) -> int:
    """Have the server move models, and print where they are then."""
    from skim.cli.remote import RemoteModel
    from skim.progress import progress

    for name in args.models:
        if name not in ROLES:
            raise ConfigError(f"MODEL must be {' or '.join(ROLES)}, got {shown(name)}")
    given = {"models": args.models or None, **body}
    asked = {name: value for name, value in given.items() if value is not None}
    with (
        RemoteModel(args.url, key_of(args, ADMIN_KEY), setting="admin_key") as remote,
        progress(f"waiting for {remote.url}"),
    ):
        found = remote.call("POST", path, asked)
    print(json.dumps(found) if args.json else "\n".join(listing(found)))
    return 0


def listing(residency: Mapping[str, Any]) -> list[str]:
    """The models of a server as a table, under the policy that moves them."""
    rows = [HEAD, *(_row(one) for one in residency["models"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"residency {residency['policy']}", *(_line(row, widths) for row in rows)]


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    from skim.memory.budget import in_words

    sizes = (in_words(one[f"{where}_bytes"]) for where in ("device", "host", "disk"))
    last = one["last_transfer"]
    moved = "none"
    if last is not None:
        way = last["direction"].replace("_", " ")
        moved = f"{in_words(last['bytes'])} {way} in {last['seconds']:.2f} s at {_clock(last['at'])}"
    return (one["role"], one["place"], *sizes, moved, STANDING.get(one["standing"], ""))


def _clock(at: float) -> str:
    """Local time of day, with the date if it is not today."""
    then = datetime.fromtimestamp(at)
    return f"{then:%H:%M:%S}" if then.date() == datetime.now().date() else f"{then:%Y-%m-%d %H:%M:%S}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
