from __future__ import annotations

from dataclasses import replace

import pytest

from specexport.profiles.cost import Roofline, Tuned
from specexport.profiles.schema import ProfileError, load_profile
from specexport.profiles.sizes import DraftSize, decoder_size, lookup_size
from specexport.runtime.cost_curve import CostCurve
from specexport.runtime.device_profile import DeviceProfile, DraftCost
from specexport.runtime.machine import this_machine
from tests.profiles.sizes import SIZES, eagle_8b, llama_8b, smollm2

#: Milliseconds of SmolLM2-135M in fp32 on the reference machine (2 cores of an AMD EPYC, onnxruntime 1.32, S = 4096),
#: by used rows and width, as measured.
WIDTHS = (1, 2, 4, 8, 16, 24)
MEASURED = {
    64: (20.3, 20.5, 22.4, 25.6, 34.9, 44.4),
    512: (21.6, 23.2, 23.6, 28.5, 39.5, 53.1),
    2048: (25.2, 26.2, 29.2, 37.0, 52.6, 77.5),
    4000: (32.0, 32.7, 37.2, 49.0, 71.9, 100.3),
}


def test_roofline_is_within_its_stated_error_of_a_measurement() -> None:
    roofline = Roofline(load_profile("cpu-x86"), smollm2())
    for used, row in MEASURED.items():
        for width, ms in zip(WIDTHS, row, strict=True):
            assert 1e3 * roofline.step_s(width, used) == pytest.approx(ms, rel=roofline.error)


def test_products_of_eight_bits_reach_less_of_their_rate() -> None:
    """SmolLM2-135M in int8 on the reference machine: 8.3, 14.6 and 23.5 ms for 1, 8 and 16 nodes, past 256."""
    roofline = Roofline(load_profile("cpu-x86"), smollm2("int8"))
    plain = roofline.step_s(1, 256)
    for width, ms in ((8, 14.6), (16, 23.5)):
        assert roofline.step_s(width, 256) / plain == pytest.approx(ms / 8.3, rel=roofline.error)
    profile = roofline.profile
    assert profile.reached("int4") == profile.reached("int8") == pytest.approx(0.3 * profile.rate("int8"))
    assert profile.reached("bf16") == pytest.approx(0.92 * profile.rate("fp32"))


#: The same of codes on our own kernels (2 cores of Zen 5, S = 4096 and 2048), by model, precision and used rows.
KERNEL_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
ON_KERNELS = {
    ("smollm2-135m", "int8"): {
        64: (3.7, 4.1, 4.7, 5.4, 6.8, 11.0, 19.6),
        512: (4.1, 4.8, 5.5, 6.6, 8.7, 14.3, 25.6),
        1900: (5.1, 6.5, 7.3, 9.2, 13.4, 23.6, 43.5),
    },
    ("smollm2-135m", "int4"): {
        64: (3.0, 3.2, 3.4, 4.1, 6.0, 10.1, 17.9),
        512: (3.4, 3.9, 4.0, 5.0, 7.6, 13.0, 23.5),
        1900: (4.5, 5.5, 5.6, 7.4, 12.2, 21.7, 40.7),
    },
    ("gemma-3-270m", "int4"): {
        64: (5.5, 6.1, 6.8, 8.0, 11.5, 18.8, 33.5),
        512: (6.1, 6.9, 8.2, 8.9, 12.8, 21.6, 38.8),
        1900: (6.2, 7.2, 8.7, 9.2, 13.4, 22.7, 41.7),
    },
    ("smollm2-360m", "int4"): {
        64: (6.5, 7.0, 8.0, 10.4, 15.3, 25.5, 45.8),
        512: (7.4, 8.1, 9.3, 12.5, 18.3, 31.0, 56.2),
        1900: (9.4, 10.9, 12.1, 16.7, 26.5, 47.0, 88.4),
    },
}


@pytest.mark.parametrize(("model", "precision"), ON_KERNELS)
def test_roofline_of_our_kernels_is_within_its_stated_error(model: str, precision: str) -> None:
    size = replace(SIZES[model](precision), kernels=True)
    roofline = Roofline(load_profile("cpu-x86"), size)
    for used, row in ON_KERNELS[model, precision].items():
        for width, ms in zip(KERNEL_WIDTHS, row, strict=True):
            assert 1e3 * roofline.step_s(width, used) == pytest.approx(ms, rel=roofline.error)


def test_a_head_on_our_kernels_drafts_faster() -> None:
    roofline = Roofline(load_profile("cpu-x86"), smollm2("int8"))
    head = replace(eagle_8b(3, 1), elements=8 << 20, weight_bytes=8 << 20, precision="int8", cache_row_bytes=0)
    own, engines = (roofline.draft_s(replace(head, kernels=kernels), 3, 256) for kernels in (True, False))
    assert own < 0.8 * engines
    # Whether the target runs on them is no matter of the drafter's.
    assert Roofline(roofline.profile, replace(roofline.size, kernels=True)).draft_s(head, 3, 256) == engines


