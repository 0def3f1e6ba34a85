"""The question's attention, from scores to blocks, in C on a CPU.

In torch, each operation is a pass over memory; together these passes took an eighth of the time of scoring.
`native/question.c` makes one pass from scores to the rows of a `Capture`, and one from rows to blocks. Twins
in torch: `rows_in_torch` in `windows.py`, and `BlockScores`.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from skim.native import build
from skim.prefill.scoring.features import Capture

SOURCE = build.SOURCES / "question.c"
MOST, MEAN, EACH = 1, 2, 4  # as in C
BEFORE, AFTER = 1, 2


class CRows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("scores", "hidden", "weight", "sinks", "kinds")),
        *((name, c_void_p) for name in ("most", "mean", "each", "out")),
        *((name, c_int64) for name in ("windows", "heads", "key_heads", "count", "length", "rows", "group")),
        ("next", c_int64),
    )


class CBlocks(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention", "columns", "block", "sides", "counts", "best")),
        *((name, c_int64) for name in ("windows", "rows", "length", "most_places", "blocks")),
        ("softer", c_float),
        ("finite", c_int32),
        ("next", c_int64),
    )


class QuestionKernel:
    """The compiled functions. Tensors are contiguous; floats are float32 and indices int64."""

    def __init__(self) -> None:
        self._team = build.team_launcher()
        library = build.load(SOURCE)
        self._rows, self._blocks = library.skim_question_rows, library.skim_block_scores
        for function, structure in ((self._rows, CRows), (self._blocks, CBlocks)):
            function.argtypes = [POINTER(structure), c_void_p, c_uint]
            function.restype = None

    def rows(
        self,
        scores: torch.Tensor,  # [windows, heads, question, length]; overwritten
        hidden: torch.Tensor,  # [windows, 1, question, length], bool: keys that a query does not read
        weight: torch.Tensor,  # [windows, key_heads, length]
        sinks: torch.Tensor | None,  # [heads]
        capture: Capture,
        group: int,
    ) -> torch.Tensor:
        """The rows of the capture. [windows, rows, length]"""
        windows, heads, count, length = scores.shape
        rows, by_head = _rows_of_heads(capture, heads, -(-count // group))
        table = torch.tensor(by_head, dtype=torch.int32, device="cpu")
        out = scores.new_empty(windows, rows, length)
        given = CRows(
            scores.data_ptr(),
            hidden.data_ptr(),
            weight.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            *(row.data_ptr() for row in table),
            out.data_ptr(),
            windows,
            heads,
            weight.shape[1],
            count,
            length,
            rows,
            group,
        )
        self._rows(byref(given), self._team, torch.get_num_threads())
        return out

    def raise_blocks(
        self, best: torch.Tensor, attention: torch.Tensor, places: Places, softer: float
    ) -> bool:
        """Raise the scores of blocks by the attention to their tokens. False if any of it is not finite.

        best: [rows, blocks], raised to the best smoothed attention; attention: [windows, rows, length];
        softer: the weight of a place for a neighbour of its block
        """
        windows, rows, length = attention.shape
        given = CBlocks(
            attention.data_ptr(),
            *(array.ctypes.data for array in places[:4]),
            best.data_ptr(),
            windows,
            rows,
            length,
            places.columns.shape[1],
            best.shape[1],
            softer,
            1,
        )
        self._blocks(byref(given), self._team, torch.get_num_threads())
        return bool(given.finite)


class Places(NamedTuple):
    """The prompt's tokens in scoring windows. Arrays are [windows, places], padded at the end."""

    columns: np.ndarray  # in the window
    block: np.ndarray
    sides: np.ndarray  # the neighbours of the block for which the token counts too
    counts: np.ndarray  # [windows]: without padding

    @classmethod
    def of(
        cls, columns: np.ndarray, places: np.ndarray, counts: np.ndarray, block_size: int, edge: int
    ) -> Places:
        """places: indices of prompt tokens; edge: tokens at either edge of a block that count twice"""
        block, offset = np.divmod(places, block_size)
        sides = BEFORE * (offset < edge) + AFTER * (offset >= block_size - edge)
        return cls(columns, block, sides.astype(np.uint8), counts)


@cache
def _rows_of_heads(capture: Capture, heads: int, groups: int) -> tuple[int, list[list[int]]]:
    """The number of rows; then, by head, the kinds of its rows and the first row of each kind."""
    every = tuple(range(heads))
    own = [every if capture.most is None else capture.most, capture.mean, capture.each]
    first = [0, len(own[0]), len(own[0]) + len(own[1])]
    rows = first[2] + len(own[2]) * groups
    kinds, *starts = ([0] * heads for _ in range(4))
    for kind, some, start, begin, each in zip(
        (MOST, MEAN, EACH), own, starts, first, (1, 1, groups), strict=True
    ):
        for index, head in enumerate(some):
            kinds[head] |= kind
            start[head] = begin + index * each
    return rows, [kinds, *starts]


@cache
def question_kernel() -> QuestionKernel | None:
    """The compiled functions, or None if they are not available: torch computes the same."""
    without = "scoring uses torch's operations; the native ones are not available"
    return build.available(QuestionKernel, check, without)


def check(native: QuestionKernel) -> None:
    """Compare a small case with its definition, and verify that a NaN is propagated."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 3, 20, generator=draw)
    hidden = torch.zeros(1, 1, 3, 20, dtype=torch.bool)
    hidden[..., 15:] = True
    weight = torch.rand(1, 1, 20, generator=draw)
    share = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    capture = Capture(most=(0,), mean=(1,), each=())
    wanted = torch.stack([share[0, 0].amax(dim=0), share[0, 1].mean(dim=0)])[None] * weight
    found = native.rows(scores.clone(), hidden, weight, None, capture, 1)
    scores[0, 1, 2, 3] = float("nan")
    bad = native.rows(scores, hidden, weight, None, capture, 1)
    index = np.arange(20)[None]
    places = Places.of(index, index, np.array([20]), 4, 1)
    finite = [native.raise_blocks(torch.zeros(2, 5), rows, places, 0.5) for rows in (found, bad)]
    if not torch.allclose(found, wanted, atol=1e-6) or finite != [True, False] or not bad[0, 1].isnan().all():
        raise build.NativeUnavailable("its results differ from torch's")
