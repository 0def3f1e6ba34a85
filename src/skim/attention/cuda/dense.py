"""Long chunks by torch's fused attention: cuDNN on Hopper, faster there than the paged kernel.

cuDNN compiles an execution graph for every new pair of lengths, which takes as long as many layers. So the
number of queries is rounded up, with padding that is cut off, and the part of a prefix that cuDNN reads is
rounded down. The paged kernel adds the rest of the prefix and the chunk itself.
"""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from skim.attention.plain import attend_plain
from skim.attention.step import AttentionCall

log = logging.getLogger(__name__)

LEAST_QUERIES = 4096  # cuDNN's set-up for shorter chunks pays only after dozens of them
PREFIX_STEP = 4096  # a prefix is read in multiples of this
ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def fits(query: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> bool:
    """True if torch's fused attention covers this layer's call."""
    dim = query.shape[2]
    plain = call.softcap is None and call.window is None and call.sinks is None
    half = query.dtype in (torch.bfloat16, torch.float16) or not query.is_cuda
    return plain and half and dim == value.shape[2] and dim % 8 == 0 and dim <= 256


def rounded(queries: int) -> int:
    """Round up by at most 1/16, so that each doubling of the length has eight shapes."""
    step = max(512, 1 << max(0, (queries - 1).bit_length() - 4))
    return -(-queries // step) * step


def attend_causal(
    query: torch.Tensor,  # [queries, heads, dim]
    key: torch.Tensor,  # [queries, kv_heads, dim]
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of a prompt from its first token. [queries, heads, dim]"""
    queries = query.shape[0]
    padded = (_pad(t, rounded(queries)) for t in (query, key, value))
    q, k, v = (t.transpose(0, 1)[None] for t in padded)
    with sdpa_kernel(ORDER, set_priority=True) if query.is_cuda else nullcontext():
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)[:queries]


def attend_all(
    query: torch.Tensor,  # [queries, heads, dim]
    key: torch.Tensor,  # [keys, kv_heads, dim]
    value: torch.Tensor,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over every key. [queries, heads, dim], and logs of softmax denominators, [queries, heads]"""
    queries, heads, _ = query.shape
    if not query.is_cuda:
        part = attend_plain(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), call)
        return part.out[0].transpose(0, 1), part.lse[0].transpose(0, 1)
    q, k, v = (t.transpose(0, 1)[None] for t in (_pad(query, rounded(queries)), key, value))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=call.scale)[:2]
    return out[0].transpose(0, 1)[:queries], lse.view(heads, -1).transpose(0, 1)[:queries]


@functools.cache
def prefix_fits(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """True if cuDNN can attend over a prefix here. If not, the paged kernel does, and the log says why."""
    if device.type != "cuda":
        return True
    query, key = (torch.zeros(512, n, dim, dtype=dtype, device=device) for n in (heads, kv_heads))
    try:
        attend_all(query, key, key, AttentionCall(1.0))
    except RuntimeError as reason:
        log.info("the paged kernel reads long prefixes, because cuDNN cannot: %s", reason)
        return False
    return True


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Append zeros up to `length`; causal attention gives them no weight."""
    count = tensor.shape[0]
    if count == length:
        return tensor
    padded = tensor.new_empty(length, *tensor.shape[1:])
    padded[:count] = tensor
    padded[count:] = 0
    return padded
