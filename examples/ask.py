"""Answer a question about a text file.

python examples/ask.py examples/lighthouse.txt "What is the code for the oil store?"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils import logging

from skim import LLM, RequestOutput, SamplingParams
from skim.config import DEFAULT_MODEL
from skim.errors import RequestError, SkimError


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer a question about a text file.")
    parser.add_argument("file", type=Path, help="a text file, in UTF-8")
    parser.add_argument("question")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer (default: %(default)s)")
    args = parser.parse_args()
    logging.set_verbosity_error()  # a file that is too long is reported below, once
    try:
        text = read_text(args.file)
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
        with LLM(args.model) as llm:
            [output] = llm.chat(
                [{"role": "user", "content": f"{text}\n\nQuestion: {args.question}"}], params, use_tqdm=False
            )
    except SkimError as error:
        print(f"ask: {error}", file=sys.stderr)
        return 2
    print(output.outputs[0].text.strip())
    print()
    print(summary(output))
    return 0


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a text file in UTF-8") from error
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    if not text:
        raise RequestError(f"{path} is empty; give a file with some text in it")
    return text


def summary(output: RequestOutput) -> str:
    """What was read, how long the first token took, and how fast the others followed."""
    metrics = output.metrics
    line = f"{metrics.prompt_tokens} prompt tokens, first token after {metrics.ttft_ms / 1e3:.2f} s"
    if metrics.generated_tokens > 1 and metrics.decode_ms > 0:
        line += f", then {(metrics.generated_tokens - 1) / metrics.decode_ms * 1e3:.1f} tokens/s"
    return line


if __name__ == "__main__":
    sys.exit(main())
