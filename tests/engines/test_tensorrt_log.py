"""What is read from a build log: layers by profile, attention and caches that fell back."""

from __future__ import annotations

from pathlib import Path

import pytest

from specexport.engines.tensorrt_log import Fusion, check_fusion, first_error, read_layers


def tensor(name: str) -> str:
    return (
        f"{{ Name: {name}, Dimensions: [1,2], Strides: [2,1], StrideOrder: [1,0], Datatype: Half, Format: (Linear) x }}"
    )


def layer(name: str, kind: str, inputs: list[str], outputs: list[str], *nodes: str) -> str:
    """A line as tensorrt-rtx 1.7 prints it."""
    metadata = "".join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [ {', '.join(map(tensor, inputs))}], Constants: [ "
        f"{tensor('some_constant')}], Outputs: [ {', '.join(map(tensor, outputs))}], TacticName: t, StreamId: 0, "
        f"Metadata: {metadata}"
    )


def plugin(node: str, source: str, output: str, profile: str = "") -> str:
    """As it prints a plugin's."""
    tensors = [
        f"{{ Name: {name}{profile}, Location: Device, Dimensions: [1,2], Datatype: Half, Format: Format not available "
        "due to dynamic shapes }"
        for name in ("q", source, "a", output)
    ]
    return (
        f"Name: {node}{profile}, LayerType: PluginV3, Inputs: [ {', '.join(tensors[:2])}], Outputs: [ "
        f'{", ".join(tensors[2:])}], PluginType: TreeAttention, PluginVersion: "1", PluginMetadata: "[Metadata not '
        f'provided by plugin]", TacticValue: 0x0000000000000000, StreamId: 0, Metadata: [ONNX Layer: {node}]'
    )


def log(*layers: str) -> list[str]:
    return ["[INFO] before\n", "[VERBOSE] Layers:\n", *(f"{line}\n" for line in layers), "[INFO] after\n"]


def two_profiles(attend: str = "_gemm_mha_v2_myl3_7", past: str = "present_k.0 [profile 1]") -> Fusion:
    lines = log(
        layer("__myl_GathScat_myl1_2", "kgen", ["present_k.0", "order"], ["present_k.0"], "update.present_k.0"),
        layer("_gemv_mha_v1_myl1_5", "kgen", ["q", "present_k.0"], ["a"], "attention.0"),
        layer("__myl_GathScat_myl3_2", "kgen", [past], ["present_k.0 [profile 1]"], "update.present_k.0 [profile 1]"),
        layer("__myl_Resh_myl3_4", "kgen", ["present_k.0 [profile 1]"], ["k"], "attention.0"),
        layer(attend, "kgen", ["q [profile 1]", "k"], ["a [profile 1]"], "attention.0"),
    )
    return check_fusion(read_layers(lines), ["attention.0"], {"present_k.0": "past_k.0"}, profiles=2)


def test_all_is_fused() -> None:
    assert two_profiles() == Fusion(("attention.0",), ("present_k.0",), {})


def test_attention_that_fell_back_in_one_profile() -> None:
    fusion = two_profiles(attend="__myl_MaxSubExpSum_myl3_7")
    assert fusion.attention == () and fusion.caches == ("present_k.0",)
    assert fusion.reasons["attention.0"].startswith("1 of 2 profiles have its kernel; its layers are _gemv_mha_v1")


def test_a_cache_that_is_copied() -> None:
    fusion = two_profiles(past="past_k.0 [profile 1]")
    assert fusion.attention == ("attention.0",) and fusion.caches == ()
    assert "past_k.0 is read apart from present_k.0" in fusion.reasons["present_k.0"]


def test_kernels_of_one_profile_do_not_stand_for_another() -> None:
    lines = log(
        layer("_gemv_mha_v1_myl1_5", "kgen", ["tokens"], ["present_k.0"], "attention.0"),
        layer("_mha_reduce_myl1_6", "kgen", ["a"], ["b"], "attention.0"),
        layer("__myl_MaxSubExpSum_myl3_7", "kgen", ["tokens [profile 1]"], ["b"], "attention.0"),
    )
    fusion = check_fusion(read_layers(lines), ["attention.0"], {"present_k.0": "past_k.0"}, profiles=2)
    assert fusion.reasons["attention.0"].startswith("1 of 2 profiles have its kernel")
    assert fusion.reasons["present_k.0"] == "1 of 2 profiles write it"


def with_plugin(*others: str, output: str = "present_k.3") -> Fusion:
    lines = log(
        plugin("node_Attend_3", "past_k.3", output),
        *others,
        plugin("node_Attend_3", "past_k.3", output, " [profile 1]"),
    )
    return check_fusion(read_layers(lines), ["node_Attend_3"], {"present_k.3": "past_k.3"}, profiles=2)


def test_a_plugin_attends_and_updates_in_place() -> None:
    assert with_plugin() == Fusion(("node_Attend_3",), ("present_k.3",), {})


def test_a_copy_around_a_plugin_is_seen() -> None:
    """What reads the cache beside the plugin, and a plugin that writes to something else than the output."""
    copied = with_plugin(layer("Reformatting CopyNode", "NoOp", ["past_k.3"], ["copy"]))
    assert copied.attention == ("node_Attend_3",) and copied.caches == ()
    after = with_plugin(layer("copy", "NoOp", ["t"], ["present_k.3"]), output="t")
    assert "past_k.3 is read apart from present_k.3" in after.reasons["present_k.3"]


def test_a_log_without_a_list() -> None:
    fusion = check_fusion(read_layers(["[INFO] nothing\n"]), ["attention.0"], {"present_k.0": "past_k.0"}, profiles=1)
    assert fusion.reasons["attention.0"].endswith("its layers are not in the log")
    assert fusion.reasons["present_k.0"] == "no layer writes it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[INFO] a\n[ERROR] the reason\nmore\n[ERROR] another\n", "the reason"),
        ("[INFO] a\n[WARNING] b\n", "b"),
        ("", "no reason given"),
    ],
)
def test_the_first_error(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "log").write_text(text)
    assert first_error(tmp_path / "log") == expected