def test_roofline_is_memory_at_one_node_and_arithmetic_at_many() -> None:
    """An 8B in bf16 on an H100: weights over bandwidth, then operations over rate, both by hand."""
    profile, size = load_profile("h100-sxm"), llama_8b()
    assert size.weight_bytes == pytest.approx(15.0e9, rel=0.01)  # 16.06 GB without the embedding
    assert size.stored_bytes == pytest.approx(16.06e9, rel=0.01)
    roofline = Roofline(profile, size)
    reading = 15.0e9 / (3350e9 * 0.8)
    assert roofline.step_s(1, 0) == pytest.approx(reading, rel=0.08)
    token = 15.0e9 / (989e12 * 0.72)
    assert roofline.step_s(2000, 0) - roofline.step_s(1000, 0) == pytest.approx(1000 * token, rel=0.15)


def test_roofline_rises_with_everything() -> None:
    for name in ("cpu-arm64", "jetson-orin-nano", "rtx-50"):
        roofline = Roofline(load_profile(name), smollm2("int4"))
        assert roofline.step_s(1, 64) < roofline.step_s(8, 64) < roofline.step_s(8, 2048)
        assert roofline.step_s(8, 2048) < roofline.step_s(8, 2048, batch=4)
        assert roofline.step_s(1, 64) < Roofline(roofline.profile, smollm2("fp32")).step_s(1, 64)


def test_more_threads_help_arithmetic_and_fewer_hurt_both() -> None:
    profile = load_profile("cpu-x86")
    two, one, four = (Roofline(profile, smollm2(), threads=count).step_s(32, 64) for count in (2, 1, 4))
    assert one == pytest.approx(2 * two, rel=0.05)
    assert 0.5 * two < four < two


def test_windows_bound_what_is_attended() -> None:
    values = dict(heads=4, kv_heads=2, head_dim=16, hidden_size=64, intermediate_size=96, vocab_size=320)
    full, sliding = (
        decoder_size(**values, windows=windows, tied=True, precision="fp32", cache="fp32", positions=1024)
        for windows in ([None, None], [128, None])
    )
    assert full.attended(100) == sliding.attended(100) == 200
    assert (full.attended(1000), sliding.attended(1000)) == (2000, 1128)


def test_a_drafter_costs_what_it_reads_each_step() -> None:
    roofline = Roofline(load_profile("h100-sxm"), llama_8b())
    one, three = (roofline.draft_s(eagle_8b(3, 1), depth, 300) for depth in (1, 3))
    assert three == pytest.approx(3 * one, rel=0.03)
    assert roofline.draft_s(lookup_size("suffix"), 5, 300) == 0.0


def test_a_rate_that_is_missing_is_named() -> None:
    with pytest.raises(ProfileError, match="no rate for fp8"):
        Roofline(load_profile("rtx-30"), smollm2("fp8")).step_s(1, 0)


def tuned_profile() -> DeviceProfile:
    """Costs as round numbers: a call takes 10 ms, each further node 1 ms, each 100 rows 1 ms; the host 2 ms."""
    widths, used = (1, 2, 4, 8), (0, 100, 200)
    return DeviceProfile(
        fingerprint="x",
        machine=this_machine("onnxruntime-cpu", 1),
        cost=CostCurve(
            widths=widths,
            used=used,
            seconds=tuple(tuple(0.010 + 1e-3 * (width - 1) + 1e-5 * rows for width in widths) for rows in used),
            noise=0.02,
        ),
        host_s=0.002,
        drafts={"eagle3": DraftCost(seconds=0.004), "model": DraftCost(seconds=0.010, depth=5)},
        measured_on=None,
        acceptance={},
        trees={},
        drafter=None,
        width=1,
    )


def test_tuned_costs_are_the_measured_ones() -> None:
    tuned = Tuned(tuned_profile())
    assert tuned.step_s(3, 150) == pytest.approx(0.010 + 0.002 + 0.0015 + 0.002)
    assert tuned.step_s(2, 100, batch=3) == pytest.approx(0.010 + 0.005 + 0.001 + 2 * 0.001 + 0.002)
    head, model = (DraftSize(name=name, kind=name, steps=1, depth=5, ranks=1) for name in ("eagle3", "model"))
    assert tuned.draft_s(head, 1, 0) == tuned.draft_s(head, 5, 0) == 0.004
    assert tuned.draft_s(model, 2, 0) == pytest.approx(0.004)
    assert tuned.draft_s(lookup_size("suffix"), 2, 0) == 0.0
