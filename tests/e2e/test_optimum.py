"""An independent peer: the same checkpoints exported by Optimum (optimum-onnx), run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from specexport.engines.ort import OrtEngine
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.runtime.drafters import DRAFTERS
from specexport.runtime.engine import Step
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session
from tests.tiny import VOCAB, write_llama

QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
NEW_TOKENS = 32


def write_qwen2(directory: Path) -> Path:
    """The test Llama with Qwen2's biases."""
    import torch
    from safetensors.torch import load_file, save_file

    write_llama(directory, **QWEN2)
    tensors = load_file(directory / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            generator = torch.Generator().manual_seed(len(name))
            bias = torch.randn(len(tensors[name]), generator=generator)
            tensors[name.replace("weight", "bias")] = bias * 0.3
    save_file(tensors, directory / "model.safetensors")
    return directory


class Peer:
    """Optimum's export without a cache, one call for a whole sequence."""

    def __init__(self, checkpoint: Path, output: Path) -> None:
        from optimum.exporters.onnx import main_export

        main_export(str(checkpoint), output, task="text-generation", do_validation=False, local_files_only=True)
        self._session = onnxruntime.InferenceSession(str(output / "model.onnx"), providers=["CPUExecutionProvider"])

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """[len, V]"""
        count = len(tokens)
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count)[None],
        }
        names = {value.name for value in self._session.get_inputs()}
        result: NDArray[np.float32] = self._session.run(["logits"], {n: a for n, a in feeds.items() if n in names})[0]
        return result[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Optimum exports by the older path, and says so at length
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_our_graph_equals_optimums(kind: str, tmp_path: Path) -> None:
    source = (write_llama if kind == "llama" else write_qwen2)(tmp_path / "checkpoint")
    peer = Peer(source, tmp_path / "optimum")
    bundle = build(BuildOptions(source=str(source), output=tmp_path / "bundle", window=96), Progress(quiet=True)).bundle
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40)
    expected = peer.logits(tokens)
    for lowered in (True, False):
        engine = OrtEngine(bundle.path, threads=1, lowered=lowered)
        logits = engine.run(Step.chain(tokens))
        assert np.abs(logits - expected).max() < 1e-4
    sequence = [int(token) for token in tokens[:6]]
    for _ in range(NEW_TOKENS):  # the peer knows nothing of padding rows
        sequence.append(int(peer.logits(np.array(sequence))[-1, :VOCAB].argmax()))
    for drafter in ("none", *DRAFTERS):
        session = Session(bundle, drafter=drafter, threads=1)
        assert session.generate(sequence[:6], SamplingParams(max_tokens=NEW_TOKENS)).token_ids == sequence[6:], drafter
