"""Convert a GGUF file's vocabulary to a transformers tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skim.errors import ModelError
from skim.models.gguf.config import write_json
from skim.models.gguf.file import GGUFFile

# Byte-level BPE: the pattern that splits a text before merging, by GGUF's name. None is GPT-2's pattern.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _REST))
_QWEN2 = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _REST))
_CUTS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_CONTROL, _USER_DEFINED = 3, 4
_END_OF_TURN = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
    ),
    *("<|eot|>", "<|END_OF_TURN_TOKEN|>"),
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's metadata, validated."""

    file: GGUFFile
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    """`bos_token_id`, `eos_token_id` and `pad_token_id`, if the file has them."""

    @classmethod
    def of(cls, file: GGUFFile) -> Vocabulary:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise ModelError(
                f"{file.path} has no tokenizer.ggml.tokens; give a GGUF file that holds its vocabulary"
            )
        types = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
        if not isinstance(types, list) or len(types) != len(tokens):
            raise file.broken(f"tokenizer.ggml.token_type does not match {len(tokens)} tokens")
        ids = {}
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            value = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if value is None:
                continue
            if not isinstance(value, int) or not 0 <= value < len(tokens):
                raise file.broken(
                    f"tokenizer.ggml.{theirs}_token_id is {value!r}, not an id below {len(tokens)}"
                )
            ids[f"{ours}_token_id"] = value
        return cls(file, tokens, types, ids)

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.{key}", default)

    def endings(self) -> list[int]:
        """All tokens that end a turn. Those named in the file come first."""
        named = [self.ids.get("eos_token_id"), self.get("ggml.eot_token_id"), self.get("ggml.eom_token_id")]
        by_text = [i for i, kind in self.marked() if self.tokens[i] in _END_OF_TURN]
        return list(
            dict.fromkeys(i for i in [*named, *by_text] if isinstance(i, int) and i < len(self.tokens))
        )

    def marked(self) -> list[tuple[int, int]]:
        """(id, type) of the control and user-defined tokens, which are never split."""
        return [(i, kind) for i, kind in enumerate(self.types) if kind in (_CONTROL, _USER_DEFINED)]


def write_tokenizer(vocabulary: Vocabulary, directory: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    Byte-level BPE is built here: 5 times faster than transformers' GGUF reader, and digits are split as the
    model expects. Other kinds (SentencePiece, unigram) are converted by transformers.
    """
    from tokenizers import processors

    kind, pre = vocabulary.get("ggml.model"), vocabulary.get("ggml.pre", "default")
    if kind == "gpt2" and pre in _CUTS:
        tokenizer = _byte_level_bpe(vocabulary, pre)
    else:
        tokenizer = _through_transformers(vocabulary)
    bos = vocabulary.ids.get("bos_token_id")
    if bos is not None and vocabulary.get("ggml.add_bos_token", kind == "llama" or _CUTS.get(pre) == _LLAMA3):
        text = vocabulary.tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[text, "$A"], pair=[text, "$A", text, "$B"], special_tokens=[(text, bos)]
        )
    tokenizer.add_tokens(_added_tokens(vocabulary))
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {key.removesuffix("_id"): vocabulary.tokens[i] for key, i in vocabulary.ids.items()}
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **named,
        },
    )
    if template := vocabulary.get("chat_template"):
        (directory / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def _added_tokens(vocabulary: Vocabulary) -> list[Any]:
    """Control tokens are hidden from decoded text. User-defined tokens (`<tool_call>`) are shown."""
    from tokenizers import AddedToken

    endings = set(vocabulary.endings())
    return [
        AddedToken(vocabulary.tokens[i], special=kind == _CONTROL or i in endings, normalized=False)
        for i, kind in vocabulary.marked()
    ]


def _byte_level_bpe(vocabulary: Vocabulary, pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ")) for merge in vocabulary.get("ggml.merges", [])]
    if len(ids) != len(vocabulary.tokens) or not all(len(merge) == 2 for merge in merges):
        raise vocabulary.file.broken("its vocabulary repeats a token or has a merge that is not a pair")
    llama3, pattern = _CUTS[pre] == _LLAMA3, _CUTS[pre]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=llama3))
    except Exception as error:  # tokenizers raises bare Exception
        raise vocabulary.file.broken(f"its merges do not match its vocabulary ({error})") from error
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pattern == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _through_transformers(vocabulary: Vocabulary) -> Any:
    from transformers import PreTrainedTokenizerFast

    path = vocabulary.file.path
    try:
        made = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:
        kind = f"{vocabulary.get('ggml.model')!r}/{vocabulary.get('ggml.pre')!r}"
        raise ModelError(
            f"{path}: its tokenizer ({kind}) cannot be converted "
            f"({type(error).__name__}: {str(error)[:160]}); "
            "use a safetensors directory of this model"
        ) from error
    tokenizer = made.backend_tokenizer
    for i in {0, len(vocabulary.tokens) // 2, len(vocabulary.tokens) - 1}:
        if tokenizer.id_to_token(i) != vocabulary.tokens[i]:
            raise vocabulary.file.broken(f"token {i} was converted to {tokenizer.id_to_token(i)!r}")
    return tokenizer
