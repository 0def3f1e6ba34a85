"""Settings of a command that may use a server at --url: the server's key, and none of the engine's."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Collection

from skim.cli.settings.fields import Setting, engine_settings, server_settings
from skim.cli.settings.sources import build, from_flag, gather
from skim.config import ServerConfig
from skim.errors import ConfigError


def key_setting(name: str, doc: str) -> Setting:
    """A key of the server with a client's help text: one variable or file serves both."""
    [key] = [setting for setting in server_settings() if setting.name == name]
    return dataclasses.replace(key, doc=doc)


def key_of(args: argparse.Namespace, setting: Setting) -> str | None:
    """The key from a flag, a variable or the file."""
    found = gather([setting], args, os.environ)
    key: str | None = getattr(build(ServerConfig, [setting.name], found), setting.name)
    return key


def refuse_engine_settings(args: argparse.Namespace, allowed: Collection[str] = ()) -> None:
    """Raise for a flag that would change an engine: the server has its own."""
    for setting in engine_settings():
        given = from_flag(setting, args)
        if given is not None and setting.name not in allowed:
            raise ConfigError(
                f"{given.origin} has no effect with --url, because the server has its own settings"
            )
