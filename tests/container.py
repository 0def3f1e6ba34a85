"""Executes the steps of the Dockerfile's CPU target without a daemon: `python -m tests.container`.

Paths of the image become paths under a new directory, which holds a new virtual environment. Steps that need
root, a package manager and a new user, are listed and left out. Then the target's command serves a small
model, and its health check and one reply are tested. Installing takes minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests import tiny
from tests.dockerfile import Instruction, Stage, lineage, stages_of
from tests.paths import ROOT

TARGET = "cpu"
ROOT_ONLY = ("apt-get", "useradd")  # first words of steps that this script leaves out
MOVED = ("/opt/skim", "/build", "/cache", "/home/skim")  # directories of the image


class Image:
    """The state that instructions change: variables, arguments and the working directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        self.variables.update(pip, HOME=str(root / "home"))
        self.directory = root
        for path in ("/cache", "/home/skim", "/home"):
            self.moved_path(path).mkdir(parents=True, exist_ok=True)

    def moved(self, text: str) -> str:
        """The text with directories of the image in the new place."""
        return re.sub(rf"(?<![\w.])({'|'.join(MOVED)})\b", lambda found: f"{self.root}{found[0]}", text)

    def moved_path(self, path: str) -> Path:
        return Path(f"{self.root}{path}")

    def apply(self, one: Instruction) -> None:
        value = self.moved(one.value)
        if one.name == "RUN":
            if one.value.startswith(ROOT_ONLY):
                print(f"left out: {one.value[:60]}...")
                return
            print(f"RUN {one.value}", flush=True)
            subprocess.run(["sh", "-c", value], check=True, cwd=self.directory, env=self.variables)
        elif one.name in ("ENV", "ARG"):
            for word in shlex.split(value):
                name, _, given = word.partition("=")
                self.variables[name] = given.replace("$PATH", self.variables["PATH"])
        elif one.name == "WORKDIR":
            self.directory = Path(value)
            self.directory.mkdir(parents=True, exist_ok=True)
        elif one.name == "COPY" and not value.startswith("--from="):
            *sources, target = value.split()
            for source in sources:
                copy(ROOT / source, self.directory / target, into=len(sources) > 1 or target.endswith("/"))


def copy(source: Path, target: Path, *, into: bool) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        if into:
            target.mkdir(exist_ok=True)
        shutil.copy(source, target)


def built_from(stage: Stage) -> list[str]:
    """The stages that a stage copies from."""
    found = [re.match(r"--from=(\S+)", one.value) for one in stage.instructions if one.name == "COPY"]
    return [match[1] for match in found if match is not None]


def check(root: Path) -> None:
    stages = stages_of(ROOT / "Dockerfile")
    for name in built_from(stages[TARGET]):
        image = Image(root)
        for stage in lineage(stages, name):
            for one in stage.instructions:
                image.apply(one)
    shutil.rmtree(root / "build")  # the target has no sources
    image = Image(root)
    command: list[str] = []
    health: list[str] = []
    for stage in lineage(stages, TARGET):
        for one in stage.instructions:
            if one.name == "CMD":
                command = one.words()
            elif one.name == "HEALTHCHECK":
                health = Instruction("CMD", one.value.partition("CMD ")[2]).words()
            elif not (one.name == "RUN" and stage.name == "base"):
                image.apply(one)
    serve(image, command, health)


def serve(image: Image, command: list[str], health: list[str]) -> None:
    """Start the target's command with a small model, and ask it."""
    model = tiny.save("llama", image.root / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    variables = {
        **image.variables,
        "SKIM_PORT": str(port),
        "SKIM_HOST": "127.0.0.1",
        "SKIM_MODEL": str(model),
        "SKIM_KV_MEMORY": "8M",
    }
    program = shutil.which(command[0], path=variables["PATH"])
    assert program is not None
    assert program.startswith(str(image.root)), program
    process = subprocess.Popen([program, *command[1:]], cwd=image.directory, env=variables)
    check = [shutil.which(health[0], path=variables["PATH"]) or health[0], *health[1:]]
    check[-1] = check[-1].replace(":8000/", f":{port}/")
    try:
        until = time.monotonic() + 300
        while subprocess.run(check, env=variables, stderr=subprocess.DEVNULL).returncode != 0:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server is not healthy after 300 s"
            time.sleep(1)
        print("healthy")
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
            reply = http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 4
        print("replied")
    finally:
        process.terminate()
    assert process.wait(60) == 0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="skim-container-") as folder:
        check(Path(folder))
    print("the steps of the CPU target work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
