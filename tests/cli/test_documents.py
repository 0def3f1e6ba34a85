"""The files that commands read: directories, patterns, encodings, PDF and HTML."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from skim.cli.documents import _HTML, Unreadable, decode, names_of, read_source, read_sources
from skim.cli.paths import find_files, walk
from skim.errors import RequestError
from tests.pdf import pdf

# -- names to files


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with ignored, hidden and binary files; the current directory."""
    files = {
        ".gitignore": "*.log\n/build/\n",
        ".hidden/secret.txt": "secret",
        ".git/config": "git",
        "a.txt": "alpha",
        "b.log": "ignored",
        "build/out.txt": "ignored",
        "src/.gitignore": "!keep.log\ngenerated*\n",
        "src/keep.log": "kept",
        "src/other.log": "ignored",
        "src/main.py": "print()",
        "src/generated_x.py": "ignored",
        "src/build/deep.txt": "deep",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_directory_is_its_files_without_those_that_git_ignores(tree: Path) -> None:
    kept = ["a.txt", "empty.txt", "image.png", "src/build/deep.txt", "src/keep.log", "src/main.py"]
    assert list(walk(tree)) == kept
    assert [one.name for one in find_files(["."])] == kept
    below = [one.name for one in find_files(["src"])]  # rules above the named directory count
    assert below == ["src/build/deep.txt", "src/keep.log", "src/main.py"]


def test_patterns_find_files_and_a_file_is_read_once(tree: Path) -> None:
    assert [one.name for one in find_files(["src/**/*.txt", "src", "b.log"])] == [
        "src/build/deep.txt",
        "src/keep.log",
        "src/main.py",
        "b.log",  # a file that is named is read whatever git thinks of it
    ]
    odd = tree / "odd[1].txt"
    odd.write_text("a name that looks like a pattern")
    assert [one.name for one in find_files(["odd[1].txt"])] == ["odd[1].txt"]
    (tree / "none").mkdir()
    with pytest.raises(RequestError, match="none has no files that git does not ignore"):
        find_files(["none"])


def test_files_without_text_are_left_out_of_a_directory_and_refused_by_name(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names_of(read_sources(["."])) == ["a.txt", "src/build/deep.txt", "src/keep.log", "src/main.py"]
    assert capsys.readouterr().err == "left out for lack of text: 2 files (empty.txt, image.png)\n"
    with pytest.raises(RequestError, match=r"image\.png is a binary file; give a text, PDF or HTML file"):
        read_sources([".", "image.png"])
    with pytest.raises(RequestError, match=r"image\.\*: no file has a text"):
        read_sources(["image.*"])


def test_links_to_directories_are_not_followed(tree: Path) -> None:
    (tree / "src" / "loop").symlink_to(tree, target_is_directory=True)
    assert "src/main.py" in walk(tree)


NAMES = st.sampled_from(["a", "b", "c.txt", "d.log"])
PATTERNS = st.sampled_from(
    [
        "a",
        "a/",
        "/a",
        "*.log",
        "!*.log",
        "!a",
        "b/*",
        "!b/c.txt",
        "**/d.log",
        "a/**",
        "!d.log",
        "/*",
        "!/b",
        "# x",
        "",
    ]
)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the judge")
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    paths=st.sets(st.lists(NAMES, min_size=1, max_size=3).map(tuple), min_size=1, max_size=8),
    rules=st.dictionaries(
        st.sampled_from(["", "a", "b", "a/b"]), st.lists(PATTERNS, min_size=1, max_size=4), max_size=3
    ),
)
@example(paths={("d.log", "a", "b")}, rules={"": ["a", "!d.log"]})
@example(paths={("a", "b", "a")}, rules={"": ["a/**", "!b"]})
@example(paths={("b", "a", "a"), ("b", "c.txt")}, rules={"": ["b/*", "!/b"]})
def test_the_files_of_a_directory_are_those_that_git_would_add(
    tmp_path_factory: pytest.TempPathFactory, paths: set[tuple[str, ...]], rules: dict[str, list[str]]
) -> None:
    root = tmp_path_factory.mktemp("repository")
    for parts in paths:
        path = root.joinpath(*parts)
        if not path.is_dir() and not any(above.is_file() for above in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    for where, patterns in rules.items():
        if (root / where).is_dir():
            (root / where / ".gitignore").write_text("\n".join(patterns))
    variables = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "-q", root], env=variables, check=True)
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "--others", "--exclude-standard"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {name for name in listed.stdout.splitlines() if not name.endswith(".gitignore")}
    assert set(walk(root)) == expected
    shutil.rmtree(root)


