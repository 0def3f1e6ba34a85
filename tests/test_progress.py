"""Signs of life: silence for quick work, lines in a log, and bars on a terminal."""

from __future__ import annotations

import sys
import time

import pytest

from skim import progress
from tests.terminal import Terminal


def test_what_is_quick_gives_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("thinking"):
        pass
    assert capsys.readouterr().err == ""


def test_what_takes_longer_is_one_line_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.progress("thinking"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "thinking ...\n"


@pytest.mark.parametrize(("total", "sign"), [(None, "thinking ... 00:0"), (8, "4/8 [")])
def test_what_takes_longer_moves_on_a_terminal_and_is_gone_after(
    total: int | None, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.progress("thinking", total, lambda: 4):
        deadline = time.monotonic() + 10
        while sign not in terminal.getvalue():
            assert time.monotonic() < deadline, terminal.getvalue()
            time.sleep(0.05)
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-1].strip() == ""


def test_tasks_are_a_line_for_every_tenth_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.task_bar("calibrating") as count:
        for done in range(1, 41):
            count(done, 40)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"calibrating: {done} of 40 tasks" for done in range(4, 41, 4)]


def test_bytes_are_one_line_in_a_log_and_none_when_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for enabled, shown in ((True, "unpacking ...\n"), (False, "")):
        with progress.byte_bar("unpacking", 100, enabled) as advance:
            advance(100)
        assert capsys.readouterr().err == shown


def test_items_are_counted_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(progress.counted("ab", "generating", "request")) == ["a", "b"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress.counted("ab", "generating", "request")) == ["a", "b"]
    assert "2/2" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_lines_go_to_a_log_even_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "BETWEEN", 0.0)
    lines: list[str] = []
    progress.say_with(lines.append)
    try:
        with progress.byte_bar("unpacking", 4_000_000, True) as advance:
            advance(1_000_000)
        with progress.download_bar("downloading", True)(total=8_000_000, unit="B", name="bytes") as bar:
            bar.update(2_000_000)
        with progress.download_bar("files", True)(["a"], unit="it") as bar:
            assert list(bar) == ["a"]
        with progress.download_bar("silent", False)(total=8, unit="B") as bar:
            bar.update(2)
    finally:
        progress.say_with(None)
    assert lines == ["unpacking ...", "unpacking: 1 of 4 MB (25%)", "downloading: 2 of 8 MB (25%)"]
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    assert progress.download_bar("downloading", True) is None  # the library's own bars
