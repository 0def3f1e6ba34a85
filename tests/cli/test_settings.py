"""Settings: every field of every config dataclass, from every source."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skim.cli.main import main
from skim.cli.settings.fields import (
    Setting,
    all_settings,
    engine_settings,
    server_settings,
    settings_of,
)
from skim.cli.settings.sources import Found, build_parts, gather
from skim.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from skim.config.declare import parts
from skim.errors import ConfigError

KINDS: list[type] = [*parts(EngineConfig).values(), ServerConfig]
OWNER = {setting.name: kind for kind in KINDS for setting in settings_of(kind)}
KEYS = [name for name in OWNER if name.endswith("_key")]

every_setting = pytest.mark.parametrize("setting", all_settings(), ids=lambda setting: setting.name)

Serve = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _without_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in all_settings():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("SKIM_CONFIG", raising=False)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    return served(monkeypatch)


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SKIM_")]:
            patch.delenv(name)
        return served(patch)()


def served(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs `skim serve ...` with a fake server. Returns its settings in one dictionary."""
    seen: list[dict[str, Any]] = []

    def record(engine: EngineConfig, server: ServerConfig) -> int:
        given = [server, *(getattr(engine, part.name) for part in dataclasses.fields(engine))]
        seen.append({key: value for one in given for key, value in vars(one).items()})
        return 0

    for name in ("skim.server", "skim.server.run"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["skim.server.run"], "serve", record, raising=False)

    def run(*arguments: str) -> dict[str, Any]:
        assert main(["serve", *arguments]) == 0
        return seen[-1]

    return run


def other_values(setting: Setting) -> list[Any]:
    """Valid values other than the default, found by trying candidates."""
    default: Any = setting.default
    candidates: list[Any] = [*re.findall(r"`([^`\s]+)`", setting.doc), "2M", "3M", "some-text", "other-text"]
    if bool in setting.types:
        candidates = [not default]
    elif int in setting.types and str not in setting.types:
        candidates = [7, 9, 700, 900]
    elif float in setting.types:
        candidates = [0.5, 0.25, 2.5, 3.5]
    found = []
    for value in candidates:
        with contextlib.suppress(ConfigError):
            OWNER[setting.name](**{setting.name: value})
            found += [value] if value != default and value not in found else []
    assert found, "other_values() has no candidate for this field"
    return found


def as_flag(setting: Setting, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [setting.flag if value else setting.flag.replace("--", "--no-", 1)]
    return [setting.flag, str(value)]


def as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write(path: Path, **entries: Any) -> str:
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in entries.items()))
    return str(path)


def bad_text(setting: Setting) -> str:
    """An invalid text for this field: empty if every other text is valid."""
    if setting.types != {str}:
        return "a b"
    return "a b" if _refuses(setting, "a b") else ""


def _refuses(setting: Setting, value: Any) -> bool:
    try:
        OWNER[setting.name](**{setting.name: value})
    except ConfigError:
        return True
    return False


