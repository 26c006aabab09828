"""Sessions whose drafter grows its trees in our one operator give plain decoding's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir
import pytest

from specexport.engines.ort import OrtEngine, kernels_file
from specexport.exporter import cli
from specexport.runtime import Bundle
from specexport.runtime.engine import tree_exact
from tests.e2e.test_heads import write_words
from tests.engines.kernels.one_node import needs_kernels
from tests.engines.kernels.tokens import check_tokens
from tests.exporter.heads import writers
from tests.exporter.heads.writers import DIALECTS, TARGET_CONFIG, Random, every, llama_tensors
from tests.tiny import write_checkpoint

pytestmark = needs_kernels

WINDOW, CHUNK, DEPTH, NODES = 64, 8, 4, 12
#: Two heads of 8 values, the least width that is lowered, and gates of whole panels.
CONFIG = TARGET_CONFIG | {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
#: With tables of the target's and of their own, side by side and projected, mapped vocabularies and whole.
HEADS = {"eagle3": "eagle3", "eagle1": "eagle1_llama3", "mtp": "mtp_deepseek"}
assert [*every()]  # registers the dialects


@pytest.fixture(scope="module", params=["int8", "int4"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("grown")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "INNER", 32)
        target = write_checkpoint(folder / "target", CONFIG, llama_tensors(Random(1)))
        write_words(target)
        words = ["--draft-depth", str(DEPTH), "--draft-topk", "4", "--draft-nodes", str(NODES)]
        for name, dialect in HEADS.items():
            tiny = DIALECTS[dialect]()
            # Weights of size 1 would make every draft certain, and trees chains.
            small = {key: x * x.shape[-1] ** -0.5 if x.ndim == 2 else x for key, x in tiny.tensors.items()}
            words += ["--heads", f"{name}={replace(tiny, tensors=small).write(folder / name)}"]
        words += ["--precision", request.param, "--window", str(WINDOW), "--prefill-chunk", str(CHUNK), "--no-check"]
        assert cli.main(["build", str(target), "-o", str(folder / "bundle"), *words]) == 0
    yield Bundle.load(folder / "bundle", check="full")


def test_every_head_is_one_node(bundle: Bundle) -> None:
    graphs = {str(info.name): str(info.graph) for info in bundle.manifest.drafters if info.graph}
    assert graphs.keys() >= HEADS.keys()
    for name in HEADS:
        model = ir.load(bundle.path / kernels_file(graphs[name]))
        assert sum(node.op_type == "GrowTree" for node in model.graph) == 1


@pytest.mark.parametrize("drafter", HEADS)
def test_drafts_change_no_token(drafter: str, bundle: Bundle) -> None:
    """Greedy, sampled, penalised, to the end of the context, with one engine and two sessions of it."""
    engine = OrtEngine(bundle.path, threads=2)
    assert tree_exact(engine)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [3, 1, 4, 1, 5, 8, 8], [2] * (WINDOW - 10)]
    branching, accepted = check_tokens(bundle, engine, drafter, prompts, WINDOW)
    assert branching > 10 and accepted > 0
