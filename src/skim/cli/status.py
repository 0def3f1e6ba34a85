"""`skim status`: where the models of a running server are, and what its KV pool holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from skim.cli.residency import add_server, listing
from skim.cli.settings.parser import Parser
from skim.errors import EngineError

HELP = "show where the models of a running server are"
USAGE = "[options]"
UNAVAILABLE = 503


def configure(parser: Parser) -> None:
    parser.description = (
        "Show a running server's status, where its models are, and the size of its KV pool. Needs no key. "
        "Exits with 1 if the server is not ready: it is loading, shutting down, stalled or dead."
    )
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    from skim.cli.remote import RemoteModel

    with RemoteModel(args.url) as remote:
        health = remote.call("GET", "health", accepts=(UNAVAILABLE,))
        if not (isinstance(health, dict) and "residency" in health):
            raise EngineError(f"{remote.url}/health is not that of `skim serve`; correct --url")
        print(json.dumps(health) if args.json else "\n".join(described(remote.url, health)))
    return 0 if health["status"] in ("ok", "parking", "parked") else 1


def described(url: str, health: Mapping[str, Any]) -> list[str]:
    """The status of a server in lines."""
    from skim.memory.budget import in_words

    reason = f" ({health['reason']})" if health["reason"] else ""
    lines = [f"{url}: {health['status']}{reason}"]
    if health["residency"] is not None:
        lines += listing(health["residency"])
    if (kv := health["kv"]) is not None:
        used, reserved = (in_words(kv[name]) for name in ("used_bytes", "reserved_bytes"))
        lines.append(f"KV pool: {used} in use or cached, {reserved} allocated, {kv['format']}")
    return lines
