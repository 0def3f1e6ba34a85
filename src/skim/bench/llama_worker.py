"""llama.cpp in a separate process, queried over pipes with one JSON object per line.

So a crash of llama.cpp is only a failed row, and its threads do not compete with torch's: two runtimes in one
process slow each other down. Run as `python -m skim.bench.llama_worker`. The first line names the model to
load, later lines the prompts to read.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any


def open_server(path: str, slots: int, tokens: int, threads: int) -> Any:
    """Open a server with room for `tokens` in each slot and no prompt cache."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = slots
    params.n_ctx = slots * tokens
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.ctx_shift = False
    params.verbosity = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def ask(server: Any, prompt: list[int], predict: int) -> dict[str, Any]:
    """Stream one reply. Return the arrival times of its chunks and the server's own counts."""
    stamps: list[float] = []
    last: dict[str, Any] = {}
    begun = time.perf_counter()

    def note(chunk: dict[str, Any]) -> bool:
        nonlocal last
        now = time.perf_counter()
        last = chunk
        if chunk.get("choices") and chunk["choices"][0].get("finish_reason") is None:
            stamps.append(now)
        return False

    body = {
        "prompt": prompt,
        "n_predict": predict,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
        "temperature": 0,
        "ignore_eos": True,
    }
    server.handle_completions(body, note)
    if "error" in last:
        raise RuntimeError(str(last["error"].get("message", last["error"])))
    timings = last.get("timings", {})
    return {
        "begun": begun,
        "stamps": stamps,
        "read": timings.get("prompt_n"),
        "cached": timings.get("cache_n"),
        "written": timings.get("predicted_n"),
    }


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, even inside the library
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the library's output out of the answers

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    server: Any = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if server is None:
                server = open_server(**request)
                answer({"ready": True})
                continue
            prompts, predict = request["prompts"], request["predict"]
            with ThreadPoolExecutor(len(prompts)) as threads:
                replies = list(threads.map(ask, repeat(server), prompts, repeat(predict)))
            answer({"replies": replies})
        except Exception as error:
            answer({"error": str(error) or type(error).__name__})


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # do not wait for the library's threads; there is nothing to save
