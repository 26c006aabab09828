"""Where speculation stops paying, as published, and what the planner's arithmetic says of the same cases.

    python scripts/known_boundaries.py

Reported: speculation on an 8B model falls from 1.73x at batch 1 to 1.21x at batch 128, and a tree of 21 nodes is slower
than plain decoding at batch 64. Neither report says all that a plan needs, so these are stand-ins, and stated:

* Llama-3.1-8B, chains of 3 EAGLE drafts, one H100. How often they are right is counted from the public data of
  SpecDecode-Bench (arXiv 2601.11580; github.com/SpecDecode-Bench/simulator), not set so that the figures agree.
* ``published costs``: the straight lines that its predictor.py fits to vLLM's calls.
* ``roofline``: the profile ``h100-sxm`` and the models' dimensions. The profile's shares of bandwidth and arithmetic
  were read off the same lines; nothing else was.
"""

from __future__ import annotations

from specexport.profiles.acceptance import constant
from specexport.profiles.cost import CostModel, LinearCost, Roofline
from specexport.profiles.schema import load_profile
from specexport.profiles.sizes import DraftSize, ModelSize, decoder_size
from specexport.profiles.tree_search import best_tree, chain_speedup, expected_tokens

PUBLISHED = LinearCost(
    fixed_s=5.88590713e-3,
    token_s=2.10103129e-5,
    cached_s=3.92645679e-8,
    draft_fixed_s=2.13526175e-3,
    draft_token_s=8.41429603e-7,
    host_s=1.20683946e-3,
    source="SpecDecode-Bench",
)
#: Chance that the first, the first two, all three drafts are right (ShareGPT).
ACCEPTED = (0.666, 0.425, 0.288)
#: Prompt and half an answer, in tokens.
USED = 300
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def llama_8b(precision: str = "bf16") -> ModelSize:
    """Llama-3.1-8B."""
    return decoder_size(
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
        windows=[None] * 32,
        tied=False,
        precision=precision,
        cache="bf16",
        positions=131072,
    )


def eagle_8b(depth: int, ranks: int) -> DraftSize:
    """EAGLE's head for it: one layer, a projection of two states, and the target's output projection."""
    hidden, inner, vocab = 4096, 14336, 128256
    own = 2 * hidden * hidden + 2 * hidden * (hidden + 1024) + 3 * hidden * inner
    return DraftSize(
        name="eagle1",
        kind="eagle1",
        steps=depth,
        depth=depth,
        ranks=ranks,
        elements=own + vocab * hidden,
        weight_bytes=2 * (own + vocab * hidden),
        stored_bytes=2 * own,
        cache_row_bytes=2 * 2 * 1024,
        layers=1,
        precision="bf16",
    )


def costs() -> dict[str, CostModel]:
    """By name: the published lines, and our roofline."""
    return {"published costs": PUBLISHED, "roofline": Roofline(load_profile("h100-sxm"), llama_8b())}


def speedup(cost: CostModel, tau: float, nodes: int, depth: int, batch: int) -> float:
    """Of a shape that gives ``tau`` tokens a step, for ``batch`` sequences."""
    plain = cost.step_s(1, USED, batch)
    return tau * plain / (cost.step_s(nodes, USED, batch) + cost.draft_s(eagle_8b(depth, 1), depth, USED, batch))


def tree_21() -> tuple[float, int]:
    """tau and depth of the best tree of 21 nodes at alpha 0.67 (siblings by the planner's usual share)."""
    rows = constant(ACCEPTED[0], 5, 4)
    paths = best_tree(rows, 20, 5)
    return expected_tokens(paths, rows), max(map(len, paths))


def main() -> None:
    print(f"{'':34}" + "".join(f"{f'batch {batch}':>10}" for batch in BATCHES))
    print(f"{'reported':34}{'1.73':>10}{'':60}{'1.21':>10}")
    shapes = {"chain of 3": (1 + sum(ACCEPTED), 4, 3), "21 nodes": (tree_21()[0], 21, tree_21()[1])}
    for shape, (tau, nodes, depth) in shapes.items():
        for name, cost in costs().items():
            row = "".join(f"{speedup(cost, tau, nodes, depth, batch):10.2f}" for batch in BATCHES)
            print(f"{f'{shape}, tau {tau:.2f}, {name}':34}{row}")
    print("\nformula, alpha 0.8, c 0.05:", *(f"K={k} {chain_speedup(0.8, k, 0.05):.2f}" for k in range(1, 11)))


if __name__ == "__main__":
    main()
