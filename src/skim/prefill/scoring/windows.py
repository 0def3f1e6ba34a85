"""Scoring windows: short pieces of a prompt that model-based scorers run instead of one long forward.

A scoring window is a piece of the prompt followed by the question. Each is computed separately, at positions
from 0. So the cost is linear in the length of the prompt, no scoring window is longer than the model has seen
in training, and a passage gets the same score at any place. The windows of a batch are flattened into
one forward; nothing is written to a KV pool.

Nothing here synchronizes with a device: results stay where they were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from skim.attention.pieces import attend_causal
from skim.attention.plain import visible
from skim.attention.step import Attention, AttentionCall, Ranking
from skim.device import arrays_to_device
from skim.memory.budget import gpu_size
from skim.prefill.scoring.features import Capture, Captures, tokens_per_row
from skim.prefill.scoring.native_rows import QuestionKernel, question_kernel
from skim.prefill.scoring.scorer import SLICE_SECONDS, ScoringError

Take = Callable[[int, torch.Tensor], None]
"""Takes the attention that a layer's captured heads pay: the layer, [windows, rows, length]."""

WINDOW_TOKENS = 512  # prompt tokens in a scoring window
LONGEST_QUESTION = WINDOW_TOKENS // 2

MAX_SCORES = 1 << 24  # attention scores that exist at once
_CUDA_WORK = 100e12  # weights x tokens that an H200 computes in a second, about
_CUDA_TOKENS = 1 << 17  # most tokens in one forward, even of a tiny model
_CUDA_SHARE = 1 / 64  # of a GPU's memory, or of its cap: the activations of one forward take at most this
# cuDNN compiles an execution graph for each new shape, and almost every prompt has one: not the first choice.
_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Batch:
    """Scoring windows of one forward, padded at the end to one length.

    Attention is causal, so padding costs time and changes nothing.
    """

    tokens: np.ndarray  # [windows, length], any token as padding
    ends: np.ndarray  # [windows]: lengths without padding
    question: int = 0  # the last tokens of every window, before padding, are the question


class StopForwardError(Exception):
    """Ends a forward after the last captured layer: the layers above it need not run.

    Raised in the attention function and caught around the module's call, so the model's code needs no change.
    It never leaves `run`.
    """


