"""Memory that a quantized model takes: write a Q4_K file with random weights, load it, and ask it something.

    PYTHONPATH=src python benchmarks/weights_memory.py [--shape qwen2.5-1.5b] [--most-gb 2.2] [--dir DIR]
    PYTHONPATH=src python benchmarks/weights_memory.py --shape qwen3-8b --most-gb 7

The model runs in a process of its own. Its memory is anonymous memory and mapped files together, at its peak,
with converting the file and without. Exits with 1 if the peak without exceeds the limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from script import parser_of, run, tell

from skim.models.shapes import SHAPES

BLOCK, BLOCK_BYTES = 256, 144  # values and bytes of a block of Q4_K
SMALL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
CHILD = """
import sys
from skim import LLM, SamplingParams
with LLM(sys.argv[1], kv_memory="128M", max_model_len=1024, device="cpu", progress=False) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [output] = llm.generate([list(range(100, 164))], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    weights = llm.engine.model.weights
lines = dict(line.split(":") for line in open("/proc/self/status"))
print(int(lines["VmHWM"].split()[0]) * 1024, weights.bytes, weights.bits)
"""


def matrices(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Names and shapes of the matrices in a file."""
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    found = {"token_embd.weight": (shape["vocab_size"], width)}
    if not shape["tie_word_embeddings"]:
        found["output.weight"] = shape["vocab_size"], width
    for layer in range(shape["num_hidden_layers"]):
        found |= {
            f"blk.{layer}.attn_q.weight": (heads * dim, width),
            f"blk.{layer}.attn_k.weight": (kv_heads * dim, width),
            f"blk.{layer}.attn_v.weight": (kv_heads * dim, width),
            f"blk.{layer}.attn_output.weight": (width, heads * dim),
            f"blk.{layer}.ffn_gate.weight": (inner, width),
            f"blk.{layer}.ffn_up.weight": (inner, width),
            f"blk.{layer}.ffn_down.weight": (width, inner),
        }
    return found


def vectors(shape: dict[str, Any]) -> dict[str, int]:
    """Names and lengths of norms and biases in a file."""
    width, dim = shape["hidden_size"], shape["head_dim"]
    found = {"output_norm.weight": width}
    for layer in range(shape["num_hidden_layers"]):
        found |= {f"blk.{layer}.attn_norm.weight": width, f"blk.{layer}.ffn_norm.weight": width}
        if shape["model_type"] == "qwen3":
            found |= {f"blk.{layer}.attn_q_norm.weight": dim, f"blk.{layer}.attn_k_norm.weight": dim}
        else:
            heads = {"q": shape["num_attention_heads"], "k": shape["num_key_value_heads"]}
            heads["v"] = heads["k"]
            found |= {f"blk.{layer}.attn_{name}.bias": count * dim for name, count in heads.items()}
    return found


def write(path: Path, shape: dict[str, Any]) -> None:
    """Write the file, one tensor at a time."""
    writer = gguf.GGUFWriter(path, shape["model_type"], use_temp_file=False)
    writer.add_name("random")
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(32768)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    alphabet = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 324)]]
    writer.add_token_list(
        [*alphabet, "ab", *(f"w{i}" for i in range(len(alphabet) + 1, shape["vocab_size"]))]
    )
    writer.add_token_types([1] * shape["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for name, (rows, columns) in matrices(shape).items():
        raw = (rows, columns // BLOCK * BLOCK_BYTES)
        kind = gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor_info(name, raw, np.dtype(np.uint8), rows * raw[1], raw_dtype=kind)
    for name, length in vectors(shape).items():
        writer.add_tensor_info(name, (length,), np.dtype(np.float32), 4 * length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(0)
    for rows, columns in matrices(shape).values():
        writer.write_tensor_data(random_blocks(draw, rows, columns))
    for name, length in vectors(shape).items():
        writer.write_tensor_data(np.full(length, name.endswith("weight"), dtype=np.float32))
    writer.close()


def random_blocks(draw: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Q4_K blocks whose values are about normal, with a deviation of 0.02."""
    blocks = draw.integers(0, 256, (rows, columns // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(1.3e-4).tobytes(), np.uint8)
    blocks[..., 2:4] = np.frombuffer(np.float16(9e-4).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def ask(path: Path, cache: Path) -> tuple[int, int, float]:
    """Peak memory, bytes of the weights and their bits, of a process that loads the file and answers."""
    environment = {**os.environ, "SKIM_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the model did not answer:\n{done.stderr[-2000:]}")
    peak, size, bits = done.stdout.split()[-3:]
    return int(peak), int(size), float(bits)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=["qwen2.5-1.5b", "qwen3-8b"])
    parser.add_argument("--most-gb", type=float, default=2.2)
    parser.add_argument("--dir", help="for the file and its conversion (default: the system's)")
    args = parser.parse_args()
    shape = SHAPES.get(args.shape, SMALL)
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        path = Path(directory) / "random.gguf"
        tell(f"writing {args.shape}")
        write(path, shape)
        size = path.stat().st_size
        tell("converting, loading and answering")
        first, _, _ = ask(path, Path(directory))
        tell("loading and answering")
        peak, weights, bits = ask(path, Path(directory))
    met = peak <= args.most_gb * 1e9
    print(
        f"{args.shape} in Q4_K: file {size / 1e9:.2f} GB, weights {weights / 1e9:.2f} GB in {bits:.2f} bits, "
        f"peak {peak / 1e9:.2f} GB ({first / 1e9:.2f} with converting); <= {args.most_gb:g} GB "
        f"{'ok' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    run(main)
