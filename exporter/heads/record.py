"""What a speculative head is, with nothing left to guess: every public dialect becomes one of these records.

Two shapes cover all heads with weights. :class:`MedusaRecord`: independent heads on the target's last hidden state.
:class:`RecurrentRecord`: one small decoder that feeds its own output back (EAGLE-1/2/3, multi-token prediction).

Weights go by canonical names, in the checkpoint's [out, in] layout:

* Medusa: ``heads.{h}.blocks.{l}.weight`` [H, H] and ``.bias`` [H]; ``heads.{h}.lm_head`` [V, H] where each head has
  its own, ``lm_head`` where they share one.
* Recurrent: ``reduce.weight`` [Hd, F] and ``.bias``; ``reduce_norm.weight`` [F] or ``reduce_norms.{i}.weight`` [H];
  ``fuse.weight`` [Hd, 2 Hd] and ``.bias``; ``embedding_norm.weight``, ``hidden_norm.weight`` [Hd]; layers as in the
  target (``layers.{i}.input_norm.weight``, ``layers.{i}.attention.q_proj.weight``, ``layers.{i}.mlp_norm.weight``,
  ``layers.{i}.mlp.gate_proj.weight`` ...); ``norm.weight``; ``embedding`` [V, He]; ``lm_head`` [Vd, Hd].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specexport.exporter.config import RopeConfig
from specexport.exporter.layers import Capture

#: Whose tensor is used.
Source = Literal["head", "target"]


@dataclass(frozen=True, slots=True)
class HeadLineage:
    """What the head says about its target: None where it says nothing."""

    verifier: str | None = None
    architecture: str | None = None


@dataclass(frozen=True, slots=True)
class MedusaRecord:
    """Independent heads; head i (from 0) predicts the token i + 2 places after the last one the target has seen.

    Attributes:
        dialect: name of the detected layout.
        num_heads, num_layers: heads, and residual blocks x + act(W x + b) in each.
        block_bias: whether blocks have b.
        activation: ``silu`` or ``gelu_tanh``.
        lm_head: ``own`` (one a head), ``shared`` (one in the head's file) or ``target``.
        vocab_size: rows of the head's logits. token_map: target id of each row, None where they are the same.
    """

    dialect: str
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    block_bias: bool
    activation: str
    lm_head: Literal["own", "shared", "target"]
    token_map: NDArray[np.int64] | None
    lineage: HeadLineage
    method: Literal["medusa"] = "medusa"

    @property
    def captures(self) -> tuple[Capture, ...]:
        return ("final",)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Decoder layers of a recurrent head. The first may take a wider input (see :attr:`RecurrentRecord.fusion`).

    Attributes:
        first_input_norm: whether layer 0 has an input norm (EAGLE-1 has none; with ``concat`` fusion the two inputs'
            own norms stand in its place).
        norm_offset: added to norm weights (1.0 where the checkpoint stores w - 1).
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope: RopeConfig
    attention_scale: float
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    first_input_norm: bool = True
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class RecurrentRecord:
    """One small decoder, unrolled: the order of work at a draft step, and what differs between dialects.

    1. Step 1 only: ``features`` of the target are normed (:attr:`reduce_norm`) and reduced by ``reduce`` to width Hd
       where :attr:`reduce`; otherwise they are the hidden state as they are. Later steps: the fed-back state.
    2. The next token's embedding and that hidden state, each normed where it has a norm, are joined in the order of
       :attr:`order`: projected by ``fuse`` (``project``), or handed side by side to layer 0 (``concat``).
    3. The layers. With ``concat`` the residual of layer 0 is the hidden state, normed if :attr:`norm_before_residual`.
    4. Logits: ``lm_head`` of the output, after ``norm`` where :attr:`final_norm`. Fed back: the output before that norm
       (``raw``) or after it (``normed``).

    Attributes:
        method: ``eagle1`` (also EAGLE-2: the same weights), ``eagle3`` or ``mtp``. dialect: the detected layout.
        captures: what the target's features are, in the order they are concatenated.
        target_hidden_size: H, width of one capture.
        embedding, lm_head: whose. embedding_size: He, width of the embedding.
        draft_vocab_size: Vd. draft_to_target: int64 [Vd] absolute target ids (ascending), None where Vd is V.
        max_positions: draft context; past it the session decodes plainly.
    """

    method: Literal["eagle1", "eagle3", "mtp"]
    dialect: str
    captures: tuple[Capture, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    reduce: bool
    reduce_bias: bool
    reduce_norm: Literal["none", "concat", "each"]
    fusion: Literal["project", "concat"]
    fuse_bias: bool
    order: tuple[Literal["embedding", "hidden"], Literal["embedding", "hidden"]]
    embedding_norm: bool
    hidden_norm: bool
    norm_before_residual: bool
    blocks: BlockConfig
    final_norm: bool
    feedback: Literal["raw", "normed"]
    embedding: Source
    embedding_size: int
    lm_head: Source
    draft_to_target: NDArray[np.int64] | None
    max_positions: int
    lineage: HeadLineage


HeadRecord = MedusaRecord | RecurrentRecord
