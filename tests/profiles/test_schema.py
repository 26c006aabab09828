from __future__ import annotations

from pathlib import Path

import pytest

from specexport.profiles.schema import MAX_BYTES, ProfileError, load_profile, profile_names

DEVICES = {
    *("cpu-x86", "cpu-arm64", "dgx-spark", "h100-sxm", "rtx-30", "rtx-40", "rtx-50"),
    *("jetson-orin-nano", "jetson-orin-nx", "jetson-orin-agx", "jetson-thor"),
}


def test_every_promised_device_has_a_profile() -> None:
    assert set(profile_names()) == DEVICES


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_profile_is_plausible(name: str) -> None:
    """Figures that a slip of a power of ten would break."""
    profile = load_profile(name)
    assert profile.name == name
    assert 4 <= profile.memory_gib <= 256 and 10 <= profile.bandwidth_gb_s <= 10_000
    # From 4 to 1500 operations a byte: no device is outside.
    assert 4 < profile.rate(profile.precision) / (profile.bandwidth_gb_s * 1e9) < 4000
    assert profile.arithmetic_tops["fp32"] == min(profile.arithmetic_tops.values())
    assert (profile.compute_capability is None) == profile.backend.endswith("cpu")
    assert any(source.startswith(("NVIDIA", "AMD", "Arm", "Raspberry", "Hot Chips")) for source in profile.sources)


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_extends_merges_mappings_and_replaces_the_rest(tmp_path: Path) -> None:
    base = load_profile("jetson-orin-nano")
    write(tmp_path, "extends: jetson-orin-nano\nwindows: [512]\nefficiency: {compute: 0.5}\n", "base.yaml")
    profile = load_profile(write(tmp_path, "extends: base.yaml\ntitle: Mine\n"))
    assert (profile.name, profile.title, profile.windows) == ("mine", "Mine", (512,))
    assert profile.efficiency.compute == 0.5
    assert profile.efficiency.bandwidth == base.efficiency.bandwidth
    assert profile.sources == base.sources


BAD = {
    "unknown key": ("extends: rtx-50\ncolour: red\n", "unknown key 'colour'"),
    "unknown nested key": ("extends: rtx-50\nefficiency: {speed: 1}\n", "efficiency.'speed'"),
    "missing key": ("title: x\n", "missing key"),
    "wrong type": ("extends: rtx-50\nbandwidth_gb_s: fast\n", "bandwidth_gb_s is 'fast'"),
    "boolean": ("extends: rtx-50\nmemory_gib: true\n", "memory_gib is True"),
    "huge": ("extends: rtx-50\nmemory_gib: 1e30\n", "memory_gib"),
    "not a number": ("extends: rtx-50\nmemory_gib: .nan\n", "memory_gib is nan"),
    "windows fall": ("extends: rtx-50\nwindows: [4096, 1024]\n", "ascending"),
    "widths without 1": ("extends: rtx-50\nwidths: [2, 4]\n", "from 1 on"),
    "no sources": ("extends: rtx-50\nsources: []\n", "public source"),
    "no rate for the default": ("extends: rtx-30\nprecision: nvfp4\n", "the rate of nvfp4"),
    "kernels without a rate": ("extends: cpu-x86\nkernels: {computes_in: {int4: fp8}}\n", "kernels.arithmetic_tops"),
    "kernels of a name": ("extends: cpu-x86\nkernels: {title: x}\n", "unknown key kernels.'title'"),
    "unknown parent": ("extends: rtx-90\n", "no profile 'rtx-90'"),
    "parent of another type": ("extends: [rtx-50]\n", "extends is"),
    "itself": ("extends: mine.yaml\n", "extends itself"),
    "not a mapping": ("- 1\n", "keys and values"),
    "not YAML": ("a: [\n", "not valid YAML"),
    "twice": ("extends: rtx-50\ntitle: a\ntitle: b\n", "'title' occurs twice"),
    "references": ("a: &a [1]\nb: *a\n", "references"),
    "a python object": ("extends: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    "deep": ("a: " + "[" * 40 + "]" * 40 + "\n", "nested more than"),
    "large": ("#" + "x" * MAX_BYTES, f"more than {MAX_BYTES} bytes"),
    "a name": ("extends: rtx-50\nname: other\n", "called what its file is called"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_profile_is_refused(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    with pytest.raises(ProfileError) as caught:
        load_profile(write(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_our_kernels_have_rates_on_cpus_alone(name: str) -> None:
    """They multiply with codes faster than the engine's own, and nowhere faster than the device can."""
    profile = load_profile(name)
    assert profile.rates(False) is profile
    if not name.startswith("cpu"):
        assert profile.kernels is None and profile.rates(True) is profile
        return
    rates = profile.rates(True)
    for weights in ("int8", "int4"):
        assert profile.reached(weights) <= rates.reached(weights) < rates.rate(weights)
    assert rates.reached("int4") < rates.reached("int8")


@pytest.mark.parametrize("name", ["rtx-90", "../rtx-50", "", "RTX-50"])
def test_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ProfileError, match="jetson-thor"):
        load_profile(name)


def test_missing_file() -> None:
    with pytest.raises(ProfileError, match="No such file"):
        load_profile("nowhere/mine.yaml")