class TokenStep(Attention, Protocol):
    """A step with its input tokens."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor


class WindowStep(Ranking):
    """Stands in for a step (`skim_step`): attends inside scoring windows, captures question attention.

    `take` gets the question's attention to each token of the scoring window, layer by layer, times the length
    of that token's value (see `question_attention`). It may be non-finite: checking here would synchronize
    with the device (see `check_finite`). Attention is a probability of the full softmax, with the question's
    own tokens, the window's first token and the model's sinks in the denominator. A window without the answer
    spends its attention there, which makes the scores of different windows comparable. Attention that means
    nothing rests on tokens with short values, such as punctuation: the product is what a token adds to the
    layer's output.
    """

    def __init__(
        self,
        batch: Batch,
        device: torch.device,
        captures: Captures | None = None,
        take: Take = lambda layer, attention: None,
    ) -> None:
        self._captures = captures or {}
        self._take = take
        self._last = max(self._captures, default=None)
        count, length = batch.tokens.shape
        self._shape = count, length
        tokens, ends = arrays_to_device([batch.tokens, batch.ends], device)
        self.input_ids = tokens.reshape(1, -1)
        self._places = torch.arange(length, device=device)
        self.position_ids = self._places.repeat(1, count)
        last = torch.arange(-batch.question, 0, device=device)
        self._question = ends[:, None] + last  # [windows, question]
        self._masks: dict[int | None, torch.Tensor] = {}  # by the layers' sliding window

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        # views, [windows, heads, length, dim]
        query, key, value = (
            t.reshape(*self._shape, *t.shape[1:]).transpose(1, 2) for t in (query, key, value)
        )
        if layer in self._captures:
            hidden = self._hidden(call.window)
            capture = self._captures[layer]
            self._take(
                layer, question_attention(query, key, lengths(value), self._question, hidden, call, capture)
            )
        if layer == self._last:
            raise StopForwardError
        return _causal(query, key, value, call).transpose(1, 2).flatten(0, 1)

    def _hidden(self, sliding_window: int | None) -> torch.Tensor:
        """Tokens that each question token may not read. [windows, 1, question, length]"""
        if sliding_window not in self._masks:
            seen = visible(self._question.reshape(-1), self._places, sliding_window)
            self._masks[sliding_window] = ~seen.view(self._question.shape[0], 1, self._question.shape[1], -1)
        return self._masks[sliding_window]


def lengths(value: torch.Tensor) -> torch.Tensor:
    """The lengths of values, as float32. [..., value_dim] -> [...]"""
    found: torch.Tensor = torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32)
    return found


def question_attention(
    query: torch.Tensor,  # [windows, query_heads, queries, key_dim]
    key: torch.Tensor,  # [windows, kv_heads, length, key_dim]
    weight: torch.Tensor,  # [windows, kv_heads, length]: multiplies the attention to each token
    question: torch.Tensor,  # [windows, question]: indices of the question's queries
    hidden: torch.Tensor,  # [windows, 1, question, length]: keys that they may not read
    call: AttentionCall,
    capture: Capture,
    group: int | None = None,  # question tokens that share a row; None for `tokens_per_row`
) -> torch.Tensor:
    """The attention that the question pays to each token, times `weight`. [windows, rows, length], float32

    Rows are those of `Capture`. Computes question x length scores per head, never length x length, and at
    most `MAX_SCORES` at once, or those of one window.
    """
    windows, query_heads, _, dim = query.shape
    kv_heads, length, count = key.shape[1], key.shape[2], question.shape[1]
    rows = query.gather(2, question[:, None, :, None].expand(-1, query_heads, -1, dim)) * call.scale
    group = group or tokens_per_row(count)
    native = _native_for(query)
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    heads, captured = capture.heads, scored_heads(query, capture)
    if heads is None or captured == query_heads:
        rows = rows.view(windows, kv_heads, -1, dim)  # query heads that share a key head, side by side
        if native is None:
            weight = weight.repeat_interleave(query_heads // kv_heads, dim=1)
    else:
        rows = torch.stack([rows[:, head] for head in heads], dim=1)
        key, weight = (
            torch.stack([one[:, head * kv_heads // query_heads] for head in heads], dim=1)
            for one in (key, weight)
        )
        sinks = torch.stack([sinks[head] for head in heads]) if sinks is not None else None
    some = max(1, MAX_SCORES // max(1, captured * count * length))
    found = []
    for first in range(0, windows, some):
        part = slice(first, first + some)
        scores = torch.matmul(rows[part], key[part].transpose(2, 3)).float().view(-1, captured, count, length)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if native is not None:
            found.append(native.rows(scores, hidden[part], weight[part].contiguous(), sinks, capture, group))
        else:
            found.append(rows_in_torch(scores, hidden[part], weight[part], sinks, capture, group))
    return torch.cat(found) if len(found) > 1 else found[0]


def scored_heads(query: torch.Tensor, capture: Capture) -> int:
    """The number of heads for which `question_attention` computes scores. query: [windows, query_heads, ...]

    For the kernel it is all of the layer's, because selecting heads copies their keys.
    """
    if capture.heads is None or _native_for(query) is not None:
        return query.shape[1]
    return len(capture.heads)


def _native_for(query: torch.Tensor) -> QuestionKernel | None:
    """The kernel, if it can compute with these queries."""
    return question_kernel() if query.is_cpu and query.dtype == torch.float32 else None


def rows_in_torch(
    scores: torch.Tensor,  # [windows, captured heads, question, length]; overwritten
    hidden: torch.Tensor,  # [windows, 1, question, length]: keys that a query does not read
    weight: torch.Tensor,  # [windows, captured heads, length]
    sinks: torch.Tensor | None,  # [captured heads]
    capture: Capture,
    group: int,
) -> torch.Tensor:
    """The rows of `Capture`, from scores. [windows, rows, length]"""
    scores.masked_fill_(hidden, float("-inf"))
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks[:, None, None])
    return _rows_of(scores.sub_(total), weight, capture, group)


def _rows_of(logs: torch.Tensor, weight: torch.Tensor, capture: Capture, group: int) -> torch.Tensor:
    """The rows of `Capture`, from the logs of probabilities. [windows, rows, length]

    logs: [windows, heads, question, length], weight: [windows, heads, length]
    """
    heads = capture.heads
    if heads is None or not capture.mean + capture.each:
        return logs.amax(dim=2).exp_().mul_(weight)
    parts = []
    if capture.most:
        own, scale = _of_heads(logs, heads, capture.most), _of_heads(weight, heads, capture.most)
        parts.append(own.amax(dim=2).exp_().mul_(scale))
    if capture.mean:
        own, scale = _of_heads(logs, heads, capture.mean), _of_heads(weight, heads, capture.mean)
        parts.append(own.exp().mean(dim=2).mul_(scale))
    if capture.each:
        own, scale = _of_heads(logs, heads, capture.each), _of_heads(weight, heads, capture.each)
        if group > 1:
            own = F.pad(own, (0, 0, 0, -own.shape[2] % group), value=float("-inf"))
            own = own.view(*own.shape[:2], -1, group, own.shape[3]).amax(dim=3)
        parts.append(own.exp_().mul_(scale[:, :, None]).flatten(1, 2))  # the last: it may change `logs`
    return torch.cat(parts, dim=1)


def _of_heads(values: torch.Tensor, heads: tuple[int, ...], wanted: tuple[int, ...]) -> torch.Tensor:
    """The values of some of these heads, along the second axis. An index tensor would make the host wait."""
    if wanted == heads:
        return values
    return torch.stack([values[:, heads.index(head)] for head in wanted], dim=1)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attention inside each scoring window. [windows, query_heads, length, value_dim]"""
    length = query.shape[2]
    if not query.is_cuda or call.softcap is not None or call.sinks is not None:
        each = zip(query, key, value, strict=True)
        found = [attend_causal(*window, call) for window in each]
        return torch.stack(found) if len(found) > 1 else found[0][None]
    mask = None
    if call.window is not None and call.window < length:
        places = torch.arange(length, device=query.device)
        mask = visible(places, places, call.window)
    if mask is None and query.dtype != torch.float32:
        with sdpa_kernel(_ORDER, set_priority=True):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=call.scale, enable_gqa=True
            )
    group = query.shape[1] // key.shape[1]  # the kernel for masks and float32 has no grouped heads
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=call.scale)


