"""Training of recurrent heads: the draft steps of :class:`RecurrentDrafter`, unrolled along every row of a text.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) trains on its own outputs ("training-time test"): step s feeds row i the
output of step s - 1 with token i + 1 + s, and predicts token i + 2 + s; it attends to the stable keys up to row i and
to the keys that the row itself made in steps 1 .. s. The loss of step s is the cross-entropy with the target's
distribution over the draft vocabulary, weighted by 0.8^s; places whose token is outside that vocabulary are left out.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077) is one step: smooth L1 between its output and the target's next state, and a
tenth of the cross-entropy with the target's distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from specexport.exporter.heads.attention import DraftAttention, Query
from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.exporter.heads.step import DraftLayer
from specexport.exporter.layers import Capture
from specexport.exporter.train.autograd import HeadLoss, head_loss
from specexport.exporter.train.rows import Pack, Span

#: Weight of each further step in the loss (EAGLE-3's).
DECAY = 0.8
#: Weight of the tokens beside the features (EAGLE-1's).
TOKEN_WEIGHT = 0.1


class RecurrentTrainer:
    """What a step of training needs of a recurrent head.

    Args:
        drafter: the module that is exported, in float32. captures: columns of the corpus's features.
        table: [Vd, H], rows of the target's lm_head for the draft vocabulary.
        dtype: of matrix products.
    """

    def __init__(
        self, drafter: RecurrentDrafter, captures: Sequence[Capture], table: Tensor, dtype: torch.dtype
    ) -> None:
        self.drafter, self.table, self.dtype = drafter, table, dtype
        record = drafter.record
        self.eagle1 = record.method == "eagle1"
        width = record.target_hidden_size
        places = [list(captures).index(capture) for capture in record.captures]
        self._columns = [slice(place * width, (place + 1) * width) for place in places]
        final = list(captures).index("final")
        self._final = slice(final * width, (final + 1) * width)
        ids = record.draft_to_target
        self._row_of = torch.full((record.vocab_size,), -1, dtype=torch.int64, device=table.device)
        numbers = torch.arange(len(table), device=table.device)
        self._row_of[numbers if ids is None else torch.from_numpy(ids).to(table.device)] = numbers

    def states(self, pack: Pack, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each unrolled step: what the lm_head reads and what is fed back, [R, Hd] of the learnt rows."""
        drafter = self.drafter
        embedded, hidden = self._inputs(pack)
        attend = _Attend(drafter, pack, self.dtype)
        attend.read_context(embedded, hidden)
        embedded, hidden = embedded[:, pack.learnt], hidden[:, pack.learnt]
        for step in range(steps):
            read, fed = drafter.ends(drafter.run(embedded, hidden, attend))
            yield read[0], fed[0]
            attend.step += 1
            hidden = fed
            embedded = nn.functional.embedding(pack.ahead[:, step + 1][None], drafter.embedding).float()

    def losses(self, pack: Pack, steps: int) -> tuple[Tensor, Tensor]:
        """The loss, a mean over learnt rows, and hits bool [R, steps]: whether the best token of a step was the text's.

        Args:
            steps: unrolled; one is drafting from the target's own states.
        """
        aims = self._aims(pack)
        total, hits = torch.zeros((), device=aims.device), []
        for step, (read, fed) in enumerate(self.states(pack, steps)):
            want = self._row_of[pack.ahead[:, step + 1]]
            # The aim of step s at row r is that of step 0 at row r + s, which is there as long as the text goes on.
            weights = (pack.valid[:, step] & (want >= 0)).float()
            aim = aims if step == 0 else torch.cat([aims[step:], aims[:step]])
            loss, best = head_loss(read, self._head(), aim, weights / max(len(aims), 1), self.dtype)
            total = total + loss * (TOKEN_WEIGHT if self.eagle1 else DECAY**step)
            if self.eagle1:
                states = pack.features[pack.learnt + 1, self._final].float()
                total = total + nn.functional.smooth_l1_loss(fed, states)
            hits.append((best == want) & (want >= 0) & pack.valid[:, step])
        return total, torch.stack(hits, dim=1)

    def _head(self) -> Tensor:
        return self.drafter.lm_head if self.drafter.record.lm_head == "head" else self.table

    def _inputs(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Embeddings and hidden states of all rows, float32 [1, N, ...]."""
        drafter = self.drafter
        embedded = nn.functional.embedding(pack.tokens[None], drafter.embedding).float()
        read = torch.cat([pack.features[:, columns] for columns in self._columns], dim=-1)
        if drafter.reduce is None:
            return embedded, read.float()[None]
        return embedded, drafter.reduce(read.to(self.dtype)).float()[None]

    @torch.no_grad()
    def _aims(self, pack: Pack) -> Tensor:
        """The target's distribution over the draft vocabulary after token i + 1 of each learnt row, [R, Vd]."""
        states = pack.features[pack.learnt + 1, self._final].to(self.dtype)
        aims = torch.empty(len(states), len(self.table), dtype=self.dtype, device=states.device)
        table = self.table.to(self.dtype)
        for begin in range(0, len(states), HeadLoss.CHUNK):
            part = slice(begin, begin + HeadLoss.CHUNK)
            aims[part] = torch.softmax((states[part] @ table.t()).float(), dim=-1).to(self.dtype)
        return aims


class _Attend:
    """Attention of the learnt rows in every step, for a head of one layer."""

    def __init__(self, drafter: RecurrentDrafter, pack: Pack, dtype: torch.dtype) -> None:
        self.drafter, self.pack, self.dtype = drafter, pack, dtype
        self.rope = (drafter.get_buffer("rope_cos"), drafter.get_buffer("rope_sin"))
        self.step = 0
        self._stable: tuple[Tensor, Tensor] | None = None
        self._chain: list[tuple[Tensor, Tensor]] = []

    def read_context(self, embedded: Tensor, hidden: Tensor) -> None:
        """Keys and values of rows that are only attended to."""
        drafter, pack = self.drafter, self.pack
        if not len(pack.context):
            return
        embedded, hidden = embedded[:, pack.context], hidden[:, pack.context]
        read, _ = drafter.join(embedded, hidden)
        layer = drafter.layers[0]
        assert isinstance(layer, DraftLayer) and layer.input_norm is None
        _, key, value = layer.attention.project(read.to(layer.dtype), self.rope, pack.positions[pack.context][None])
        self._stable = (key.to(self.dtype), value.to(self.dtype))

    def __call__(self, index: int, attention: DraftAttention, x: Tensor) -> Tensor:
        pack = self.pack
        positions = pack.positions[pack.learnt] + self.step
        query, *new = attention.project(x, self.rope, positions[None])
        key, value = (rows.to(self.dtype) for rows in new)
        if self.step == 0:
            if self._stable is not None:
                key, value = (torch.cat(pair, dim=2) for pair in zip(self._stable, (key, value), strict=True))
            self._stable = (key[:, :, pack.order], value[:, :, pack.order])
        else:
            self._chain.append((key, value))
        assert self._stable is not None
        mixed = [self._mix(attention, query, span, self._stable) for span in pack.spans]
        return attention.output(torch.cat(mixed, dim=1)[None], query.gate)

    def _mix(self, attention: DraftAttention, query: Query, span: Span, stable: tuple[Tensor, Tensor]) -> Tensor:
        """[Hq, rows, D] of one sequence."""
        keys, values = (rows[0, :, span.all] for rows in stable)
        rows = query.rows[0, :, span.learnt].to(self.dtype) * attention.scale
        count, kv_heads = rows.shape[1], attention.kv_heads
        grouped = rows.reshape(kv_heads, -1, rows.shape[-1])  # groups of a head one after another
        scores = (grouped @ keys.transpose(-1, -2)).float().reshape(kv_heads, -1, count, keys.shape[1])
        parts = [scores + span.mask]
        chain = [(key[0, :, span.learnt], value[0, :, span.learnt]) for key, value in self._chain]
        split = grouped.reshape(kv_heads, -1, count, rows.shape[-1])
        parts += [(split * key[:, None]).sum(-1, keepdim=True).float() for key, _ in chain]
        shares = torch.softmax(torch.cat(parts, dim=-1), dim=-1).to(self.dtype)
        wide = keys.shape[1]
        mixed = (shares[..., :wide].reshape(kv_heads, -1, wide) @ values).reshape(kv_heads, -1, count, values.shape[-1])
        for place, (_, value) in enumerate(chain):
            mixed = mixed + shares[..., wide + place, None] * value[:, None]
        return mixed.reshape(-1, count, values.shape[-1])


def trainable(drafter: RecurrentDrafter, record: RecurrentRecord) -> dict[str, nn.Parameter]:
    """The parameters that a head brings itself."""
    return {
        name: parameter for name, parameter in drafter.named_parameters() if getattr(record, name, None) != "target"
    }
