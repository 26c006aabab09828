from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specexport.engines import ort
from specexport.exporter import plan
from specexport.exporter.cli import main
from specexport.exporter.config import read_config
from specexport.exporter.plan import config_size, sizes_here
from specexport.profiles.schema import load_profile, profile_names
from specexport.profiles.sizes import DraftSize
from specexport.runtime.acceptance_table import Acceptance, AcceptanceTable
from specexport.runtime.bundle import Bundle
from specexport.runtime.device_profile import write_acceptance
from specexport.runtime.records import plain
from tests.exporter.building import build
from tests.profiles.sizes import eagle_8b, llama_8b
from tests.profiles.test_cost import tuned_profile
from tests.tiny import LLAMA

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path / "config.json")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_config_alone_is_enough(capsys: pytest.CaptureFixture[str], config: str) -> None:
    assert config_size(read_config(LLAMA_8B), "bf16") == llama_8b()
    found = answer(capsys, "plan", config, "--profile", "h100-sxm", "--alpha", "0.6")
    folder = answer(capsys, "plan", str(Path(config).parent), "--profile", "h100-sxm", "--alpha", "0.6")
    assert found | {"source": ""} == folder | {"source": ""}
    assert found["model"]["weight_bytes"] == llama_8b().weight_bytes
    assert found["verdict"] == "use it" and found["estimates"][0]["speedup"] > 1.5
    assert {"suffix", "recycling"} == {each["drafter"] for each in found["estimates"]}
    assert found["memory"]["fits"] and found["memory"]["caches"] == 4096 * 131072
    assert any("not built yet" in note for note in found["assumptions"])


def test_the_table_has_what_the_json_has(capsys: pytest.CaptureFixture[str], config: str) -> None:
    code, out, _ = run(capsys, "plan", config, "--profile", "jetson-orin-nano")
    assert code == 0
    for word in (
        "verdict",
        "drafter",
        "chain K",
        "batch",
        "context",
        "largest window",
        "assumed: suffix accepts alpha",
    ):
        assert word in out


def test_profile_decides_what_fits(capsys: pytest.CaptureFixture[str], config: str) -> None:
    small = answer(capsys, "plan", config, "--profile", "jetson-orin-nano", "--precision", "bf16")
    assert not small["memory"]["fits"] and small["verdict"] == "leave it off"
    small = answer(capsys, "plan", config, "--profile", "jetson-orin-nano", "--window", "1024")  # int4, its default
    assert small["memory"]["fits"] and 1024 <= small["memory"]["largest_slots"] < 8192


