from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specexport.profiles import acceptance, plot
from specexport.profiles.acceptance import ASSUMED_ALPHA, assumed, constant, given, measured
from specexport.profiles.cost import LinearCost, Roofline
from specexport.profiles.memory import plan_memory
from specexport.profiles.planner import Candidate, Plan, Workload, break_even, make_plan
from specexport.profiles.schema import load_profile
from specexport.profiles.sizes import DraftSize, lookup_size
from specexport.profiles.tree_search import chain_speedup
from specexport.runtime.acceptance_table import AcceptanceTable
from specexport.runtime.errors import UsageError
from tests.profiles.sizes import eagle_8b, llama_8b, smollm2

MODEL = DraftSize(name="model", kind="model", steps=8, depth=8, ranks=1, elements=1, weight_bytes=1)
WIDTHS = tuple(range(1, 10))


def flat(c: float) -> LinearCost:
    """The published formula's machine: a call of any width costs 1, a draft c."""
    return LinearCost(
        fixed_s=1.0, token_s=0.0, cached_s=0.0, draft_fixed_s=0.0, draft_token_s=c, host_s=0.0, source="flat", error=0.0
    )


def plan(cost: LinearCost | Roofline, candidates: list[Candidate], batch: int = 1, used: int = 512) -> Plan:
    profile = load_profile("h100-sxm")
    memory = plan_memory(profile, llama_8b(), [candidate.draft for candidate in candidates], 4096)
    return make_plan(cost, candidates, Workload(batch, used), memory, widths=WIDTHS, contexts=[1024, 4096])


@pytest.mark.parametrize(("alpha", "c"), [(0.8, 0.05), (0.6, 0.2), (0.5, 0.01)])
def test_plan_of_a_chain_is_the_published_formula(alpha: float, c: float) -> None:
    best = plan(flat(c), [Candidate(MODEL, given(alpha, MODEL))]).best
    assert best is not None
    values = {depth: chain_speedup(alpha, depth, c) for depth in range(1, 9)}
    assert best.speedup == pytest.approx(max(values.values()))
    assert best.low == best.high == pytest.approx(best.speedup)  # alpha is given and the costs are exact
    assert (best.best_k, best.cost) == (max(values, key=lambda depth: values[depth]), pytest.approx(c))
    assert best.shape.chain and best.shape.depth == best.best_k


def test_chain_sweep_is_the_k_sweep() -> None:
    found = plan(flat(0.1), [Candidate(MODEL, given(0.7, MODEL))])
    assert found.chains == pytest.approx([chain_speedup(0.7, depth, 0.1) for depth in range(1, 9)])


def test_break_even_alpha_is_where_the_first_draft_pays_for_itself() -> None:
    """1 + a = 1 + c for one draft, and longer chains need more."""
    assert break_even(lambda _: 1.0, lambda depth: 0.3 * depth, 8) == pytest.approx(0.3, abs=0.001)
    assert break_even(lambda nodes: float(nodes), lambda depth: 0.1, 8) is None
    assert break_even(lambda _: 1.0, lambda _: 0.0, 8) == pytest.approx(0.0, abs=0.001)


def test_verdict_follows_the_interval() -> None:
    sure = plan(flat(0.05), [Candidate(MODEL, given(0.8, MODEL))])
    assert sure.verdict == "use it" and "3.0" in sure.reason
    hopeless = plan(flat(0.9), [Candidate(MODEL, given(0.2, MODEL))])
    assert hopeless.verdict == "leave it off" and "alpha 0.90" in hopeless.reason
    assert hopeless.best is not None and hopeless.best.shape.paths == () and hopeless.best.speedup == 1.0
    guessed = plan(flat(0.05), [Candidate(MODEL, assumed(MODEL))])
    assert guessed.verdict == "use it for these workloads"
    assert any("model accepts alpha 0.7" in note for note in guessed.assumptions)
    nothing = plan(flat(0.05), [])
    assert nothing.verdict == "leave it off" and nothing.best is None and nothing.to_dict()["method"] is None


def test_a_head_that_was_trained_here_is_taken_at_what_it_was_held_out_at() -> None:
    head = replace(eagle_8b(4, 4), agreement=(0.6, 0.5))
    found = assumed(head)
    assert [row[0] for row in found.rows] == [0.6, 0.5, 0.5, 0.5] and {len(row) for row in found.rows} == {4}
    assert [row[0] for row in found.low] == pytest.approx([0.5, 0.4, 0.4, 0.4])
    assert [row[0] for row in assumed(replace(head, agreement=(0.95,) * 6)).high] == [1.0] * 4
    assert found.assumed and assumed(replace(head, agreement=())).rows[0][0] == ASSUMED_ALPHA[head.kind]
    assert plan(flat(0.05), [Candidate(head, found)]).best is not None


