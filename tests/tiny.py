"""Small random models of every supported family, and a tokenizer for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from skim.attention import hook

VOCAB = 258  # every byte, then <s> and </s>
WINDOW = 24  # sliding window, in tokens

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "initializer_range": 0.15,  # spreads logits as widely as in a real model
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention"] * 2

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "mistral": lambda: MistralConfig(**_SIZES, head_dim=16, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**_SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=5.0),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, head_dim=16, sliding_window=WINDOW, layer_types=_MIXED),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def build(family: str, seed: int = 0, window: int | None = None) -> Any:
    """A float32 model with transformers' eager attention, and perhaps another context window."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config.max_position_embeddings = window or config.max_position_embeddings
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    return fast


def save(family: str, path: Path, seed: int = 0, window: int | None = None) -> Path:
    """Write a transformers directory with safetensors and a tokenizer."""
    build(family, seed, window).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def save_sketch(original: Path, path: Path) -> Path:
    """A model with the tokenizer, chat template and context window of another, and few random weights."""
    shutil.copytree(original, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(original)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "initializer_range"):
        setattr(config, name, _SIZES[name])
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return path


class CausalStep:
    """Stands in for a step: plain causal attention over all tokens."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, call: Any) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale)
        return out.transpose(0, 1)


def logits(module: Any, tokens: int) -> torch.Tensor:
    ids = torch.arange(65, 65 + tokens)[None]
    positions = torch.arange(tokens)[None]
    with torch.inference_mode():
        out = module(input_ids=ids, position_ids=positions, use_cache=False, skim_step=CausalStep())
    return out.logits  # type: ignore[no-any-return]


def with_our_attention(family: str) -> Any:
    hook.register()
    module = build(family)
    module.set_attn_implementation(hook.NAME)
    return module