def exit_code(arguments: list[str]) -> object:
    """The exit code of `main`, whether it returns or argparse exits."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def test_there_are_settings_of_every_type() -> None:
    assert {kind for setting in all_settings() for kind in setting.types} == {str, int, float, bool}
    assert len(all_settings()) == sum(len(dataclasses.fields(kind)) for kind in KINDS)


@every_setting
def test_a_flag_sets_only_its_setting(setting: Setting, serve: Serve, defaults: dict[str, Any]) -> None:
    assert defaults[setting.name] == setting.default
    for value in other_values(setting):
        assert serve(*as_flag(setting, value)) == {**defaults, setting.name: value}


@every_setting
def test_a_variable_sets_only_its_setting(
    setting: Setting, serve: Serve, monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    for value in other_values(setting):
        monkeypatch.setenv(f"SKIM_{setting.name.upper()}", as_text(value))
        found = serve()
        assert found == {**defaults, setting.name: value}
        assert type(found[setting.name]) is type(value)


@every_setting
def test_the_file_sets_only_its_setting(
    setting: Setting, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    for value in other_values(setting)[:2]:
        file = write(tmp_path / "skim.toml", **{setting.name: value})
        assert serve("--config", file) == {**defaults, setting.name: value}
    monkeypatch.setenv("SKIM_CONFIG", file)
    assert serve() == {**defaults, setting.name: value}


@every_setting
def test_a_flag_overrides_a_variable_and_a_variable_overrides_the_file(
    setting: Setting, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = other_values(setting)
    low, high = others[0], [*others, *([] if setting.default is None else [setting.default])][:2][-1]
    file = write(tmp_path / "skim.toml", **{setting.name: low})
    assert serve("--config", file, *as_flag(setting, high))[setting.name] == high
    monkeypatch.setenv(setting.variable, as_text(high))
    assert serve("--config", file)[setting.name] == high
    assert serve("--config", file, *as_flag(setting, low))[setting.name] == low


@every_setting
def test_a_wrong_value_is_reported_with_its_source(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["serve", *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return str(line)

    file = str(tmp_path / "skim.toml")
    (tmp_path / "skim.toml").write_text(f"{setting.name} = [1]\n")
    assert refused("--config", file).startswith(f"skim serve: {file}: {setting.name} must be ")
    if setting.is_switch:
        write(tmp_path / "skim.toml", **{setting.name: 1})
        assert refused("--config", file).startswith(f"skim serve: {file}: {setting.name} must be true or")
    else:
        text = bad_text(setting)
        assert refused(setting.flag, text).startswith(f"skim serve: {setting.flag} must ")
    monkeypatch.setenv(setting.variable, bad_text(setting))
    message = f"skim serve: {setting.variable} must "
    assert refused().startswith(message)
    (tmp_path / "skim.toml").write_text("")
    assert refused("--config", file).startswith(message), "the variable is at fault, not the file"


def test_a_wrong_value_is_reported_with_the_source_that_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "skim.toml", port=70000, max_n=3)
    monkeypatch.setenv("SKIM_MAX_STOP_LENGTH", "5")
    assert main(["serve", "--config", file, "--block-size", "32"]) == 2
    refusal = "must be a whole number from 0 to 65535, got"
    assert capsys.readouterr().err == f"skim serve: {file}: port {refusal} 70000\n"
    assert main(["serve", "--config", file, "--port", "-1"]) == 2
    assert f"skim serve: --port {refusal} -1" in capsys.readouterr().err


def test_an_error_at_start_names_the_sources_of_its_fields(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(engine: EngineConfig, server: ServerConfig) -> int:
        raise ConfigError("the model or the port is wrong", fields=("block_size", "kv_memory", "dtype"))

    monkeypatch.setattr(sys.modules["skim.server.run"], "serve", refuse)
    monkeypatch.setenv("SKIM_BLOCK_SIZE", "8")
    assert main(["serve", "org/model", "--port", "1", "--kv-memory", "1G"]) == 2
    expected = "skim serve: --kv-memory, SKIM_BLOCK_SIZE: the model or the port is wrong\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("message", "fields", "arguments", "expected"),
    [
        ("port 1 is taken", "port", [], "SKIM_PORT 1 is taken"),
        (
            "cannot listen on port 1; choose another `port`",
            "port",
            [],
            "cannot listen on port 1; choose another `SKIM_PORT`",
        ),
        (
            "cannot listen on port 1; use `port`",
            "port",
            ["--port", "1"],
            "cannot listen on port 1; use `--port`",
        ),
        ("lower kv_memory or max_num_seqs", ("kv_memory", "max_num_seqs"), ["--kv-memory", "1G"], "{both}"),
        ("got 'kv_memory'; lower kv_memory", "kv_memory", [], "got 'kv_memory'; lower --kv-memory"),
        ("set `device` of this device", "device", ["--device=cpu"], "set `--device` of this device"),
        ("block_size 8 is small", "block_size", [], "{file}: block_size 8 is small"),
        ("use another drafter", "drafter", ["--drafter", "a"], "--drafter: use another drafter"),
        ("n must be low", ("n", "max_n"), [], None),
    ],
)
def test_an_error_names_each_setting_once_and_as_it_was_set(
    message: str,
    fields: str | tuple[str, ...],
    arguments: list[str],
    expected: str | None,
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(engine: EngineConfig, server: ServerConfig) -> int:
        raise ConfigError(message, fields=fields)

    monkeypatch.setattr(sys.modules["skim.server.run"], "serve", refuse)
    monkeypatch.setenv("SKIM_PORT", "1")
    file = write(tmp_path / "skim.toml", block_size=8)
    assert main(["serve", "org/model", "--config", file, *arguments]) == 2
    both = "lower --kv-memory or --max-num-seqs"
    shown = (message if expected is None else expected).format(both=both, file=file)
    assert capsys.readouterr().err == f"skim serve: {shown}\n"


def test_the_name_of_a_file_is_no_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "keep_tokens.toml", head_tokens=500)
    assert main(["serve", "--sparse-prefill", "auto", "--config", file, "--keep-tokens", "20"]) == 2
    shown = capsys.readouterr().err
    assert "keep_tokens.toml: " in shown
    assert "--keep-tokens.toml" not in shown


def test_a_switch_that_is_off_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--no-enable-prefix-caching", "--checkpoint-dir", "a"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("skim serve: --checkpoint-dir 'a' needs --enable-prefix-caching, which is off; ")


def test_a_budget_replaces_another_one_from_a_weaker_source(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "skim.toml", keep_tokens=300)
    budgets = ("keep_ratio", "keep_tokens", "keep_mass")
    assert [serve("--config", file)[name] for name in budgets] == [None, 300, None]
    monkeypatch.setenv("SKIM_KEEP_RATIO", "0.2")
    assert [serve("--config", file)[name] for name in budgets] == [0.2, None, None]
    found = serve("--config", file, "--keep-mass", "0.9")
    assert [found[name] for name in budgets] == [None, None, 0.9]
    assert main(["serve", "--keep-mass", "0.9", "--keep-tokens", "9"]) == 2
    assert "--keep-tokens and --keep-mass are both set" in capsys.readouterr().err


def test_a_flag_overrides_a_bad_variable(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIM_PORT", "abc")
    assert serve("--port", "8001")["port"] == 8001


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_switches_in_the_environment(
    text: str, value: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIM_ENABLE_PREFIX_CACHING", text)
    assert serve()["enable_prefix_caching"] is value
    for flag, expected in (("--enable-prefix-caching", True), ("--no-enable-prefix-caching", False)):
        assert serve(flag)["enable_prefix_caching"] is expected


def test_the_model_is_an_argument_or_a_flag(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("org/one")["model"] == "org/one"
    assert serve("--port", "1", "org/one")["model"] == "org/one"
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "org/one", "--model", "org/two"])
    assert "--model: not allowed with argument MODEL" in capsys.readouterr().err
    assert main(["serve", " "]) == 2
    assert capsys.readouterr().err.startswith("skim serve: MODEL must name a model")


def test_a_whole_number_in_the_file_is_a_number_of_seconds(serve: Serve, tmp_path: Path) -> None:
    found = serve("--config", write(tmp_path / "skim.toml", request_timeout=5, kv_memory=4096))
    assert found["request_timeout"] == 5.0
    assert isinstance(found["request_timeout"], float)
    assert found["kv_memory"] == 4096


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"port = \n", "not valid TOML: Invalid value (at line 1, column 8)"),
        (b"port = 1\nport = 2\n", "not valid TOML: Cannot overwrite a value"),
        (b"host = '\xff'\n", "not UTF-8 text"),
        (b"prot = 8000\n", "unknown setting 'prot'; did you mean 'port'?"),
        (b"max-model-len = 8\n", "unknown setting 'max-model-len'; did you mean 'max_model_len'?"),
        (b"zzz = 8\n", "unknown setting 'zzz'; known settings: model, "),
        (b"[server]\nport = 1\n", "[server] is a table, but settings are top-level keys"),
        (b"port = 8000.0\n", "port must be a whole number, got 8000.0"),
        (b"port = true\n", "port must be a whole number, got True"),
        (b"port = '8000'\n", "port must be a whole number, got '8000'"),
        (b"enable_prefix_caching = 'true'\n", "enable_prefix_caching must be true or false, got 'true'"),
        (b"kv_memory = 1.5\n", "kv_memory must be a whole number or a text, got 1.5"),
        (b"request_timeout = true\n", "request_timeout must be a number, got True"),
        (b"host = 5\n", "host must be a text, got a whole number"),
    ],
)
def test_errors_in_a_file_are_reported(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "skim.toml"
    file.write_bytes(content)
    assert main(["serve", "--config", str(file)]) == 2
    assert f"skim serve: {file}: {message}" in capsys.readouterr().err


def test_a_missing_file_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["pull", "--config", "nowhere.toml"]) == 2
    assert capsys.readouterr().err.startswith(
        "skim pull: --config: cannot read the file 'nowhere.toml': No such"
    )
    monkeypatch.setenv("SKIM_CONFIG", str(tmp_path))
    assert main(["pull"]) == 2
    assert "SKIM_CONFIG: cannot read the file" in capsys.readouterr().err


def test_one_file_serves_every_command(default_model_dir: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "skim.toml", model=str(default_model_dir), port=70000, dtype="nonsense")
    assert main(["pull", "--config", file]) == 0, "pull ignores settings that it does not use"
    file = write(tmp_path / "skim.toml", port=70000)
    args = Namespace(config=file)
    assert gather(engine_settings(), args, {}) == {}
    assert gather(server_settings(), args, {}) == {"port": Found(70000, file)}


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("SKIM_PROT", "SKIM_PORT"),
        ("SKIM_MAX_MODEL_LENGTH", "SKIM_MAX_MODEL_LEN"),
        ("SKIM_CACHE", None),
        ("SKIM_HOME", None),
        ("SKIM_TEST_TOKEN", None),
        ("SKI_PORT", None),
    ],
)
def test_a_misspelled_variable_is_reported(
    variable: str,
    meant: str | None,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "0")
    assert serve()["port"] == 8000
    expected = f"skim serve: {variable} is not a setting and is ignored; did you mean {meant}?\n"
    assert capsys.readouterr().err == (expected if meant else "")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_never_shown(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--" + key.replace("_", "-")
    runs: list[list[str]] = [
        ["serve", flag, "hunter2", "--port", "abc"],
        ["serve", flag, "hunter2", "--port", "70000"],
        ["serve", flag + "x", "hunter2"],
        ["serve", flag + "x=hunter2"],
        ["serve", "org/model", flag + "x", "hunter2"],
        ["pull", "org/model", flag, "hunter2"],
    ]
    for index, content in enumerate(["'hunter2'\nport = 70000", "112358", "['hunter2']", "'hunter2"]):
        (tmp_path / f"{index}.toml").write_text(f"{key} = {content}\n")
        runs.append(["serve", "--config", str(tmp_path / f"{index}.toml")])
    for arguments in runs:
        assert exit_code(arguments) == 2
        shown = capsys.readouterr()
        assert not re.search("hunter2|112358", shown.out + shown.err), arguments
    monkeypatch.setenv(f"SKIM_{key.upper()}", "")
    assert main(["serve"]) == 2, "an empty key must be refused: it would open the server to all"


def test_an_unknown_flag_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["serve", "--prot", "1"], "skim serve: unknown option --prot (did you mean --port?)"),
        (
            ["serve", "--max-model", "1"],
            "skim serve: unknown option --max-model (did you mean --max-model-len?)",
        ),
        (["ask", "--port", "1", "a", "-q", "b"], "skim ask: unknown option --port"),
        (["serve", "a", "b"], "skim serve: unexpected argument 'b'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(message)


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("serve", {}),
        ("chat", {}),
        ("ask", {"sparse_prefill": "auto"}),
        ("plan", {"sparse_prefill": "always"}),
    ],
)
def test_help_lists_every_setting_with_its_docstring_and_default(
    command: str, own: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for kind in KINDS if command == "serve" else parts(EngineConfig).values():
        assert " ".join(str(kind.__doc__).split()) in shown
        for setting in settings_of(kind):
            assert setting.doc, f"{kind.__name__}.{setting.name} has no docstring"
            assert f"{setting.flag} " in shown or f"{setting.flag}, --no" in shown
            words = {"True": "on", "False": "off", "None": "none"}
            default = own.get(setting.name) or words.get(str(setting.default), setting.default)
            documented = setting.default is None and "Default:" in setting.doc
            assert (setting.doc if documented else f"{setting.doc} (default: {default})") in shown
    assert ("--port" in shown) is (command == "serve")


@dataclasses.dataclass(frozen=True)
class Later:
    """A new group of settings."""

    keep_ratio: float | None = None
    most: int = 10
    least: int = 1
    undocumented: bool = False
    last: int = 0

    def __post_init__(self) -> None:
        if self.last < 0:
            raise ConfigError(f"last must be at least 0, got {self.last}", fields="last")
        if self.least > self.most:
            raise ConfigError(
                f"least must be at most `most`, got {self.least} and {self.most}", fields=("least", "most")
            )


@dataclasses.dataclass(frozen=True)
class Whole:
    model: ModelConfig
    later: Later

    def __post_init__(self) -> None:
        if self.later.keep_ratio == 0.5 and self.model.dtype == "float16":
            raise ConfigError("keep_ratio and dtype do not go together", fields=("keep_ratio", "dtype"))


def test_a_new_group_of_settings_needs_no_other_change() -> None:
    assert [setting.name for setting in engine_settings(Whole)] == [
        *[setting.name for setting in settings_of(ModelConfig)],
        "keep_ratio",
        "most",
        "least",
        "undocumented",
        "last",
    ]
    args = Namespace(config=None, keep_ratio="0.25", undocumented=True)
    found = gather(engine_settings(Whole), args, {"SKIM_MOST": "5"})
    assert build_parts(Whole, found).later == Later(keep_ratio=0.25, most=5, undocumented=True)


def test_fields_that_depend_on_each_other_are_set_and_reported_together() -> None:
    together = {"least": Found(20, "--least", "--least"), "most": Found(30, "SKIM_MOST", "SKIM_MOST")}
    assert build_parts(Whole, together).later == Later(least=20, most=30)
    with pytest.raises(ConfigError, match=r"^--least must be at most `most`, got 20 and 10$"):
        build_parts(Whole, {"least": together["least"]})
    with pytest.raises(ConfigError, match=r"^--least must be at most `SKIM_MOST`, got 20 and 5$"):
        build_parts(Whole, {**together, "most": Found(5, "SKIM_MOST", "SKIM_MOST")})
    with pytest.raises(ConfigError, match=r"^SKIM_LAST must be at least 0"):
        build_parts(Whole, {**together, "last": Found(-1, "SKIM_LAST", "SKIM_LAST")})
    apart = {"keep_ratio": Found(0.5, "--keep-ratio", "--keep-ratio"), "dtype": Found("float16", "skim.toml")}
    with pytest.raises(ConfigError, match=r"^skim.toml: --keep-ratio and dtype do not"):
        build_parts(Whole, {**apart, "most": Found(11, "SKIM_MOST")})


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert build_parts(EngineConfig, {}) == EngineConfig()
    assert build_parts(EngineConfig, {"block_size": Found(4, "")}).memory == MemoryConfig(block_size=4)