# -- bytes to text


PLAIN = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufeff"))


@given(PLAIN, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_unicode_is_read_by_its_mark(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding), "a") == text


def test_other_encodings_are_detected_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    german = "Die Straße führt über die Brücke zum Schloß, und dort wächst schöner grüner Efeu. " * 4
    assert decode(german.encode("cp1252"), "a.txt") == german
    assert "a.txt: read as " in capsys.readouterr().err
    greek = "Η γλώσσα είναι ένα σύστημα επικοινωνίας που χρησιμοποιούν οι άνθρωποι. " * 4  # noqa: RUF001
    assert decode(greek.encode("cp1253"), "b.txt") == greek
    assert decode("é".encode("latin-1"), "c.txt", "latin-1") == "é"
    with pytest.raises(Unreadable, match=r"d is not a text in ascii \(byte 0\)"):
        decode(b"\xff", "d", "ascii")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x7fELF\2\1\1\0", "binary file;"),
        (b"PK\3\4\x14\0", "save it as PDF or text"),
        (b"a\1b", "binary file"),
    ],
)
def test_binary_files_are_refused(data: bytes, told: str) -> None:
    with pytest.raises(Unreadable, match=told):
        decode(data, "x")
    decode(b"\x1b[31mcolours and\ttabs\r\n\f", "log")  # terminal logs are texts


# -- PDF and HTML


def test_each_page_of_a_pdf_is_a_source(tmp_path: Path) -> None:
    file = tmp_path / "report.pdf"
    file.write_bytes(pdf("The code is 4826.", "", "The boat is called Merlin."))
    found = read_sources([str(file)])
    assert [(one.name, one.text) for one in found] == [
        (f"{file} page 1", "The code is 4826."),
        (f"{file} page 3", "The boat is called Merlin."),
    ]
    assert names_of(found) == [str(file)]
    file.write_bytes(pdf("One page."))
    assert [one.name for one in read_source(str(file))] == [str(file)]
    file.write_bytes(pdf(""))
    with pytest.raises(Unreadable, match="only pictures of it; recognise its text first"):
        read_source(str(file))
    file.write_bytes(b"%PDF-1.4 and nothing")
    with pytest.raises(Unreadable, match="is a damaged PDF file"):
        read_source(str(file))


HTML = """<!doctype html><html><head><title>Notes &amp; more</title><style>p {}</style></head><body>
<script>var hidden = 1;</script><h1>Keys</h1>
<p>The <b>code</b> is <a href="x">4826</a> &mdash; snake_case.</p><ul><li>one</li><li>two</li></ul>
<table><tr><th>Boat</th><th>Length</th></tr><tr><td>Merlin</td><td>9</td></tr></table>
</body></html>"""


@pytest.mark.parametrize("name", ["notes.html", "notes"])
def test_html_is_the_text_that_a_browser_shows(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(HTML)
    [source] = read_source(str(file))
    for line in ("Notes & more", "# Keys", "The **code** is 4826 — snake_case.", "* one", "| Merlin | 9 |"):
        assert line in source.text.splitlines()
    assert "hidden" not in source.text
    assert "<" not in source.text


@pytest.mark.parametrize(("ending", "is_html"), [("<p>", False), ("<!DOCTYPE html>", True)])
def test_a_text_with_many_comments_at_its_start_is_recognised_at_once(ending: str, is_html: bool) -> None:
    """A pattern that tries every way to pair the comments would take for ever."""
    text = "<!-- one -- two > three -->\n" * 200 + ending
    assert (_HTML.match(text.encode()) is not None) == is_html


@pytest.mark.parametrize(("package", "name"), [("pypdf", "a.pdf"), ("markdownify", "a.html")])
def test_a_missing_library_is_named_with_its_remedy(
    package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.write_bytes(pdf("x") if name == "a.pdf" else HTML.encode())
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RequestError, match=rf"pip install {package}, .*pip install '\.\[documents\]'"):
        read_sources([str(file)])
