"""Products of coded weights and few tokens on a GPU, each with the kernel for its number of tokens."""

import torch

from skim.models.quantized import triton_halves, triton_pairs
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.triton_halves import multiply_halves
from skim.models.quantized.triton_matrix import multiply_few
from skim.models.quantized.triton_pairs import multiply_pairs
from skim.models.quantized.triton_vector import multiply_one


def multiply_few_tokens(
    given: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` for 1 to 64 tokens. `given` has its columns in the weight's order. [tokens, columns]"""
    if len(given) == 1:
        halves = triton_halves.can_multiply(weight, given.dtype)
        return (multiply_halves if halves else multiply_one)(given, weight, bias)
    pairs = triton_pairs.can_multiply(weight, len(given), given.dtype)
    return (multiply_pairs if pairs else multiply_few)(given, weight, bias)