def test_users_profile_by_path(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: rtx-50\ntitle: half of one\nbandwidth_gb_s: 896\n")
    slow, fast = (answer(capsys, "plan", config, "--profile", name) for name in (str(mine), "rtx-50"))
    assert slow["profile"] == "mine"
    assert slow["estimates"][0]["plain_s"] > 1.8 * fast["estimates"][0]["plain_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "rtx-90"], "no profile 'rtx-90'"),
        (["--alpha", "0.5", "--calibration", "CONFIG"], "exclude each other"),
        (["--calibration", "CONFIG"], "unknown key"),
        (["--alpha", "1.5"], "1.5"),
        (["--context", "999999"], "--context is 999999, expected 1 to 4096"),
        (["--window", "999999"], "--window is 999999"),
        (["--plot", "plan.pdf"], ".png or .svg"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], config: str, words: list[str], message: str) -> None:
    code, out, err = run(capsys, "plan", config, *(config if word == "CONFIG" else word for word in words))
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_no_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    code, _, err = run(capsys, "plan", str(tmp_path))
    assert code == 1 and "not valid JSON" in err


def test_calibration_replaces_what_is_assumed(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    table = AcceptanceTable(acceptance=((0.9,), (0.9,), (0.9,)), tried=(1000, 900, 810))
    file = tmp_path / "acceptance.json"
    file.write_text(json.dumps(plain(Acceptance(measured_on="20 prompts", drafters={"suffix": table}))))
    found = answer(capsys, "plan", config, "--profile", "rtx-50", "--calibration", str(file))
    suffix = next(each for each in found["estimates"] if each["drafter"] == "suffix")
    assert suffix["tau"] == pytest.approx(1 + 0.9 + 0.81 + 0.729) and "20 prompts" in suffix["source"]
    assert suffix["tau_low"] < suffix["tau"] < suffix["tau_high"]


def test_a_bundle_is_planned_with_what_it_knows(
    capsys: pytest.CaptureFixture[str], tiny_bundle: Bundle, tmp_path: Path
) -> None:
    bundle = Bundle.load(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    found = answer(capsys, "plan", str(bundle.path), "--profile", "cpu-x86")
    assert found["cost_source"] == "roofline of cpu-x86" and found["context"] == 64
    assert {each["drafter"] for each in found["estimates"]} == {"suffix", "ngram", "recycling"}
    table = AcceptanceTable(acceptance=((0.8,), (0.8,)), tried=(100, 80))
    write_acceptance(bundle, Acceptance(measured_on="4 prompts", drafters={"suffix": table}))
    found = answer(capsys, "plan", str(bundle.path), "--profile", "cpu-x86")
    assert next(each for each in found["estimates"] if each["drafter"] == "suffix")["source"] == "measured on 4 prompts"
    code, _, err = run(capsys, "plan", str(bundle.path), "--precision", "int4")
    assert code == 2 and "a bundle has its own" in err


def test_a_tuned_bundle_is_planned_by_its_measurements(
    capsys: pytest.CaptureFixture[str], tiny_bundle: Bundle, tmp_path: Path
) -> None:
    from specexport.runtime.device_profile import fingerprint, write_profile

    bundle = Bundle.load(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    profile = replace(tuned_profile(), fingerprint=fingerprint(bundle))
    write_profile(bundle, "here", profile)
    for words in ([], ["--profile", "here"]):  # the machine that it was measured on is this one, with one thread
        found = answer(capsys, "plan", str(bundle.path), "--alpha", "0.9", "--threads", "1", *words)
        assert found["cost_source"] == "measured on this machine"
        assert found["estimates"][0]["plain_s"] == pytest.approx(profile.cost.step_s(1, 64) + 0.002)
    write_profile(bundle, "here", replace(profile, fingerprint="sha256:0"))
    code, _, err = run(capsys, "plan", str(bundle.path), "--profile", "here")
    assert code == 2 and "run 'specexport tune' again" in err


def install(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """Our own kernels are on this machine, or are not."""
    library = Path("/opt/kernels.so") if installed else None
    for module in (plan, ort):
        monkeypatch.setattr(module, "kernels_library", lambda: library)


def recycling(found: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in found["estimates"] if each["drafter"] == "recycling")


def branches(estimate: dict[str, Any]) -> bool:
    return len({len(path) for path in estimate["tree"]}) < len(estimate["tree"])


def test_a_quantised_model_verifies_trees_where_the_kernels_are(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", config, "--profile", "cpu-x86", "--alpha", "0.5", "--precision", "int8")
    found = {}
    for installed in (True, False):
        install(monkeypatch, installed)
        found[installed] = answer(capsys, *words)
    fast, slow = (recycling(found[installed]) for installed in (True, False))
    assert branches(fast) and not branches(slow)
    assert fast["plain_s"] < 0.8 * slow["plain_s"] and fast["speedup"] > slow["speedup"]
    assert any("the CPU kernels run it" in note and "trees" in note for note in found[True]["assumptions"])
    assert any("not installed here" in note and "chains only" in note for note in found[False]["assumptions"])
    # In fp32 there is nothing for the kernels, and trees are verified either way.
    in_fp32 = []
    for installed in (True, False):
        install(monkeypatch, installed)
        in_fp32.append(answer(capsys, *words[:-1], "fp32"))
    assert in_fp32[0] == in_fp32[1] and not any("kernels" in note for note in in_fp32[0]["assumptions"])
    install(monkeypatch, True)
    on_gpu = answer(capsys, "plan", config, "--profile", "h100-sxm", "--precision", "int8")
    assert not any("kernels" in note for note in on_gpu["assumptions"])


@pytest.mark.parametrize(("precision", "of_heads"), [("fp32", "int8"), ("int4", "int4"), ("bf16", "bf16")])
def test_heads_that_are_not_built_are_reckoned_with_as_builds_have_them(
    config: str, monkeypatch: pytest.MonkeyPatch, precision: str, of_heads: str
) -> None:
    asked = []

    def head(source: str, config: object, precision: str) -> DraftSize:
        asked.append((source, precision))
        return replace(eagle_8b(5, 8), precision=precision)

    monkeypatch.setattr(plan, "_head_size", head)
    for installed in (True, False):
        install(monkeypatch, installed)
        _, drafts = plan._not_built(config, "heads", precision)
        assert [draft.kernels for draft in drafts] == [installed and of_heads != "bf16", False, False]
    assert asked == 2 * [("heads", of_heads)]


def test_caches_of_quantised_models_are_wide_on_the_cpu_alone(capsys: pytest.CaptureFixture[str], config: str) -> None:
    cpu, gpu = (
        answer(capsys, "plan", config, "--precision", "int8", "--profile", name) for name in ("cpu-x86", "h100-sxm")
    )
    assert (cpu["model"]["cache"], gpu["model"]["cache"]) == ("fp32", "fp16")
    assert cpu["memory"]["caches"] == 2 * gpu["memory"]["caches"]


def test_a_bundle_is_planned_on_the_kernels_that_it_has_graphs_for(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bundle"
    assert build(checkpoint, path, "--precision", "int8", "--no-check") == 0
    capsys.readouterr()
    words = ("plan", str(path), "--profile", "cpu-x86", "--alpha", "0.8")
    install(monkeypatch, True)
    size, _ = sizes_here(Bundle.load(path))
    assert size.kernels
    fast = answer(capsys, *words)
    assert any("the CPU kernels run it" in note for note in fast["assumptions"])
    install(monkeypatch, False)
    assert not sizes_here(Bundle.load(path))[0].kernels
    slow = answer(capsys, *words)
    assert any("not installed here" in note for note in slow["assumptions"])
    # Of a model this small a step is its launches; the kernels' are those of their part of the profile.
    rates = load_profile("cpu-x86").kernels
    assert rates is not None and recycling(fast)["plain_s"] >= (rates.call_us + 2 * rates.layer_us) * 1e-6
    assert recycling(fast)["plain_s"] != recycling(slow)["plain_s"]
    assert branches(recycling(fast)) and not branches(recycling(slow))
    # Of a build that is older than the kernels: no graph, so the rates and chains of the engine's own.
    install(monkeypatch, True)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["target.kernels.onnx"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "target.kernels.onnx").unlink()
    old = answer(capsys, *words)
    assert recycling(old)["plain_s"] == recycling(slow)["plain_s"] and not branches(recycling(old))
    assert any("it has no graph for them" in note for note in old["assumptions"])


def test_profiles_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(answer(capsys, "profiles", "list")["profiles"]) == set(profile_names())
    code, out, _ = run(capsys, "profiles", "list")
    assert code == 0 and "jetson-thor" in out
    shown = answer(capsys, "profiles", "show", "jetson-orin-agx")
    assert shown["name"] == "jetson-orin-agx" and shown["bandwidth_gb_s"] == 204.8
    assert shown["call_us"] == 50 and shown["efficiency"]["overlap"] == 1  # its own, and what it extends
    code, out, _ = run(capsys, "profiles", "show", "jetson-orin-agx")
    assert code == 0 and "204.8" in out and "Technical Brief" in out
    code, out, _ = run(capsys, "profiles", "show", "cpu-x86")
    assert code == 0 and "kernels.efficiency.compute_in  int8 0.72" in out and out.startswith("title")
    assert run(capsys, "profiles", "show", "nothing")[0] == 2


def test_tune_from_the_command_line(
    capsys: pytest.CaptureFixture[str], tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specexport.profiles import timing, tuner

    monkeypatch.setattr(timing, "MAX_ROUNDS", timing.MIN_ROUNDS)
    monkeypatch.setattr(tuner, "WIDTHS", (1, 2))
    path = str(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    found = answer(capsys, "tune", path, "--threads", "1", "--name", "here")
    assert found["path"].endswith("profiles/here.json") and found["profile"]["cost"]["widths"] == [1, 2]
    assert run(capsys, "tune", path, "--temperature", "1")[0] == 2
    code, out, _ = run(capsys, "tune", path, "--threads", "1", "--name", "here")
    assert code == 0 and "noise" in out and "written to" in out
    code, out, _ = run(capsys, "inspect", path)
    assert code == 0


def test_the_tiny_config_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert answer(capsys, "plan", str(tmp_path), "--profile", "cpu-arm64")["memory"]["largest_slots"] == 256
