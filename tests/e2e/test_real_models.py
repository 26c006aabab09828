"""Promises on real models: the same tokens with and without speculation, and Transformers' tokens when greedy.

SmolLM2 comes through the demo's own fetch and build. Gemma is used where SPECEXPORT_GEMMA3_GGUF names its GGUF file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specexport.exporter.demo import demo_bundle
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.verify import load_transformers
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.drafters import DRAFTERS
from specexport.runtime.engine import TargetEngine, find_engine

GEMMA_VARIABLE = "SPECEXPORT_GEMMA3_GGUF"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "nucleus": {"temperature": 0.8, "top_p": 0.9},
    "temperature 1": {"temperature": 1.0},
}
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text().splitlines()
]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def smollm2() -> Bundle:
    return demo_bundle(Progress(quiet=True))


@pytest.fixture(scope="module")
def smollm2_engine(smollm2: Bundle) -> TargetEngine:
    return find_engine(smollm2.manifest.engine)(smollm2.path)


def check_identity(
    bundle: Bundle, engine: TargetEngine, prompts: list[str], settings: dict[str, Any], count: int
) -> float:
    """Every drafter against plain decoding; returns the best tau, so that a test can see drafts were accepted."""
    best = 0.0
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=count, seed=seed, **settings)
        plain = Session(bundle, drafter="none", engine=engine).generate(prompt, params, chat=True)
        for name in DRAFTERS:
            result = Session(bundle, drafter=name, engine=engine).generate(prompt, params, chat=True)
            assert result.token_ids == plain.token_ids, f"{name}, seed {seed}: tokens differ from plain decoding"
            assert result.text == plain.text
            best = max(best, result.statistics.tau)
    return best


@pytest.mark.parametrize("settings", SETTINGS)
def test_speculation_changes_no_token(smollm2: Bundle, smollm2_engine: TargetEngine, settings: str) -> None:
    prompts = [PROMPTS[0], PROMPTS[13]]
    best = check_identity(smollm2, smollm2_engine, prompts, SETTINGS[settings], 32)
    assert best > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_speculation_changes_no_token_on_20_prompts(
    smollm2: Bundle, smollm2_engine: TargetEngine, settings: str
) -> None:
    assert check_identity(smollm2, smollm2_engine, PROMPTS, SETTINGS[settings], 128) > 1.5


def check_transformers(bundle: Bundle, gguf: Path, prompts: list[str], count: int) -> None:
    """Greedy tokens are Transformers': each is the argmax after the prompt and the tokens before it."""
    import torch

    model = load_transformers(gguf)
    session = Session(bundle)
    for prompt in prompts:
        tokens = session.encode(prompt, chat=bundle.chat_template is not None)
        output = session.generate(tokens, SamplingParams(max_tokens=count)).token_ids
        assert output
        with torch.no_grad():
            logits = model(torch.tensor([tokens + output]), use_cache=False).logits[0]
        assert logits[len(tokens) - 1 : -1].argmax(-1).tolist() == output


def test_smollm2_is_transformers(smollm2: Bundle, smollm2_gguf: Path) -> None:
    check_transformers(smollm2, smollm2_gguf, [PROMPTS[9], PROMPTS[15]], 32)


@pytest.mark.slow
def test_smollm2_is_transformers_on_20_prompts(smollm2: Bundle, smollm2_gguf: Path) -> None:
    check_transformers(smollm2, smollm2_gguf, PROMPTS, 64)


@pytest.mark.slow
def test_gemma3_is_transformers_on_20_prompts(tmp_path: Path) -> None:
    gguf = os.environ.get(GEMMA_VARIABLE)
    if not gguf:
        pytest.skip(f"set {GEMMA_VARIABLE} to the Gemma-3-270M GGUF file")
    bundle = build(BuildOptions(source=gguf, output=tmp_path / "gemma", window=2048), Progress(quiet=True)).bundle
    check_transformers(bundle, Path(gguf), PROMPTS, 64)
