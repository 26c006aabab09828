"""What other loaders take from a head's files, against what our writer puts there.

The tables were written from reading the loaders: vLLM 0.33.0 (``models/llama_eagle3.py``, ``llama_eagle.py``,
``transformers_utils/configs/eagle.py``) and 0.32.0, the last one with Medusa (``models/medusa.py``); SGLang 0.5.23
(``srt/models/llama_eagle3.py``, ``llama_eagle.py``); SafeAILab/EAGLE (``eagle/model/cnets.py``, ``cnets1.py``);
FasterDecoding/Medusa (``medusa/model/medusa_model.py``); text-generation-inference (``layers/medusa.py``). Most of them
leave what a file lacks as it was initialised, and say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from specexport.exporter import cli_train
from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.layers import Target
from specexport.exporter.onnx import build_module
from specexport.exporter.train import run
from specexport.exporter.train.heads import (
    LM_HEADS,
    Shape,
    lm_head,
    medusa_record,
    new_medusa,
    new_recurrent,
    recurrent_record,
    save_head,
    with_lm_head,
)
from specexport.exporter.train.target import usual_captures
from specexport.runtime.errors import CheckpointError
from tests.exporter.train.conftest import QUIET, Tiny
from tests.tiny import LLAMA, VOCAB, write_llama

H, V, VD, INNER, HEADS = LLAMA["hidden_size"], LLAMA["vocab_size"], 150, 80, 3
Q, KV = H, H // LLAMA["num_attention_heads"] * LLAMA["num_key_value_heads"]
CUT, WHOLE = torch.arange(0, 2 * VD, 2), torch.arange(V)
#: Blocks of a Medusa head: of the other layouts' loaders FasterDecoding's ties them all, and TGI's has only one.
LAYERS = {"medusa-legacy": 1, "medusa": 1, "vllm": 2}
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Loader:
    """What one loader asks of a head.

    Attributes:
        names: architectures it knows, after its own renaming; empty where it does not look.
        keys: config keys that it reads without a default. wanted: keys whose value must be the given one (None: absent
            or null) for it to build the head that was trained.
        tensors: what must be in the file. passed_over: what may be, and is taken or ignored without harm.
        lm_head: whether it takes the target's for a head of this config.
    """

    tensors: Shapes
    names: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    wanted: Mapping[str, Any] = field(default_factory=dict)
    passed_over: Shapes = field(default_factory=dict)
    renames: Callable[[str], str] = str
    lm_head: Callable[[Mapping[str, Any]], bool] = lambda config: False


def llama(layer: str, width: int) -> Shapes:
    """A decoder layer's own matrices; its attention reads ``width``."""
    return {
        f"{layer}.self_attn.q_proj.weight": (Q, width),
        f"{layer}.self_attn.k_proj.weight": (KV, width),
        f"{layer}.self_attn.v_proj.weight": (KV, width),
        f"{layer}.self_attn.o_proj.weight": (H, Q),
        f"{layer}.mlp.gate_proj.weight": (INNER, H),
        f"{layer}.mlp.up_proj.weight": (INNER, H),
        f"{layer}.mlp.down_proj.weight": (H, INNER),
        f"{layer}.post_attention_layernorm.weight": (H,),
    }


def medusa(layout: str, block: str, lm_heads: Shapes) -> Shapes:
    """Blocks of every head, and lm_heads."""
    shapes = dict(lm_heads)
    for head in range(HEADS):
        for layer in range(LAYERS[layout]):
            name = block.format(h=head, l=layer)
            shapes |= {f"{name}.weight": (H, H), f"{name}.bias": (H,)}
    return shapes


SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act"),
)
PLAIN = {"num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
#: ``bias`` is one of the attention in vLLM and SGLang.
SERVED = PLAIN | {"model_type": "llama", "rope_scaling": None, "bias": (None, False), "qkv_bias": None}
NORMS = {"norm_before_residual": None, "norm_before_fc": None, "fc_norm": None, "norm_output": None}
EAGLE3: Shapes = {
    **llama("midlayer", 2 * H),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "fc.weight": (H, 3 * H),
    "norm.weight": (H,),
    "lm_head.weight": (VD, H),
    "d2t": (VD,),
}
T2D: Shapes = {"t2d": (V,)}
EAGLE1: Shapes = {**llama("layers.0", H), "fc.weight": (H, 2 * H)}


def vllm_eagle(arch: str) -> str:
    return arch if arch.startswith("Eagle") else f"Eagle{arch}"


LOADERS: Mapping[tuple[str, str], Loader] = {
    ("eagle3", "vllm"): Loader(
        EAGLE3,
        names=frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}),
        keys=(*SIZES, "eagle_aux_hidden_state_layer_ids"),
        wanted=SERVED | NORMS | {"target_hidden_size": (None, H), "logit_scale": None},
        passed_over=T2D,
        lm_head=lambda config: config.get("draft_vocab_size") in (None, V),  # else it reads the target's first rows
    ),
    ("eagle3", "sglang"): Loader(
        EAGLE3,
        names=frozenset({"LlamaForCausalLMEagle3"}),
        keys=(*SIZES, "eagle_config"),
        wanted=SERVED | NORMS | {"target_hidden_size": (None, H), "use_aux_norm": None},
        passed_over=T2D,
        lm_head=lambda config: config.get("draft_vocab_size") is None,
    ),
    ("eagle3", "eagle"): Loader(
        EAGLE3 | T2D,
        keys=(*SIZES, "draft_vocab_size"),
        # With target_hidden_size it leaves the embedding to the file; its head_dim is the quotient.
        wanted={"target_hidden_size": None, "rope_scaling": None, "pretraining_tp": None, "head_dim": H // 4},
    ),
    ("eagle1", "vllm"): Loader(
        EAGLE1,
        names=frozenset({"EagleLlamaForCausalLM"}),
        keys=SIZES,
        wanted=SERVED | {"logit_scale": None, "add_para_norm": None},
        passed_over={"fc.bias": (H,)},
        renames=vllm_eagle,
    ),
    ("eagle1", "sglang"): Loader(
        EAGLE1 | {"fc.bias": (H,)},  # random where it is missing
        names=frozenset({"LlamaForCausalLMEagle"}),
        keys=SIZES,
        wanted=SERVED | {"hot_vocab_size": None},
    ),
    ("eagle1", "eagle"): Loader(
        EAGLE1,
        keys=SIZES,
        wanted={"bias": False, "rope_scaling": None, "head_dim": H // 4},
        passed_over={"fc.bias": (H,)},
    ),
    ("vllm", "vllm"): Loader(
        medusa("vllm", "blocks.{h}.layers.{l}", {"lm_head.weight": (V, H)}),
        names=frozenset({"MedusaModel"}),
        wanted={
            "model_type": "medusa",
            "hidden_size": H,
            "vocab_size": V,
            "num_heads": HEADS,
            "num_hidden_layers": LAYERS["vllm"],
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "truncated_vocab_size": None,
            "logit_scale": None,
        },
    ),
    ("medusa", "medusa"): Loader(
        medusa("medusa", "{h}.{l}.linear", {f"{head}.1.weight": (V, H) for head in range(HEADS)}),
        keys=("base_model_name_or_path",),
        wanted={"medusa_num_heads": HEADS, "medusa_num_layers": 1},
    ),
    ("medusa-legacy", "tgi"): Loader(
        medusa("medusa-legacy", "{h}.{l}.linear", {}),
        keys=("base_model_name_or_path",),
        wanted={"medusa_num_layers": 1},
    ),
}


def complaints(loader: Loader, folder: Path) -> list[str]:
    """What ``loader`` would miss, misread or refuse in a head's directory."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    stored = {name: tuple(t.shape) for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    found = []
    if loader.names and not loader.names & set(map(loader.renames, config.get("architectures", []))):
        found.append(f"architectures {config.get('architectures')}")
    found += [f"no {key}" for key in loader.keys if config.get(key) is None]
    for key, value in loader.wanted.items():
        if config.get(key) not in (value if isinstance(value, tuple) else (value,)):
            found.append(f"{key} is {config.get(key)}")
    for name, shape in loader.tensors.items():
        mapped = config.get("draft_vocab_size") in (None, V) and name in ("d2t", "t2d")
        if mapped or (name == "lm_head.weight" and name not in stored and loader.lm_head(config)):
            continue
        if config.get("draft_vocab_size") == V and name == "lm_head.weight":
            shape = (V, H)
        if stored.get(name) != shape:
            found.append(f"{name} is {stored.get(name)}")
    known = {**loader.tensors, **loader.passed_over}
    return found + [f"{name} is not known" for name in stored if name not in known]


@dataclass(frozen=True)
class Made:
    """A target of 8 layers on disk."""

    folder: Path
    config: TargetConfig
    target: Target

    def recurrent(
        self, method: str, output: Path, ids: torch.Tensor = CUT, *, share: bool = False, dtype: str = "fp16"
    ) -> RecurrentRecord:
        captures = usual_captures(self.config)[:-1]
        record = recurrent_record(method, self.config, captures, ids, Shape(INNER), share_lm_head=share)
        module = new_recurrent(record, self.target, 32, VOCAB)
        own = {key: value for key, value in module.named_parameters() if getattr(record, key, None) != "target"}
        save_head(output, record, own, {}, target_name="org/target", dtype=dtype)
        return record

    def medusa(self, output: Path, layout: str) -> None:
        record = medusa_record(self.config, Shape(heads=HEADS, layers=LAYERS[layout]))
        module = new_medusa(record, self.target, VOCAB)
        own = {key: value for key, value in module.named_parameters() if key != "lm_head"}
        record, tensors = with_lm_head(record, own, layout, module.lm_head)
        save_head(output, record, tensors, {}, target_name="org/target")

    def write(self, kind: str, output: Path) -> None:
        self.recurrent(kind, output) if kind.startswith("eagle") else self.medusa(output, kind)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = write_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    opened = open_checkpoint(str(folder))
    config = read_config(opened.config)
    return Made(folder, config, build_module(config, 32, torch.float32, opened.weights))


@pytest.mark.parametrize(("kind", "loader"), LOADERS)
def test_what_is_written_is_what_a_loader_takes(kind: str, loader: str, made: Made, tmp_path: Path) -> None:
    made.write(kind, tmp_path)
    assert complaints(LOADERS[kind, loader], tmp_path) == []
    head = open_head(str(tmp_path), target=made.config)
    assert not head.warnings
    assert head.record.lineage.verifier == "org/target"


@pytest.mark.parametrize("loader", ["vllm", "sglang", "eagle"])
def test_the_whole_vocabulary_needs_no_maps(loader: str, made: Made, tmp_path: Path) -> None:
    made.recurrent("eagle3", tmp_path, WHOLE)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert complaints(LOADERS["eagle3", loader], tmp_path) == []


def test_who_takes_a_head_without_its_lm_head(made: Made, tmp_path: Path) -> None:
    """All of the target's: the servers, which put in the target's own. Some of its rows: only we do; the servers that
    look at the architecture refuse it instead of drafting from other rows."""
    made.recurrent("eagle3", tmp_path / "whole", WHOLE, share=True)
    made.recurrent("eagle3", tmp_path / "cut", CUT, share=True)
    # SGLang reads the key without a default.
    assert "draft_vocab_size" in json.loads((tmp_path / "whole" / "config.json").read_text())
    found = {name: complaints(LOADERS["eagle3", name], tmp_path / "whole") for name in ("vllm", "sglang", "eagle")}
    assert found == {"vllm": [], "sglang": [], "eagle": ["no draft_vocab_size", "lm_head.weight is None"]}
    for loader in ("vllm", "sglang"):
        assert complaints(LOADERS["eagle3", loader], tmp_path / "cut") == [
            "architectures ['SpecexportEagle3']",
            "lm_head.weight is None",
        ]
    assert complaints(LOADERS["eagle3", "eagle"], tmp_path / "cut") == ["lm_head.weight is None"]
    for folder in ("whole", "cut"):
        assert open_head(str(tmp_path / folder), target=made.config).record.lm_head == "target"


def test_the_tables_notice_what_loaders_misread(made: Made, tmp_path: Path) -> None:
    made.recurrent("eagle3", tmp_path / "eagle3")
    path = tmp_path / "eagle3" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "target_hidden_size": H, "norm_output": True}))
    assert complaints(LOADERS["eagle3", "eagle"], path.parent) == [f"target_hidden_size is {H}"]
    assert complaints(LOADERS["eagle3", "vllm"], path.parent) == ["norm_output is True"]
    made.recurrent("eagle1", tmp_path / "eagle1")
    assert "fc.weight is (64, 128)" in complaints(LOADERS["eagle3", "vllm"], tmp_path / "eagle1")
    made.medusa(tmp_path / "legacy", "medusa-legacy")
    found = complaints(LOADERS["medusa", "medusa"], tmp_path / "legacy")
    assert found == [f"{head}.1.weight is None" for head in range(HEADS)]


def test_captures_in_both_conventions_and_maps_as_offsets(made: Made, tmp_path: Path) -> None:
    record = made.recurrent("eagle3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    boundaries = list(record.captures)
    assert boundaries == [2, 4, 5]
    assert config["eagle_aux_hidden_state_layer_ids"] == boundaries  # vLLM: entering the layer
    outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [layer + 1 for layer in outputs] == boundaries  # SGLang adds 1
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert config["draft_vocab_size"] == VD
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].dtype == torch.bool
    assert torch.equal(stored["d2t"] + torch.arange(VD), CUT)
    assert torch.equal(stored["t2d"].nonzero().flatten(), CUT)
    assert torch.equal(stored["lm_head.weight"], lm_head(made.target)[CUT].half())
    # Ours reads either convention alone, the two together, and neither where they are the usual ones.
    one, other = "eagle_config", "eagle_aux_hidden_state_layer_ids"
    for left_out in ((), (one,), (other,), (one, other)):
        kept = {key: value for key, value in config.items() if key not in ("specexport", *left_out)}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        assert open_head(str(tmp_path), target=made.config).record.captures == (2, 4, 5)


def test_a_bias_of_zeros_is_none(made: Made, tmp_path: Path) -> None:
    """EAGLE-1's fc has none, and SGLang's module always has one: zeros serve both, anything else contradicts."""
    made.recurrent("eagle1", tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    assert not stored["fc.bias"].any()
    record = open_head(str(tmp_path), target=made.config).record
    assert isinstance(record, RecurrentRecord)
    assert not record.fuse_bias
    for wrong in (torch.ones(H), torch.zeros(H - 1)):
        save_file({**stored, "fc.bias": wrong}, path)
        with pytest.raises(CheckpointError, match=r"tensor 'fc.bias' is in the file, but bias is false"):
            open_head(str(tmp_path), target=made.config)


@pytest.mark.parametrize("layout", [name for name, source in LM_HEADS.items() if source != "target"])
def test_medusa_brings_the_targets_lm_head_where_the_layout_has_one(layout: str, tiny: Tiny, tmp_path: Path) -> None:
    options = tiny.with_method("medusa", tmp_path / "heads", work=tmp_path / "work", layout=layout)
    options.work.mkdir()  # type: ignore[union-attr]
    (options.work / tiny.corpus.directory.name).symlink_to(tiny.corpus.directory)  # type: ignore[operator]
    run.train(replace(options, train=replace(options.train, visits=300)), QUIET)
    head = open_head(str(options.output))  # no target needed
    assert (head.record.dialect, head.record.lm_head) == (layout, LM_HEADS[layout])
    table = lm_head(tiny.opened.model(8).target).half()
    brought = [name for name in head.weights.names() if name.endswith("lm_head")]
    assert len(brought) == (1 if layout == "vllm" else 4)
    assert all(torch.equal(head.weights.read(name), table) for name in brought)


def test_the_command_passes_the_layout_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def train(options: run.RunOptions, _progress: object) -> dict[str, Any]:
        seen.append(options.layout)
        return {}

    monkeypatch.setattr(run, "train", train)
    assert tuple(LM_HEADS) == cli_train.MEDUSA_LAYOUTS
    for arguments in ([], ["--layout", "vllm"]):
        result = CliRunner().invoke(
            cli_train.train, ["medusa", "--target", "x", "-o", "y", "--json", *arguments], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
    assert seen == ["medusa-legacy", "vllm"]
