"""The commands in this process: output and exit codes. `chat --url` is in test_remote.py."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from skim import LLM, SamplingParams
from skim.cli import converse, local
from skim.cli.ask import messages_about
from skim.cli.documents import read_sources
from skim.cli.main import EPILOG, exit_code, main
from skim.cli.reply import CUT, Piece, Reply
from skim.config import EngineConfig
from skim.engine.sequence import Delta
from skim.errors import ConfigError, EngineError, ModelError, RequestError, SkimError
from skim.version import __version__

STORY = "The keeper painted the lighthouse door green. The oil store has the code 4826.\n"
SKIM = [sys.executable, "-m", "skim"]


@pytest.fixture
def story(tmp_path: Path) -> str:
    (tmp_path / "story.txt").write_text(STORY)
    return str(tmp_path / "story.txt")


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# Help, version, exit codes


def test_help_and_version_do_not_import_slow_modules() -> None:
    program = (
        "import sys\nfrom skim.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'httpx', 'uvicorn', 'tqdm'} & set(sys.modules)))"
    )
    for arguments in (["--help"], ["serve", "--help"], ["--version"]):
        command = [sys.executable, "-c", program, *arguments]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert shown.splitlines()[-1] == "[]"
    assert shown.splitlines()[0] == f"skim {__version__}"


def test_help_lists_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert EPILOG in shown
    for word in (
        "serve",
        "chat",
        "ask",
        "plan",
        "calibrate",
        "pull",
        "  0  ",
        "  1  ",
        "  2  ",
        "  3  ",
        "  130  ",
    ):
        assert word in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("it broke"), 1),
        (SkimError("it broke"), 1),
        (ConfigError("it broke"), 2),
        (RequestError("it broke"), 2),
        (ModelError("it broke"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_exit_code_and_one_line(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: str) -> Path:
        raise error

    monkeypatch.setattr("skim.models.source.prepare", fail)
    assert main(["pull"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"skim pull: {str(error) or 'interrupted'}\n"
    assert not isinstance(error, SkimError) or exit_code(error) == code


def test_unexpected_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str) -> Path:
        raise ZeroDivisionError

    monkeypatch.setattr("skim.models.source.prepare", fail)
    with pytest.raises(ZeroDivisionError):
        main(["pull"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "skim: the following arguments are required: COMMAND"),
        (["srve"], "skim: argument COMMAND: invalid choice: 'srve'"),
        (["frob"], "skim: argument COMMAND: invalid choice: 'frob'"),
        (["eval", "needle", "-n", "1.5"], "skim eval needle: --n must be a whole number, got '1.5'"),
        (["chat", "--temperature", "x"], "skim chat: --temperature must be a number, got 'x'"),
        (["ask", "a.txt"], "skim ask: the following arguments are required: -q/--question"),
        (["ask", "-q", "why"], "skim ask: the following arguments are required: FILE"),
        (
            ["ask", "a", "-q", "b", "--max-tokens", "x"],
            "skim ask: --max-tokens must be a whole number, got 'x'",
        ),
    ],
)
def test_wrong_usage_is_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert line.endswith("--help")


def test_a_broken_pipe_leaves_no_traceback(default_model_dir: Path) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in (["pull", str(default_model_dir)], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as stdout:
            command = [*SKIM, *arguments]
            result = subprocess.run(
                command, stdout=stdout, stderr=subprocess.PIPE, env=buffered, text=True, check=False
            )
        assert (result.returncode, result.stderr) == (1, "")


def test_a_text_that_the_terminal_cannot_encode_leaves_no_traceback() -> None:
    program = "import sys; from skim.cli.main import main; from skim.models import source\n"
    program += "source.prepare = lambda model: 'caf\\u00e9 \\u6f22'\nsys.exit(main(['pull']))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert result.stdout == b"caf\xe9 ?\n"


# pull


def test_pull_prints_the_models_path(
    default_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["pull"]) == 0
    assert capsys.readouterr().out == f"{default_model_dir}\n"
    monkeypatch.setenv("SKIM_MODEL", "no such model")
    assert main(["pull", str(default_model_dir)]) == 0
    capsys.readouterr()
    assert main(["pull"]) == 3
    assert capsys.readouterr().err.startswith("skim pull: unknown model 'no such model'")


# ask


def test_ask_answers_from_a_file(
    default_model_dir: Path, story: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """End to end: the command loads the model itself."""
    arguments = ["ask", story, "-q", "What is the code for the oil store?", "--max-tokens", "16"]
    assert main([*arguments, "--model", str(default_model_dir), "--kv-memory", "512M"]) == 0
    shown = capsys.readouterr()
    assert "4826" in shown.out
    assert shown.out == shown.out.strip() + "\n"
    assert " prompt tokens, all read, first token after " in shown.err.splitlines()[-1]
    assert "Warning" not in shown.err


def test_ask_prints_json_for_several_files(
    loaded: list[EngineConfig],
    llm: LLM,
    story: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe_in(monkeypatch, b"\xef\xbb\xbfThe boat is called Merlin.\n")
    question = "What is the code for the oil store?"
    arguments = ["ask", story, "-", "-q", question, "--json", "--max-tokens", "4", "--block-size", "8"]
    assert main(arguments) == 0
    [line] = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert loaded == [EngineConfig.of(block_size=8, sparse_prefill="auto")]

    content = f"File: {story}\n\n{STORY.strip()}\n\nFile: standard input\n\nThe boat is called Merlin.\n\n"
    messages = [{"role": "user", "content": f"{content}Question: {question}"}]
    [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert found.pop("answer") == expected.outputs[0].text.strip()
    assert found.pop("prompt_tokens") == found.pop("kept_tokens") == len(expected.prompt_token_ids)
    assert 0 <= found.pop("cached_tokens") < len(expected.prompt_token_ids)
    assert all(found.pop(f"{phase}_ms") >= 0 for phase in ("queue", "scoring", "prefill", "decode"))
    assert found == {
        "ratio": 1.0,
        "spans": None,
        "scorer": None,
        "fallback": None,
        "finish_reason": "length",
        "model": "smollm2-135m",
        "files": [story, "-"],
        "generated_tokens": 4,
        "decode": None,
    }


def test_ask_reports_an_answer_that_was_cut_off(
    loaded: list[EngineConfig], story: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", story, "-q", "What happened?", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].endswith(CUT)


def test_one_file_is_asked_about_without_its_name(story: str) -> None:
    [message] = messages_about(read_sources([story]), "Why?")
    assert [part["text"] for part in message["content"]] == [f"{STORY.strip()}\n", "Question: Why?"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt", "-q", "Why?"], "cannot read nowhere.txt: No such file or directory"),
        (["*.none", "-q", "Why?"], "no file matches the pattern *.none"),
        ([__file__, "-q", "Why?", "--encoding", "x"], "--encoding: x is unknown"),
        ([os.devnull, "-q", "Why?"], f"{os.devnull} is empty"),
        (["-", "-q", "Why?"], "standard input is a binary file"),
        (["-", "-q", "Why?", "--encoding", "utf-8"], "standard input is not a text in utf-8 (byte 2)"),
        (["-", "-", "-q", "Why?"], "standard input (-) is named twice"),
        ([__file__, "-q", " "], "--question is empty"),
        ([__file__, "-q", "caf\udce9"], "--question is not a text in UTF-8 (character 3)"),
        ([__file__, "-q", "Why?", "--max-tokens", "0"], "--max-tokens must be a whole number of at least 1"),
        ([__file__, "-q", "Why?", "--temperature", "-1"], "--temperature must be a finite number"),
        ([__file__, "-q", "Why?", "--block-size", "0"], "--block-size must be"),
    ],
)
def test_ask_reports_errors_before_it_loads_a_model(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(config: EngineConfig) -> None:
        raise AssertionError("a model was asked for")

    monkeypatch.setattr("skim.cli.ask.opened", unexpected)
    pipe_in(monkeypatch, b"a\0\xff")
    assert main(["ask", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"skim ask: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("redirected", "message"),
    [
        ("- -q oil <&-", "skim ask: standard input (-) is closed"),
        ("- -q oil >&-", "skim: standard output is closed"),
        (f"{os.devnull}x -q oil >{os.devnull}", "skim ask: cannot read"),
    ],
)
def test_closed_streams_are_reported(redirected: str, message: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m skim ask {redirected}"
    found = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith(message)
    assert found.stderr.count("\n") == 1


def test_an_interrupt_during_the_imports_has_no_traceback() -> None:
    program = "import sys, skim.cli\nsys.modules['skim.cli.main'] = Rude()\nsys.exit(skim.cli.start())"
    rude = "class Rude:\n    def __getattr__(self, name): raise KeyboardInterrupt\n"
    found = subprocess.run(
        [sys.executable, "-c", rude + program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (130, "skim: interrupted\n")


def test_an_interrupt_while_an_engine_thread_computes_ends_the_process_at_once() -> None:
    """A second interrupt may come during the wait for the engine; Python would abort or go on waiting."""
    program = """
