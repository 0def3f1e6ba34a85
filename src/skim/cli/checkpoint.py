"""`skim checkpoint`: named prefixes in a checkpoint directory, or on a server."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skim.cli.ask import parts_about
from skim.cli.documents import read_sources
from skim.cli.settings.client import key_of, key_setting, refuse_engine_settings
from skim.cli.settings.fields import engine_settings
from skim.cli.settings.parser import Parser, add_config, add_engine_settings, add_setting
from skim.cli.settings.sources import build, engine_config, gather
from skim.config import MemoryConfig
from skim.errors import ConfigError
from skim.progress import progress

HELP = "save, list, load and remove named prefixes"
USAGE = "COMMAND [options]"
ADMIN_KEY = key_setting("admin_key", "Admin key of the server at --url. Default: no key.")


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}: a repository, a book or a system prompt that is computed once. They "
        "are in --checkpoint-dir, or on the server at --url, which needs its admin key."
    )
    choices = parser.add_subparsers(
        dest="action", metavar="COMMAND", required=True, prog="skim checkpoint", parser_class=Parser
    )
    for name, (help_text, usage, configure_one, _) in ACTIONS.items():
        child = choices.add_parser(name, help=help_text, usage=f"skim checkpoint {name} {usage}")
        child.description = f"{help_text[0].upper()}{help_text[1:]}."
        child.set_defaults(parser=child)
        configure_one(child)
        child.add_argument("--url", help="the server that has the checkpoints, such as http://127.0.0.1:8000")
        add_setting(child, ADMIN_KEY)


def run(args: argparse.Namespace) -> int:
    if args.url is None and args.admin_key is not None:
        raise ConfigError("--admin-key: it is the key of the server at --url; give both, or neither")
    if "name" in args:
        from skim.memory.checkpoint import check_name

        check_name(args.name)
    for line in ACTIONS[args.action][3](args):
        print(line)
    return 0


# -- save


def _configure_save(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes and underscores")
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="text, PDF or HTML file, directory or pattern; the prefix is that of `skim ask FILE...`",
    )
    parser.add_argument("--system", action="store_true", help="the files are a system prompt")
    parser.add_argument("--encoding", metavar="NAME", help="encoding of texts that are not in UTF-8")
    parser.add_argument("--salt", default="", help="cache salt of the requests that may use it")
    add_engine_settings(parser, positional_model=False)


def _save(args: argparse.Namespace) -> list[str]:
    messages = messages_of(args)
    if args.url is not None:
        refuse_engine_settings(args)
        body = {"name": args.name, "messages": messages, "cache_salt": args.salt}
        with progress(f"saving {args.name}"):
            return [_line(_call(args, "POST", "admin/checkpoints", body))]
    config = engine_config(gather(engine_settings(), args, os.environ))
    _need_directory(config.memory)

    from skim.checkpoints import save
    from skim.cli.local import opened

    with opened(config) as llm, progress(f"saving {args.name}"):
        return [_line(dataclasses.asdict(save(llm, args.name, messages=messages, cache_salt=args.salt)))]


def messages_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The beginning of the messages that `skim ask` would send about these files."""
    [document, _] = parts_about(read_sources(args.files, args.encoding), "")
    if args.system:
        return [{"role": "system", "content": document["text"].rstrip("\n")}]
    return [{"role": "user", "content": [document]}]


# -- list, load and remove


def _configure_name(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME")
    _configure_directory(parser)


def _configure_directory(parser: Parser) -> None:
    for name in ("checkpoint_dir", "checkpoint_size"):
        add_setting(parser, next(one for one in engine_settings() if one.name == name))
    add_config(parser)


def _configure_load(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--salt", default="", help="cache salt of the requests that may use it")
    parser.add_argument("--checkpoint-dir", help=argparse.SUPPRESS)  # refused, with the reason
    add_config(parser)


def _list(args: argparse.Namespace) -> list[str]:
    if args.url is not None:
        refuse_engine_settings(args)
        found = _call(args, "GET", "admin/checkpoints")["data"]
    else:
        from skim.memory.checkpoint import Shelf

        found = [dataclasses.asdict(one) for one in Shelf(_directory(args)).named()]
    if not found:
        place = args.url or _directory(args)
        why = ": there is no such directory" if args.url is None and not Path(place).is_dir() else ""
        print(f"no named prefixes in {place}{why}", file=sys.stderr)
    return [_line(one) for one in found]


def _load(args: argparse.Namespace) -> list[str]:
    if args.url is None:
        raise ConfigError(
            "load is for a running server: give its address with --url; elsewhere, with --checkpoint-dir, a "
            "stored prefix returns by itself when a prompt begins with it"
        )
    refuse_engine_settings(args)
    body = {"cache_salt": args.salt}
    found = _call(args, "POST", f"admin/checkpoints/{args.name}/load", body)
    return [f"{found['name']}: {found['cached_tokens']} tokens are cached"]


def _remove(args: argparse.Namespace) -> list[str]:
    if args.url is not None:
        refuse_engine_settings(args)
        gone = _call(args, "DELETE", f"admin/checkpoints/{args.name}")["removed"]
    else:
        from skim.memory.checkpoint import Shelf

        gone = [dataclasses.asdict(one) for one in Shelf(_directory(args)).remove(args.name)]
    return [f"removed {_line(one)}" for one in gone]


Action = tuple[str, str, Callable[[Parser], None], Callable[[argparse.Namespace], Sequence[str]]]
ACTIONS: dict[str, Action] = {
    "save": ("compute files as a prompt's beginning, and save that", "NAME FILE...", _configure_save, _save),
    "list": ("list the named prefixes", "[options]", _configure_directory, _list),
    "load": ("load a prefix into a server's cache", "NAME --url URL", _configure_load, _load),
    "rm": ("remove a named prefix", "NAME [options]", _configure_name, _remove),
}


# -- shared


def _line(one: Mapping[str, Any]) -> str:
    from skim.memory.budget import in_words

    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["created"]))
    return f"{one['name']}: {one['tokens']} tokens of {one['model']}, {in_words(one['bytes'])}, saved {saved}"


def _directory(args: argparse.Namespace) -> Path:
    names = ["checkpoint_dir", "checkpoint_size"]
    wanted = [setting for setting in engine_settings() if setting.name in names]
    return _need_directory(build(MemoryConfig, names, gather(wanted, args, os.environ)))


def _need_directory(config: MemoryConfig) -> Path:
    if config.checkpoint_dir is None:
        raise ConfigError(
            "checkpoint_dir is not set; set it, or give --url for the checkpoints of a server",
            fields="checkpoint_dir",
        )
    return Path(config.checkpoint_dir).expanduser()


def _call(args: argparse.Namespace, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    from skim.cli.remote import RemoteModel

    with RemoteModel(args.url, key_of(args, ADMIN_KEY), setting="admin_key") as remote:
        return remote.call(method, path, body)
