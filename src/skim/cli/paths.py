"""The files that a command names: files, directories and patterns.

A directory stands for the files below it, without hidden ones and those that git ignores.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from skim.errors import RequestError

if TYPE_CHECKING:
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

STDIN = "-"


class Found(NamedTuple):
    """A file to read. `named` is False if a directory or a pattern brought it: it may be left out then."""

    name: str
    named: bool


def find_files(names: Sequence[str]) -> list[Found]:
    """The files that these names stand for, each once, in order. Raises for a name without any."""
    if names.count(STDIN) > 1:
        raise RequestError("standard input (-) is named twice, but can be read once")
    found: dict[str, Found] = {}
    for name in names:
        for one in _expand(name):
            key = one.name if one.name == STDIN else os.path.realpath(one.name)
            if key not in found or (one.named and not found[key].named):
                found[key] = one
    return list(found.values())


def _expand(name: str) -> Iterable[Found]:
    path = Path(name)
    if name != STDIN and path.is_dir():
        below = [Found(str(path / inner), False) for inner in walk(path)]
        if not below:
            raise RequestError(f"{name} has no files that git does not ignore; name a file in it")
        return below
    if name != STDIN and not path.exists() and glob.has_magic(name):
        matching = [each for each in sorted(glob.glob(name, recursive=True)) if os.path.isfile(each)]
        if not matching:
            raise RequestError(f"no file matches the pattern {name}; check it, or name a directory")
        return [Found(each, False) for each in matching]
    return [Found(name, True)]


def walk(directory: Path) -> Iterator[str]:
    """Sorted paths of the files below a directory, relative to it. Links to directories are not followed."""
    yield from _walk(directory, Path(), _above(directory.resolve()))


class Rule(NamedTuple):
    """One line of an ignore file."""

    pattern: GitIgnoreSpecPattern
    by_name: bool  # matches the last part of a path, at any depth
    below: bool  # ends in `/**`: matches everything below a directory, and not the directory

    def matches(self, relative: str) -> bool:
        """True if the line is about this path itself; a line about a directory above it is not."""
        whole = relative.rstrip("/")
        name = relative[whole.rfind("/") + 1 :]
        if self.by_name:
            return self.pattern.match_file(name) is not None
        if self.pattern.match_file(relative) is None:
            return False
        above = relative.removesuffix(name)
        return self.below or not above or self.pattern.match_file(above) is None


Rules = tuple[tuple[Path, tuple[Rule, ...]], ...]
"""Ignore files with their directories, the outermost first."""


def _walk(root: Path, at: Path, rules: Rules) -> Iterator[str]:
    here = (root / at).resolve()
    rules = (*rules, *_rules_in(here))
    try:
        entries = sorted(os.scandir(root / at), key=lambda entry: entry.name)
    except OSError as error:
        raise RequestError(f"cannot read {root / at}: {error.strerror}") from error
    for entry in entries:
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name.startswith(".") or ignored(here / entry.name, is_directory, rules):
            continue
        if is_directory:
            yield from _walk(root, at / entry.name, rules)
        elif entry.is_file():
            yield str(at / entry.name)


def ignored(path: Path, is_directory: bool, rules: Rules) -> bool:
    """True if git would ignore this path, given that it does not ignore the directories above."""
    for base, lines in reversed(rules):  # the last matching line of the innermost file decides
        relative = path.relative_to(base).as_posix() + ("/" if is_directory else "")
        decided = next((rule for rule in reversed(lines) if rule.matches(relative)), None)
        if decided is not None:
            return bool(decided.pattern.include)
    return False


def _above(directory: Path) -> Rules:
    """Ignore files above a directory, from the root of its repository; none outside a repository."""
    outer = [directory, *directory.parents]
    root = next((each for each in outer if (each / ".git").exists()), None)
    if root is None:
        return ()
    between = outer[1 : outer.index(root) + 1]
    excluded = _rules_in(root, ".git/info/exclude")
    return (*excluded, *(rule for each in reversed(between) for rule in _rules_in(each)))


def _rules_in(directory: Path, name: str = ".gitignore") -> Rules:
    try:
        lines = (directory / name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    return ((directory, tuple(_rules_of(lines))),)


def _rules_of(lines: Iterable[str]) -> Iterator[Rule]:
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    for line in lines:
        pattern = GitIgnoreSpecPattern(line)
        if pattern.include is not None:  # a comment has none
            text = line.strip().removeprefix("!").rstrip("/").removeprefix("**/")
            yield Rule(pattern, "/" not in text, text.endswith("/**"))
