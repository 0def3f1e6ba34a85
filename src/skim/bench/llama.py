"""The llama.cpp peer, on the same GGUF file. It reads prompts uncached, with as many threads as torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch

from skim import cpu
from skim.bench.drive import FirstToken, Steps
from skim.bench.inputs import Prompt
from skim.config import DEFAULT_MODEL
from skim.errors import missing_package
from skim.measure.report import MeasurementError
from skim.models import bundled

MARGIN = 64  # spare tokens beyond the prompt and the reply
UBATCH = 512  # minimum prompt tokens it reads between two decode steps


def check(model: str | None) -> None:
    """Raise unless llama.cpp is installed and this model has a GGUF file. A shape (None) has none."""
    if find_spec("xllamacpp") is None:
        raise MeasurementError(missing_package("llama.cpp", "xllamacpp", "bench"))
    path = Path(model or "").expanduser()
    if model != DEFAULT_MODEL and (model is None or path.suffix.lower() != ".gguf" or not path.is_file()):
        raise MeasurementError(
            f"llama.cpp needs a GGUF file, got {model or 'a shape'}; give {DEFAULT_MODEL} or a .gguf file"
        )


def gguf_of(model: str | None) -> Path:
    """Path of a model's GGUF file."""
    check(model)
    return bundled.gguf_path() if model == DEFAULT_MODEL else Path(str(model)).expanduser()


class LlamaCpp:
    """A worker process, restarted if a request needs other slots or more room."""

    name = "llama.cpp"

    def __init__(self, model: str | None, longest: int = 0) -> None:
        self._model = model
        self._longest = longest  # prompt of the run, so that one worker serves all
        self._worker: subprocess.Popen[str] | None = None
        self._room = (0, 0)
        self._log: IO[str] | None = None

    def first_token(self, prompt: Prompt) -> FirstToken:
        self._open(1, max(self._longest, len(prompt)) + MARGIN)
        [reply] = self._ask([prompt], 2)
        stamps = [stamp - reply["begun"] for stamp in reply["stamps"]]
        return FirstToken(stamps[0], stamps[1] - stamps[0], len(prompt))

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Steps:
        """Steps from the first token of the last row to the last token of the first row that ends.

        Rows read first keep decoding while the others are read, so extra tokens are requested.
        """
        batch, context = len(prompts), len(prompts[0])
        predict = steps + 2 + (batch - 1) * (-(-context // UBATCH) + 1)
        self._open(batch, context + predict + MARGIN)
        replies = self._ask(prompts, predict)
        begin = max(reply["stamps"][0] for reply in replies)
        end = min(reply["stamps"][-1] for reply in replies)
        inside = [sum(begin < stamp <= end for stamp in reply["stamps"]) for reply in replies]
        if min(inside) < max(1, steps // 2):
            raise MeasurementError(
                f"llama.cpp generated only {min(inside)} tokens while all {batch} rows were decoding; "
                "raise --steps"
            )
        shared = [stamp for stamp in replies[0]["stamps"] if begin <= stamp <= end]
        seconds = tuple(after - before for before, after in pairwise(shared))
        return Steps(seconds, (context + steps // 2,) * batch)

    def weight_bytes(self) -> int:
        return gguf_of(self._model).stat().st_size

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.communicate()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _open(self, slots: int, tokens: int) -> None:
        if self._worker is not None and self._room[0] == slots and self._room[1] >= tokens:
            return
        self.close()
        path = gguf_of(self._model)
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the worker
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "skim.bench.llama_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=cpu.without_ours(),
        )
        self._room = (slots, tokens)
        threads = torch.get_num_threads()
        self._exchange({"path": str(path), "slots": slots, "tokens": tokens, "threads": threads})

    def _ask(self, prompts: Sequence[Prompt], predict: int) -> list[dict[str, Any]]:
        """The replies. Raise unless every prompt was read in full and every token had a separate chunk.

        A token held back, such as half of a character, would be timed with the next one.
        """
        asked = {"prompts": [list(prompt.tokens) for prompt in prompts], "predict": predict}
        replies: list[dict[str, Any]] = self._exchange(asked).get("replies", [])
        if len(replies) != len(prompts):
            raise MeasurementError(f"llama.cpp answered {len(replies)} of {len(prompts)} prompts")
        for prompt, reply in zip(prompts, replies, strict=True):
            if reply["read"] != len(prompt) or reply["cached"]:
                raise MeasurementError(
                    f"llama.cpp ignored part of the prompt: it read {reply['read']} of {len(prompt)} tokens"
                    f" and took {reply['cached']} from a cache"
                )
            if reply["written"] != predict or len(reply["stamps"]) != predict:
                raise MeasurementError(
                    f"llama.cpp generated {reply['written']} of {predict} tokens in {len(reply['stamps'])} "
                    "chunks, so they cannot be timed one by one"
                )
        return replies

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        line = worker.stdout.readline()
        if not line:
            raise self._crashed(worker)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise MeasurementError(f"llama.cpp refused: {answer['error']}")
        return answer

    def _crashed(self, worker: subprocess.Popen[str]) -> MeasurementError:
        code = worker.wait()
        words = ""
        if self._log is not None:
            self._log.seek(0)
            words = next((line.strip() for line in reversed(self._log.readlines()) if line.strip()), "")
        self.close()
        return MeasurementError(f"llama.cpp crashed (exit code {code}){': ' + words[:200] if words else ''}")
