"""Stateless random numbers: one per (seed, step).

There is no generator state to save, restore or share, so a sequence draws the same numbers alone, in any
batch, and after preemption.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_WEYL = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit flips about half of the output bits.

    The constants are those of the splitmix64 finaliser.
    """
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) for step `step` of stream `seed`, with all 53 bits of a float's mantissa.

    The seed is mixed before the step is added, so the streams of neighbouring seeds are not shifted copies.
    """
    stream = mix64(seed + _WEYL)
    return float(mix64(stream + (step + 1) * _WEYL) >> 11) * 2.0**-53
