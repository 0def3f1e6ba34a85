"""Features for a second look that Skim does not compute: tried beside those of attention (`learn.py`).

`hidden`: the similarity of hidden states, centred, of the question's tokens and of each block's, by layer.
`likelihood`: that of the question's tokens after a block and its neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from skim.device import arrays_to_device
from skim.prefill.scoring.block_scores import BlockScores, join
from skim.prefill.scoring.features import Capture
from skim.prefill.scoring.scorer import ScoringTask, run_to_completion
from skim.prefill.scoring.statistics import stacked, standardised
from skim.prefill.scoring.windows import WINDOW_TOKENS, Batch, WindowStep, cut, run

SHARPNESS = 8.0  # similarities are exponents of this times a cosine, so that logarithms give them back
ONE = Capture(most=(0,), mean=(0,), each=(0,))


def hidden(module: Any, task: ScoringTask) -> np.ndarray:
    """Five statistics of each layer's similarities. [5 * layers, blocks]"""
    layers = module.base_model.layers
    scores = BlockScores(task, module.device)
    question = task.question_ids
    for edges in cut(len(task.context_places), WINDOW_TOKENS, 1 << 10):
        joined = join(task.context_places, edges, task.ids, question)
        take = scores.taker(joined)
        count, length = joined.batch.tokens.shape
        [ends] = arrays_to_device([joined.batch.ends], module.device)
        asked = ends[:, None] + torch.arange(-len(question), 0, device=module.device)

        def compare(
            layer: int,
            states: torch.Tensor,
            take: Any = take,
            shape: tuple[int, int] = (count, length),
            asked: torch.Tensor = asked,
        ) -> None:
            own = F.normalize(states.float().view(*shape, -1), dim=-1)
            own = F.normalize(own - own.mean(dim=(0, 1)), dim=-1)
            words = own.gather(1, asked[:, :, None].expand(-1, -1, own.shape[-1]))
            found = torch.exp(SHARPNESS * words @ own.transpose(1, 2))  # [windows, question, length]
            take(layer, torch.cat([found.amax(1, True), found.mean(1, True), found], dim=1))

        hooks = [
            layer.register_forward_hook(
                lambda _, __, out, number=number: compare(number, out[0] if isinstance(out, tuple) else out)
            )
            for number, layer in enumerate(layers)
        ]
        try:
            run(module.base_model, WindowStep(joined.batch, module.device))
        finally:
            for hook in hooks:
                hook.remove()
    captures = dict.fromkeys(range(len(layers)), ONE)
    # rows of more than 64 question tokens are not joined here: `stacked` takes any number
    return run_to_completion(scores.result(lambda rows: stacked(rows, captures)))


@torch.inference_mode()
def likelihood(module: Any, task: ScoringTask) -> np.ndarray:
    """Five statistics of the probabilities of the question's tokens, and their sum. [6, blocks]"""
    size, ids, question = task.block_size, task.ids, task.question_ids
    blocks = task.context_blocks
    free = ~task.is_question
    texts = []
    for block in blocks.tolist():
        places = np.arange(max(0, (block - 1) * size), min(len(ids), (block + 2) * size))
        texts.append(np.concatenate([ids[:1], ids[places[free[places]]], question]))
    length = max(map(len, texts))
    tokens = np.full((len(texts), length), ids[0])
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    ends = np.array(list(map(len, texts)))
    found = []
    for first in range(0, len(texts), 32):
        part = slice(first, first + 32)
        batch = Batch(tokens[part], ends[part], len(question))
        states = run(module.base_model, WindowStep(batch, module.device)).last_hidden_state[0]
        states = states.view(len(batch.ends), length, -1)
        last, asked = arrays_to_device([batch.ends, question], module.device)
        before = last[:, None] + torch.arange(-len(question) - 1, -1, device=module.device)
        own = states.gather(1, before[:, :, None].expand(-1, -1, states.shape[-1]))
        logits = module.get_output_embeddings()(own).float().log_softmax(dim=-1)
        found.append(logits.gather(2, asked[None, :, None].expand(len(own), -1, 1))[:, :, 0])
    logs = torch.cat(found).T  # [question, blocks]
    rows = logs.exp()
    rows = torch.cat([rows.amax(0, True), rows.mean(0, True), rows])
    whole = standardised(logs.mean(dim=0, keepdim=True))
    return torch.cat([stacked({0: rows}, {0: ONE}), whole]).cpu().numpy()  # type: ignore[no-any-return]
