"""`skim serve`: the HTTP server, with all settings."""

from __future__ import annotations

import argparse
import os

from skim.cli.settings.fields import all_settings, server_settings
from skim.cli.settings.parser import Parser, add_engine_settings, add_server_settings
from skim.cli.settings.sources import build, engine_config, gather
from skim.config import ServerConfig

HELP = "serve a model over HTTP, with OpenAI's API"
USAGE = "[MODEL] [options]"


def configure(parser: Parser) -> None:
    add_engine_settings(parser, positional_model=True)
    add_server_settings(parser)


def run(args: argparse.Namespace) -> int:
    found = gather(all_settings(), args, os.environ)
    engine = engine_config(found)
    server = build(ServerConfig, [setting.name for setting in server_settings()], found)

    from skim.server.run import serve

    return serve(engine, server)
