"""Fixtures that several folders share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specexport.exporter import demo
from specexport.exporter.progress import Progress
from specexport.runtime.bundle import Bundle

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python *arguments`` in a new process that imports the source tree, whatever is installed."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(REPOSITORY / ".dev")} | environment
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def manifest_dict() -> dict[str, Any]:
    """A valid manifest as JSON data, with no files."""
    return {
        "schema": 1,
        "contract": 1,
        "tools": {"specexport": "0.1.0"},
        "command": ["specexport", "build", "model", "-o", "bundle"],
        "target": {
            "architecture": "llama",
            "layers": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "hidden_size": 16,
            "vocab_size": 32,
            "valid_vocab": 30,
            "slots": 64,
            "precision": {
                "weights": "fp32",
                "lm_head": "fp32",
                "embedding": "fp32",
                "block": 0,
                "activations": "fp32",
                "exact": True,
            },
            "prefill_chunk": 16,
            "features_size": 0,
            "windows": [None, 8],
        },
        "engine": "onnxruntime-cpu",
        "drafters": [
            {
                "name": "suffix",
                "kind": "suffix",
                "options": {"memory": 4096, "strict": True},
                "graph": None,
                "tree": None,
                "agreement": [],
            }
        ],
        "drafter": "suffix",
        "stop_ids": [2],
        "lineage": {"source": "model", "revision": None, "fingerprint": "00ff", "heads": {}},
        "files": {},
    }


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, found or fetched by the same function as the demo."""
    return demo.fetch_smollm2(Progress(quiet=True))


@pytest.fixture(scope="session")
def smollm2_bundle() -> Bundle:
    """The demo's fp32 bundle of that model: from the cache, or built (half a minute)."""
    return demo.demo_bundle(Progress(quiet=True))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded Hugging Face directory of a random two-layer Llama (``tests.tiny.LLAMA``). Not to be changed."""
    from tests.tiny import write_llama

    return write_llama(tmp_path_factory.mktemp("tiny") / "checkpoint", shards=2)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path) -> Bundle:
    """That checkpoint, built at S = 128 (a few seconds, once). Not to be changed: copy it to damage it."""
    from specexport.exporter.pipeline import BuildOptions, build

    options = BuildOptions(source=str(tiny_checkpoint), output=tiny_checkpoint.parent / "bundle", window=128)
    return build(options, Progress(quiet=True)).bundle