def test_verdict_says_where_it_stops_paying() -> None:
    roofline = Roofline(load_profile("h100-sxm"), llama_8b())
    found = plan(roofline, [Candidate(eagle_8b(4, 4), given(0.7, eagle_8b(4, 4)))])
    assert found.verdict == "use it"
    assert found.batches is not None and found.batches.stops in (32, 64, 128)
    assert f"batches below {found.batches.stops}" in found.reason
    # The best tree for each batch never loses by more than rounding: it shrinks to none.
    assert min(found.batches.best) >= 1.0 - 1e-9
    assert list(found.batches.fixed) == sorted(found.batches.fixed, reverse=True)


def test_weights_that_do_not_fit() -> None:
    profile = load_profile("jetson-orin-nano")
    memory = plan_memory(profile, llama_8b("fp16"), [], 2048)
    found = make_plan(
        Roofline(profile, llama_8b("fp16")),
        [Candidate(lookup_size("suffix"), given(0.9, lookup_size("suffix")))],
        Workload(1, 128),
        memory,
        widths=profile.widths,
        contexts=[1024],
    )
    assert not memory.fits and memory.largest_slots == 0
    assert found.verdict == "leave it off" and "do not fit" in found.reason


def test_the_fastest_drafter_comes_first() -> None:
    lookup = lookup_size("suffix")
    found = plan(flat(0.2), [Candidate(lookup, given(0.3, lookup)), Candidate(MODEL, given(0.9, MODEL))])
    assert [each.drafter for each in found.estimates] == ["model", "suffix"]
    assert [each["drafter"] for each in found.to_dict()["estimates"]] == ["model", "suffix"]


def test_measured_acceptance_has_the_interval_of_its_counts() -> None:
    few, many = (measured(AcceptanceTable(acceptance=((0.5, 0.1),), tried=(count,)), "here") for count in (10, 10_000))
    for expected in (few, many):
        assert expected.low[0][0] < 0.5 < expected.high[0][0]
        assert sum(expected.high[0]) <= 1.0
    # Wilson's interval for 6 of 10 at 90%: 0.35 to 0.81.
    assert sum(few.low[0]) == pytest.approx(0.352, abs=0.01)
    assert sum(few.high[0]) == pytest.approx(0.806, abs=0.01)
    assert many.high[0][0] - many.low[0][0] < 0.02
    # Nothing accepted, nothing tried: no division by zero.
    assert measured(AcceptanceTable(acceptance=((0.0,), ()), tried=(5, 0)), "").rows == ((0.0,), ())


def test_constant_rows_never_promise_more_than_one() -> None:
    for alpha in (0.0, 0.3, 1.0):
        for row in constant(alpha, 3, 16):
            assert row[0] == alpha and sum(row) <= 1.0 + 1e-9
    assert set(acceptance.ASSUMED_ALPHA) == {"medusa", "eagle1", "eagle3", "mtp", "model"}


def test_memory_adds_up_and_the_largest_window_just_fits() -> None:
    profile, size, draft = load_profile("jetson-orin-nano"), llama_8b("int4"), eagle_8b(5, 4)
    found = plan_memory(profile, size, [draft], 1024)
    assert found.caches == 1024 * 32 * 2 * 8 * 128 * 2  # 128 KiB a token
    assert found.drafters == draft.stored_bytes + 1024 * draft.cache_row_bytes
    assert found.total == sum(
        found.to_dict()[name] for name in ("weights", "caches", "drafters", "workspace", "process")
    )
    fits, over = (
        plan_memory(profile, size, [], slots) for slots in (_largest(profile, size), _largest(profile, size) + 8)
    )
    assert fits.fits and not over.fits


def _largest(profile: object, size: object) -> int:
    return plan_memory(profile, size, [], 1024).largest_slots  # type: ignore[arg-type]


def test_small_models_are_bound_by_their_positions() -> None:
    assert plan_memory(load_profile("rtx-50"), smollm2(), [], 1024).largest_slots == 8192


def test_plot_refuses_other_formats() -> None:
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        plot.check_plot(Path("plan.pdf"))


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(plot.MissingPlot, match=r"specexport\[plot\]"):
        plot.check_plot(Path("plan.png"))


def test_plot_writes_a_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    found = plan(flat(0.05), [Candidate(MODEL, given(0.8, MODEL))])
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        plot.plot_plan(found, "model on device", tmp_path / f"plan{suffix}")
        assert (tmp_path / f"plan{suffix}").read_bytes().startswith(magic)