@torch.inference_mode()
def run(module: Any, step: TokenStep) -> Any:
    """One forward over the step's tokens; None if it ended at the last captured layer."""
    try:
        return module(
            input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, skim_step=step
        )
    except StopForwardError:
        return None


def check_finite(finite: bool) -> None:
    if not finite:
        raise ScoringError(
            "the drafter's attention is not finite (a damaged model, or float16 overflow); "
            "use another dtype or another scorer"
        )


def cut(count: int, most: int, per_batch: int) -> Iterator[np.ndarray]:
    """Cut `count` items into the fewest runs of at most `most`, of nearly equal lengths.

    Yields the fewest batches of at most `per_batch` runs, of nearly equal sizes, each as the edges of its
    runs: run i is from edge i to edge i + 1.
    """
    pieces = -(-count // most)
    edges = np.arange(pieces + 1) * count // max(1, pieces)
    batches = -(-pieces // per_batch)
    for index in range(batches):
        yield edges[index * pieces // batches : (index + 1) * pieces // batches + 1]


def windows_per_batch(module: Any, layers: int, length: int, seconds: float = SLICE_SECONDS) -> int:
    """Scoring windows of `length` tokens in one forward of the first `layers` layers.

    One on the CPU, so that decode steps can run in between. On a GPU, as many as take about `seconds`.
    """
    if module.device.type != "cuda":
        return 1
    return max(1, tokens_per_slice(module, layers, seconds) // length)


def tokens_per_slice(module: Any, layers: int, seconds: float) -> int:
    """Tokens that the first `layers` layers compute in about `seconds` on a GPU, fewer on a small one."""
    fitting = int(_CUDA_SHARE * gpu_size(module.device)) // bytes_per_token(module)
    return max(1, min(_CUDA_TOKENS, fitting, int(_CUDA_WORK * seconds / weights_read(module, layers))))


def bytes_per_token(module: Any) -> int:
    """Memory that a token takes in a layer, about: its inputs, queries, keys, values and the feed-forward's
    values, which exist at once."""
    config = module.config.get_text_config()
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    hidden = int(config.hidden_size)
    dim = int(getattr(config, "head_dim", None) or hidden // heads)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    return int(module.dtype.itemsize) * (4 * hidden + 2 * (heads + 2 * shared) * dim + 3 * wide)


def weights_read(module: Any, layers: int) -> int:
    """Weights that one token is multiplied with in the first `layers` layers."""
    if module not in _weights:
        _weights[module] = _count_weights(module)
    return max(1, _weights[module] * layers // int(module.config.get_text_config().num_hidden_layers))


_weights: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _count_weights(module: Any) -> int:
    """Weights of the layers, without the embedding tables. Counting takes a millisecond."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    return sum(
        # a quantized matrix has no parameters and says how many values it holds
        sum(one.numel() for one in part.parameters(recurse=False)) + int(getattr(part, "values", 0))
        for part in module.modules()
        if part not in ends
    )
