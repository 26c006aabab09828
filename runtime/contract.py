"""Names, shapes and dtypes of the target graph. Standard library only; the one place that has these names.

Inputs (T nodes a call, A committed rows, R rows of logits, S cache slots, D head width, all int64 unless said):

========== ============== ====================================================================================
name       shape          meaning
========== ============== ====================================================================================
tokens     [1, T]         the nodes, parents before children; a prompt chunk is a chain
positions  [1, T]         absolute position of each node
tree       bool [1, T, T] ``tree[0, i, j]``: node j is node i or an ancestor of node i
past       [1]            committed cache rows after this call's commit
write      [1]            cache row where this call's block starts: rows that were committed, in place, before it
commit     [A]            cache rows accepted by the last call that are not in place yet, in path order, padded
order      [A + T]        picks the block from [committed rows, new rows]: accepted first, then the T nodes, then pads
select     [R]            nodes that need logits (1 for prefill, T for verify)
past_k.l   [1, Hkv, S, D] cache of layer l, bound to the same memory as present_k.l (likewise past_v.l)
========== ============== ====================================================================================

Outputs: ``logits`` float32 [R, V]; ``features`` [1, T, F] where a drafter needs them; ``present_k.l``, ``present_v.l``.

Block layout: the call writes rows ``write .. write + A + T``. The first ``past - write`` of them are the accepted rows
that had to move, the next T are the new nodes, the rest are pads that later calls overwrite. So
``write + A + T <= S`` must hold. A may be 0 on engines with symbolic shapes: accepted rows that already lie where they
belong (a prefix of the last block) need no move. Caches start at zero (a NaN in an unwritten row would poison a
masked sum).
"""

from __future__ import annotations

CONTRACT_VERSION = 1
OPSET = 24

TOKENS = "tokens"
POSITIONS = "positions"
TREE = "tree"
PAST = "past"
WRITE = "write"
COMMIT = "commit"
ORDER = "order"
SELECT = "select"
LOGITS = "logits"
FEATURES = "features"
#: Outputs that a lowering for devices adds (``exporter.passes.summary``): float32 and int64 [R, k], the best k of each
#: row of logits without its padding.
TOP_VALUES, TOP_TOKENS = "top_values", "top_tokens"
#: Input of drafter graphs besides the target's names: what is added to the logits of each depth.
NOISE = "noise"
#: Outputs of drafter graphs.
DRAFT_TOKENS = "draft_tokens"
DRAFT_PARENTS = "draft_parents"
DRAFT_LOGPROBS = "draft_logprobs"

#: Inputs other than the caches, in graph order.
STEP_INPUTS = (TOKENS, POSITIONS, TREE, PAST, WRITE, COMMIT, ORDER, SELECT)
#: Symbolic dimensions as they are spelled in the ONNX file.
NODES_DIM, COMMIT_DIM, ORDER_DIM, SELECT_DIM = "T", "A", "O", "R"


def past_name(kind: str, layer: int) -> str:
    """Name of the input cache of one layer; ``kind`` is ``"k"`` or ``"v"``."""
    return f"past_{kind}.{layer}"


def present_name(kind: str, layer: int) -> str:
    """Name of the output cache of one layer; ``kind`` is ``"k"`` or ``"v"``."""
    return f"present_{kind}.{layer}"


def cache_names(layers: int) -> list[tuple[str, str]]:
    """``(past, present)`` pairs in graph order: k then v of each layer."""
    return [(past_name(kind, layer), present_name(kind, layer)) for layer in range(layers) for kind in ("k", "v")]
