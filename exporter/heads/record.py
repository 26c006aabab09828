"""What a speculative head is, with nothing left to guess: every public dialect becomes one of these records.

Two shapes cover all heads with weights. :class:`MedusaRecord`: independent heads on the target's last hidden state.
:class:`RecurrentRecord`: one small decoder that feeds its own output back (EAGLE-1/2/3, multi-token prediction).

Weights go by canonical names, in the checkpoint's [out, in] layout:

* Medusa: ``heads.{h}.blocks.{l}.weight`` [H, H] and ``.bias`` [H]; ``heads.{h}.lm_head`` [V, H] where each head has
  its own, ``lm_head`` where they share one.
* Recurrent: ``reduce.weight`` [Hd, F] and ``.bias``; ``reduce_norm.weight`` [F] or ``reduce_norms.{i}.weight`` [H];
  ``fuse.weight`` [Hd, 2 Hd] and ``.bias``; ``embedding_norm.weight``, ``hidden_norm.weight`` [Hd]; layers as in the
  target (``layers.{i}.input_norm.weight``, ``layers.{i}.attention.q_proj.weight``, ``layers.{i}.mlp_norm.weight``,
  ``layers.{i}.mlp.gate_proj.weight`` ...); ``norm.weight``; ``embedding`` [V, He]; ``lm_head`` [Vd, Hd]. Prediction
  layer j > 0 of a chain has ``fuse``, norms and ``layers`` of its own, as ``chain.{j - 1}.fuse.weight`` ...
* Latent attention: ``q_proj`` or ``q_a_proj`` [Rq, Hd], ``q_a_norm``, ``q_b_proj``; ``kv_a_proj`` [Rkv + rope, Hd],
  ``kv_a_norm``, ``kv_b_proj`` [heads * (nope + value), Rkv]; ``o_proj``.
* Experts: ``mlp.router`` [E, Hd], ``mlp.correction`` [E], ``mlp.experts.{e}.gate_proj.weight`` ...,
  ``mlp.shared.gate_proj.weight`` ..., ``mlp.shared_gate.weight`` [1, Hd].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specexport.exporter.config import RopeConfig
from specexport.exporter.layers import Capture
from specexport.runtime.contract import past_name

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
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys are a part without a position
    (``nope_dim``) and a rotated one (``rope_dim``, one for all keys); keys and values come from a latent.

    Attributes:
        query_rank: width of the queries' own latent, None where they are projected at once.
        rank: width of the latent of keys and values. interleaved: rope pairs neighbours (2i, 2i + 1).
        norm_eps: of the norms of both latents.
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Attributes:
        count, top: E, and how many of them a token takes. intermediate_size: of one expert.
        scores: ``sigmoid`` (DeepSeek-V3, with a correction that biases the choice, not the weights) or ``softmax``.
        groups, top_groups: only experts of the ``top_groups`` best of ``groups`` are taken (each group's score is the
            sum of its two best).
        normalise: weights of the taken ones sum to 1 before ``scale``.
        shared_size: of the expert that every token takes, 0 for none; ``shared_gate``: it has a sigmoid gate.
    """

    count: int
    top: int
    intermediate_size: int
    scores: Literal["sigmoid", "softmax"]
    groups: int
    top_groups: int
    normalise: bool
    scale: float
    shared_size: int
    shared_gate: bool


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Decoder layers of a recurrent head. The first may take a wider input (see :attr:`RecurrentRecord.fusion`).

    Attributes:
        first_input_norm: whether layer 0 has an input norm (EAGLE-1 has none; with ``concat`` fusion the two inputs'
            own norms stand in its place).
        norm_offset: added to norm weights (1.0 where the checkpoint stores w - 1).
        gated: ``q_proj`` gives each head's query and a gate; its sigmoid multiplies that head's output (Qwen3-Next).
        latent: multi-head latent attention; num_kv_heads and head_dim then say what the cache holds, one key of
            rank + rope_dim a token. experts: in place of the MLP of intermediate_size.
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
    gated: bool = False
    latent: Latent | None = None
    experts: Experts | None = None

    @property
    def value_dim(self) -> int:
        """Width of a cached value."""
        return self.head_dim if self.latent is None else self.latent.rank


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
        embedding_scale: factor on the embeddings. 1 in every dialect, for Gemma's heads too: trainers copy the table
            into a plain embedding, and vLLM shares the table below Gemma's factor (SpecForge, speculators, vLLM).
        prediction_layers: K. With K > 1 layer k drafts depth k from layer k - 1's output, and each has a cache of its
            own (DeepSeek-V3, arXiv 2412.19437); past K, and with K = 1, the last one is fed its own output.
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
    embedding_scale: float = 1.0
    prediction_layers: int = 1

    def cache_shapes(self, slots: int) -> dict[str, tuple[int, int, int, int]]:
        """Draft caches by input name: k then v of each layer, [1, Hkv, slots, D], and the outputs of all prediction
        layers but the last, [1, K - 1, slots, Hd], which the next layer is fed one position later."""
        blocks = self.blocks
        layers = blocks.num_layers * self.prediction_layers
        widths = {"k": blocks.head_dim, "v": blocks.value_dim}
        shapes = {
            past_name(kind, layer): (1, blocks.num_kv_heads, slots, widths[kind])
            for layer in range(layers)
            for kind in widths
        }
        if self.prediction_layers > 1:
            shapes[past_name("k", layers)] = (1, self.prediction_layers - 1, slots, blocks.hidden_size)
        return shapes


HeadRecord = MedusaRecord | RecurrentRecord
