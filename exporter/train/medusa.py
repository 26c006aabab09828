"""Training of Medusa heads (Cai et al. 2024, arXiv 2401.10774): cross-entropy of each head, weighted by 0.8^head.

The softmax runs over the corpus's own frequent tokens and a random sample of the others, which stands for the rest of a
lm_head that would otherwise be most of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.layers import Capture
from specexport.exporter.train.autograd import head_loss
from specexport.exporter.train.rows import Pack

DECAY = 0.8
#: Tokens that stand for those outside the frequent ones.
SAMPLE = 1024


class MedusaTrainer:
    """What a step of training needs of Medusa heads.

    Args:
        heads: the module that is exported, in float32, with the target's lm_head. captures: columns of the features.
        frequent: int64 [Vd], ascending ids that the softmax always has. dtype: of matrix products.
    """

    def __init__(self, heads: MedusaHeads, captures: Sequence[Capture], frequent: Tensor, dtype: torch.dtype) -> None:
        self.heads, self.dtype = heads, dtype
        width, place = heads.record.hidden_size, list(captures).index("final")
        self._final = slice(place * width, (place + 1) * width)
        rare = torch.ones(heads.valid_rows, dtype=torch.bool, device=frequent.device)
        rare[frequent] = False
        self.frequent, self.rare = frequent, rare.nonzero().flatten()
        self._sampler = torch.Generator().manual_seed(0)

    def losses(self, pack: Pack, steps: int) -> tuple[Tensor, Tensor]:
        """The loss, a mean over learnt rows, and hits bool [R, heads]; ``steps`` is the number of heads."""
        ids = self.frequent
        if len(self.rare):
            drawn = torch.randint(len(self.rare), (SAMPLE,), generator=self._sampler)
            ids = torch.cat([ids, self.rare[torch.unique(drawn).to(ids.device)]])
        table = self.heads.lm_head[ids]
        row_of = torch.full((self.heads.record.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        row_of[ids] = torch.arange(len(ids), device=ids.device)
        total, hits = torch.zeros((), device=ids.device), []
        for number, states in enumerate(self.heads.states(pack.features[pack.learnt, self._final].float())[:steps]):
            want = row_of[pack.ahead[:, number + 1]]
            weights = (pack.valid[:, number] & (want >= 0)).float()
            loss, best = head_loss(states, table, want.clamp(min=0), weights / max(len(want), 1), self.dtype)
            total = total + loss * DECAY**number
            hits.append((best == want) & (want >= 0) & pack.valid[:, number])
        return total, torch.stack(hits, dim=1)

    def reseed(self, step: int) -> None:
        """Draw the samples of a step as if all steps before had been taken."""
        self._sampler.manual_seed(step)


def trainable(heads: MedusaHeads) -> dict[str, nn.Parameter]:
    """The parameters that the heads bring themselves."""
    return {name: parameter for name, parameter in heads.named_parameters() if name != "lm_head"}
