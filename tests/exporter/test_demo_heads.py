"""The heads that come with the package."""

from __future__ import annotations

import json

import pytest

from specexport.exporter.config import read_config
from specexport.exporter.demo import HEADS
from specexport.exporter.heads.detect import open_head

#: SmolLM2-135M-Instruct.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_demo_heads_are_read_strictly_and_say_what_they_are_for(method: str) -> None:
    head = open_head(str(HEADS / method), target=read_config(CONFIG))
    assert head.record.method == method
    assert not head.warnings
    said = json.loads((HEADS / method / "config.json").read_text())["specexport_training"]
    assert said["target_fingerprint"].startswith("sha256:")
    assert said["captures"] == list(head.record.captures)


def test_demo_heads_are_small_and_have_a_card() -> None:
    assert sum(path.stat().st_size for path in HEADS.rglob("*") if path.is_file()) < 25 << 20
    assert "tau" in (HEADS / "README.md").read_text()
