"""Decode steps of a model with sliding windows: with blocks that end behind them, and with blocks that stay.

Both engines have the same model and take turns. Prints the tokens that fit and the time of a step; exits with
1 if blocks that end make a step slower. Needs an idle machine.

    python benchmarks/windows.py [--context 8192] [--batch 2] [--steps 40] [--repeats 5]
    python benchmarks/windows.py --shape gemma-3-4b --context 131072 --batch 2 --kv-memory 45G  # on a GPU
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from unittest.mock import patch

from script import parser_of, positive, run, tell

from skim.bench.drive import Driver
from skim.bench.inputs import random_prompts, several
from skim.config import EngineConfig, PrefillConfig
from skim.engine import profile
from skim.memory.groups import one_group
from skim.models.load import LoadedModel
from skim.models.shapes import build_shape

MOST_SLOWER = 1.05
SMALL = {  # the layers of Gemma 3 4B in small
    "model_type": "gemma3_text",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 256,
    "max_position_embeddings": 131072,
}


def engines(model: LoadedModel, config: EngineConfig) -> dict[str, Driver]:
    ends = Driver(model, config)
    with patch.object(profile, "groups_of", lambda model, *_: one_group(len(model.layers))):
        return {"end": ends, "stay": Driver(model, config)}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", help="default: a small one")
    parser.add_argument("--context", type=positive, default=8192)
    parser.add_argument("--batch", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--kv-memory", default="1G", help="of each engine (default: %(default)s)")
    options = parser.parse_args()
    longest = options.context + 1024
    config = EngineConfig.of(kv_memory=options.kv_memory, max_model_len=longest)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "config.json"
        small.write_text(json.dumps(SMALL))
        model = build_shape(options.shape or str(small), config.model)
    drivers = engines(model, config)
    prompts = random_prompts(model.vocab_size, 0)
    seconds: dict[str, list[float]] = {name: [] for name in drivers}
    for repeat in range(options.repeats + 1):
        tell(f"repeat {repeat} of {options.repeats}")
        for name, driver in drivers.items():
            taken = driver.decode(
                several(prompts, options.context, repeat, options.batch), PrefillConfig(), options.steps
            )
            if repeat:  # the first warms up
                seconds[name].append(statistics.median(taken.seconds))
    tokens = {name: d.engine.core.memory.pool.tokens_at(options.context) for name, d in drivers.items()}
    for name in drivers:
        step = statistics.median(seconds[name])
        print(f"blocks {name:4}  {tokens[name]:>12,} tokens fit  {1e3 * step:8.2f} ms a step")
    ratio = statistics.median(a / b for a, b in zip(seconds["end"], seconds["stay"], strict=True))
    print(f"tokens that fit: {tokens['end'] / tokens['stay']:.2f} times as many")
    print(f"time of a step:  {ratio:.3f} times as long (bound {MOST_SLOWER})")
    return int(ratio > MOST_SLOWER)


if __name__ == "__main__":
    run(main)