import sys, threading, time, types, skim.cli
def main():
    threading.Thread(target=time.sleep, args=(1000,), name="skim-engine").start()
    print("said before", file=sys.stderr)
    return 130
sys.modules["skim.cli.main"] = types.SimpleNamespace(main=main)
sys.exit(skim.cli.start())
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (130, "said before\n")


def test_a_prompt_that_is_too_long_is_refused_once(
    loaded: list[EngineConfig], llm: LLM, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.txt").write_text("word " * 9000)
    assert main(["ask", str(tmp_path / "long.txt"), "-q", "Why?", "--sparse-prefill", "off"]) == 2
    shown = [line for line in capfd.readouterr().err.splitlines() if not line.endswith(" ...")]
    assert len(shown) == 1, "transformers warns of long prompts as well"
    assert shown[0].startswith("skim ask: ")
    assert logging.get_verbosity() == logging.ERROR


SKIMMED = ["--scorer", "lexical", "--keep-tokens", "512", "--max-tokens", "32"]


@pytest.fixture
def long_story(tmp_path: Path) -> str:
    """Longer than the model's context window, with the answer far from both ends."""
    book = (resources.files("skim") / "data" / "moby-dick.txt").read_text(encoding="utf-8")
    text = f"{book[30_000:50_000]}\n{STORY}\n{book[50_000:70_000]}"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    return str(tmp_path / "long.txt")


def test_a_prompt_longer_than_the_window_is_skimmed_and_the_share_read_is_reported(
    loaded: list[EngineConfig], long_story: str, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "What is the code for the oil store?"
    assert main(["ask", long_story, "-q", question, *SKIMMED]) == 0
    shown = capsys.readouterr()
    assert "4826" in shown.out
    told = r"\d+ prompt tokens, (\d+) read \((\d\.\d%), \d+ spans, lexical\), first token .* \(scoring .* s\)"
    match = re.match(told, shown.err.splitlines()[-1])
    assert match

    assert main(["ask", long_story, "-q", question, "--json", *SKIMMED]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] > 8192 > found["kept_tokens"] == int(match[1])
    assert (found["scorer"], found["fallback"]) == ("lexical", None)
    assert f"{found['ratio']:.1%}" == match[2]
    assert sum(span["end"] - span["start"] for span in found["spans"]) == found["kept_tokens"]


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_ask_skims_unless_told_otherwise(
    source: str,
    loaded: list[EngineConfig],
    story: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["ask", story, "-q", "Why?", "--max-tokens", "1"]
    if source == "variable":
        monkeypatch.setenv("SKIM_SPARSE_PREFILL", "off")
    elif source == "file":
        (tmp_path / "skim.toml").write_text('sparse_prefill = "off"\n')
        arguments += ["--config", str(tmp_path / "skim.toml")]
    else:
        arguments += ["--sparse-prefill", "off"]
    assert main(arguments) == 0
    assert loaded[0].prefill.sparse_prefill == "off"


def test_a_failed_plan_is_reported(
    loaded: list[EngineConfig], story: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ask", story, "-q", "Why?", "--max-tokens", "1", "--sparse-prefill", "always"]
    assert main([*arguments, "--prefill-block-size", "4096"]) == 0
    assert " prompt tokens, all read (short), " in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_model_is_reported(story: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["ask", story, "-q", "Why?", "--model", "nowhere"], ["chat", "nowhere"]):
        assert main(arguments) == 3
        assert capsys.readouterr().err.startswith(f"skim {arguments[0]}: unknown model 'nowhere'")


# chat, in process


def test_chat_answers_line_by_line_and_remembers(
    loaded: list[EngineConfig], llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"Say hello.\n\nAgain.\n/clear\nSay hello.\n/exit\nNever read.\n")
    arguments = ["chat", "--max-tokens", "8", "--temperature", "0", "--system", "Be brief."]
    assert main([*arguments, "--dtype", "float32"]) == 0
    assert loaded == [EngineConfig.of(dtype="float32")]
    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    first = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text.strip()
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
    second = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text.strip()
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n"


def test_leaving_an_answer_ends_its_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    aborted = llm.stats().outcomes.get("abort", 0)
    with contextlib.closing(local.answer(llm, [{"role": "user", "content": "Count."}], params)) as events:
        assert isinstance(next(events), Delta)
    deadline = time.monotonic() + 30
    while llm.stats().outcomes.get("abort", 0) == aborted:
        assert time.monotonic() < deadline, "the request is still running"
        time.sleep(0.01)


def test_chat_ends_at_the_first_error_of_a_script(
    loaded: list[EngineConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"word " * 9000 + b"\nSay hello.\n")
    assert main(["chat"]) == 2
    assert capsys.readouterr().out == ""
    pipe_in(monkeypatch, b"\xff\n")
    assert main(["chat"]) == 2
    assert capsys.readouterr().err.endswith(
        "skim chat: standard input is not a text in UTF-8; convert it, for example with iconv\n"
    )


def test_a_key_without_a_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--api-key", "hunter2"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("skim chat: --api-key: ")
    assert "hunter2" not in shown


def talk(script: Script, lines: Iterator[str], *, interactive: bool) -> None:
    """A conversation with a script. Its plan names the files."""
    converse.converse(
        script,
        lines,
        [],
        interactive=interactive,
        explain=lambda sources: [f"plan of {[source.name for source in sources]}"],
    )


class Script:
    """Scripted answers; an exception among the pieces is raised in its place."""

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.answers = list(answers)
        self.heard: list[list[str]] = []

    def __call__(self, messages: list[converse.Message]) -> converse.Pieces:
        self.heard.append([f"{message['role'][0]}:{message['content']}" for message in messages])
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield Piece(piece)


def test_at_a_terminal_an_interrupt_ends_the_reply_and_keeps_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script(["Once ", "upon", KeyboardInterrupt()], [KeyboardInterrupt()], ["Fine."])
    talk(script, iter(["tell", "quiet", "well?"]), interactive=True)
    assert script.heard[1:] == [["u:tell", "a:Once upon", "u:quiet"], ["u:tell", "a:Once upon", "u:well?"]]
    assert capsys.readouterr().out == "Once upon\n\nFine.\n"
    with pytest.raises(KeyboardInterrupt):
        talk(Script([KeyboardInterrupt()]), iter(["tell"]), interactive=False)


def test_at_a_terminal_an_error_ends_the_reply_and_it_is_forgotten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script(["Once ", "upon", EngineError("out of ink")], ["Fine."])
    talk(script, iter(["tell", "well?"]), interactive=True)
    assert script.heard == [["u:tell"], ["u:well?"]]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Once upon\nFine.\n", "skim chat: out of ink\n")
    with pytest.raises(EngineError):
        talk(Script([EngineError("out of ink")]), iter(["tell"]), interactive=False)


def test_an_unknown_command_is_not_sent_but_a_path_is(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(["Yes."])
    talk(script, iter(["/quit", "/etc/hosts exists?"]), interactive=True)
    assert script.heard == [["u:/etc/hosts exists?"]]
    assert capsys.readouterr().err == f"skim chat: there is no /quit; {converse.COMMANDS}\n"


def test_a_file_goes_with_the_next_message_that_is_answered(
    story: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script([EngineError("out of ink")], ["4826."], ["Yes."])
    other = tmp_path / "other notes.txt"
    other.write_text("The boat is called Merlin.")
    said = [
        f"/file {story}",
        f"/file '{other}'",
        "the code?",
        "the code?",
        "/plan",
        "sure?",
        "/clear",
        "/plan",
    ]
    talk(script, iter(said), interactive=True)
    document = f"File: {story}\n\n{STORY.strip()}\n\nFile: {other}\n\nThe boat is called Merlin.\n"
    parts = [{"type": "text", "text": document}, {"type": "text", "text": "the code?"}]
    assert script.heard == [[f"u:{parts}"], [f"u:{parts}"], [f"u:{parts}", "a:4826.", "u:sure?"]]
    shown = capsys.readouterr()
    assert shown.out == f"4826.\nplan of ['{story}', '{other}']\nYes.\nplan of []\n"
    assert f"(added {other}: 1 lines; ask about it)" in shown.err


def test_a_file_that_cannot_be_read_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Script(), iter(["/file", "/file nowhere.txt"]), interactive=True)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("skim chat: /file needs the path")
    assert told[1] == "skim chat: cannot read nowhere.txt: No such file or directory"
    with pytest.raises(RequestError):
        talk(Script(), iter(["/file nowhere.txt"]), interactive=False)


def test_chat_skims_files_and_shows_the_plan(
    loaded: list[EngineConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("The sea was calm and grey.\n" * 400 + STORY + "Nothing else happened.\n" * 200)
    lines = ["/plan", "Hi.", "/plan", f"/file {file}", "What is the code for the oil store?", "/plan"]
    pipe_in(monkeypatch, "\n".join(lines).encode())
    arguments = ["chat", "--max-tokens", "8", "--temperature", "0", "--scorer", "lexical"]
    assert main([*arguments, "--keep-tokens", "300"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("no reply was written yet\n")
    assert "prompt tokens, all read" in shown
    assert re.search(rf"{re.escape(str(file))}:(39\d|4\d\d)", shown)
    assert "4826" in shown


# Printing a reply


@pytest.mark.parametrize(
    "pieces", [["  \n", " a ", "", " b\n", "\n", "c ", " \n"], [" a  b\n\nc"], ["a", "  b", "\n\n", "c"]]
)
def test_blank_space_around_a_reply_is_not_shown(
    pieces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    reply = Reply()
    for piece in pieces:
        reply.add(Piece(piece))
    assert reply.text == "".join(pieces).strip() == capsys.readouterr().out
