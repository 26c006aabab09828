"""Sessions beside plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specexport.engines.ort import OrtEngine
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.engine import Step

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "penalised": {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "top_k": 12},
}


def check_tokens(
    bundle: Bundle, engine: OrtEngine, drafter: str, prompts: Sequence[list[int]], most: int
) -> tuple[int, int]:
    """All :data:`PARAMS` and prompts with one engine and two sessions of it; returns how many branching trees were
    verified, and how many drafts accepted."""
    branching, accepted, run = 0, 0, engine.run

    def watched(step: Step) -> Any:
        nonlocal branching
        branching += int(not np.array_equal(step.tree, np.tri(len(step.tokens), dtype=bool)))
        return run(step)

    engine.run = watched  # type: ignore[method-assign]
    for values in PARAMS.values():
        params = SamplingParams(max_tokens=most, **values)
        plain = Session(bundle, drafter="none", engine=engine)
        speculative = Session(bundle, drafter=drafter, engine=engine)
        for prompt in prompts:
            wanted, found = plain.generate(prompt, params), speculative.generate(prompt, params)
            assert found.token_ids == wanted.token_ids
            accepted += sum(found.statistics.as_dict()["accepted_by_depth"])
    return branching, accepted
