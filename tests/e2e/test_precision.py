"""Quantised real models: speculative decoding has plain decoding's tokens at the same precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.runtime import SamplingParams, Session
from tests.e2e.test_real_models import PROMPTS

COUNT, NEW_TOKENS = 50, 128


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_speculative_tokens_are_plain_ones(precision: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    options = BuildOptions(
        source=str(smollm2_gguf), output=tmp_path / "bundle", window=1024, precision=PrecisionOptions(precision)
    )
    bundle = build(options, Progress(quiet=True)).bundle
    prompts = [f"{PROMPTS[index % len(PROMPTS)]} {index}" for index in range(COUNT)]
    params = SamplingParams(max_tokens=NEW_TOKENS)
    sessions = {name: Session(bundle, drafter=name) for name in ("none", "suffix")}
    drafted = 0
    for prompt in prompts:
        results = {name: session.generate(prompt, params) for name, session in sessions.items()}
        assert results["suffix"].token_ids == results["none"].token_ids, prompt
        drafted += results["suffix"].statistics.drafted_nodes
    assert drafted > COUNT, "nothing was drafted: the comparison says nothing"
