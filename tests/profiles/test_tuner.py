from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specexport.engines.ort import OrtEngine
from specexport.exporter.cli import main
from specexport.profiles import timing, tuner
from specexport.profiles.calibrate import Recording, row_s
from specexport.profiles.sizes import bundle_size, drafter_size, graph_size, lookup_size
from specexport.profiles.timing import measure_curve, noise_of
from specexport.profiles.tuner import TuneOptions, read_prompts, tune_bundle, used_lengths, with_trees
from specexport.runtime import device_profile
from specexport.runtime.acceptance_table import Acceptance, AcceptanceCounter, AcceptanceTable
from specexport.runtime.bundle import Bundle
from specexport.runtime.device_profile import (
    DeviceProfile,
    find_profile,
    read_profile,
    write_acceptance,
    write_profile,
)
from specexport.runtime.engine import Step, chains_only, find_engine
from specexport.runtime.errors import UsageError
from specexport.runtime.initializers import Initializer
from specexport.runtime.machine import this_machine
from specexport.runtime.tree import Tree


class Log:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stages: dict[str, int] = {}
        self._running = ""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Log]:
        self.stages[name], self._running = 0, name
        yield self

    def advance(self, amount: int = 1) -> None:
        self.stages[self._running] += amount

    def log(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    return Bundle.load(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_ROUNDS", timing.MIN_ROUNDS)
    monkeypatch.setattr(tuner, "WIDTHS", (1, 2, 4))
    monkeypatch.setattr(device_profile, "TRUSTED_NOISE", 1e9)  # tests share their machine


def test_tune_writes_what_a_session_finds(bundle: Bundle, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [text]}) for text in ("the quick fox", "def add(a, b):", "1, 2")))
    log = Log()
    options = TuneOptions(data=prompts, count=2, max_tokens=12, threads=1)
    result = tune_bundle(bundle.path, options, log)
    assert result.changes == ()
    found = find_profile(Bundle.load(bundle.path, check="full"), this_machine("onnxruntime-cpu", 1))
    assert found == result.profile and result.path.is_file()
    assert found.cost.widths == (1, 2, 4) and found.cost.used[-1] == 124
    assert set(found.drafts) == set(found.acceptance) == {"suffix", "ngram", "recycling"} == set(found.trees)
    assert found.measured_on == "2 prompts of prompts.jsonl, temperature 0"
    assert all(table.tried[0] > 5 for table in found.acceptance.values())
    assert log.stages["run drafters"] == 2 * 4
    assert result.to_dict()["profile"]["machine"]["threads"] == 1


def test_bundles_that_verify_chains_are_measured_and_planned_with_chains(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule is the session's: quantised, exact, on an engine that promises as much."""
    raw = json.loads((bundle.path / "manifest.json").read_text())
    raw["target"]["precision"] |= {"weights": "int8", "lm_head": "int8"}
    (bundle.path / "manifest.json").write_text(json.dumps(raw))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick fox\ndef add(a, b):\n")
    options = TuneOptions(data=prompts, count=2, max_tokens=40, threads=1, name="here")
    quantised = Bundle.load(bundle.path)

    def widest(profile: DeviceProfile) -> int:
        return max(len(row) for table in profile.acceptance.values() for row in table.acceptance)

    profile = tune_bundle(bundle.path, options, Log()).profile
    assert profile.chains and widest(profile) == 1
    assert all(path == (0,) * len(path) for found in profile.trees.values() for tree in found for path in tree.paths)
    # Acceptance that was counted on trees is planned with as far as chains go.
    wide = {"recycling": AcceptanceTable(acceptance=((0.5, 0.3),) * 3, tried=(100,) * 3)}
    write_acceptance(quantised, Acceptance(measured_on="trees", drafters=wide))
    for machine in ("cpu-x86", "here"):
        write_profile(quantised, "here", replace(profile, acceptance=wide))
        assert main(["plan", str(bundle.path), "--profile", machine, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert all(len(tree) == len(set(map(len, tree))) for tree in (each["tree"] for each in plan["estimates"]))
        assert next(each["tau"] for each in plan["estimates"] if each["drafter"] == "recycling") <= 1.875
    monkeypatch.setattr(OrtEngine, "width_exact", False, raising=False)
    assert not chains_only(quantised.manifest.target.precision, find_engine("onnxruntime-cpu")(bundle.path))
    branching = tune_bundle(bundle.path, options, Log()).profile
    assert not branching.chains and widest(branching) > 1


def test_a_busy_machine_is_said(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "TRUSTED_NOISE", -1.0)
    log = Log()
    tune_bundle(bundle.path, TuneOptions(threads=1), log)
    assert any(line.startswith("warning: times vary") for line in log.lines)


def test_a_changed_machine_is_said(bundle: Bundle) -> None:
    options = TuneOptions(name="here", threads=1)
    first = tune_bundle(bundle.path, options, Log())
    assert first.profile.acceptance == {} and first.profile.measured_on is None
    assert first.profile.drafter is None  # nothing is known of acceptance
    old = first.profile
    write_profile(bundle, "here", replace(old, machine=replace(old.machine, cpu="An older CPU"), fingerprint="x"))
    log = Log()
    again = tune_bundle(bundle.path, options, log)
    assert any("was An older CPU" in line for line in again.changes) and "the bundle: built anew" in again.changes
    assert any("An older CPU" in line for line in log.lines)
    assert read_profile(bundle, "here").machine == this_machine("onnxruntime-cpu", 1)


def test_catching_up_with_the_prompt_is_told_apart_from_drafting() -> None:
    run = Recording(counter=AcceptanceCounter(1), max_tokens=10, draft_s=0.01)  # reading the prompt
    for spent in (0.5, 0.1, 0.1):
        run.add_call(Tree.chain([1]), [0], [2])
        run.draft_s += spent
    assert run.first_draft_s == pytest.approx(0.51) and run.later_draft_s == pytest.approx(0.1)
    assert row_s([(0.51, 100), (0.92, 200), (9.0, 10)], 0.1) == pytest.approx(0.0041)
    assert row_s([(0.05, 100)], 0.1) == 0.0


class Clock:
    """An engine whose calls take a known time, with a disturbance now and then."""

    slots, vocab_size, features_size = 64, 10, 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hiccup: float = 0.0) -> None:
        self.now, self.calls, self.hiccup = 0.0, 0, hiccup
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def run(self, step: Step) -> None:
        self.calls += 1
        size = len(step.tokens)
        assert step.tree.shape == (size, size) and step.positions[0] == step.past
        assert step.tokens.max() < self.vocab_size
        self.now += 0.01 + 0.001 * size + 1e-5 * step.past + (self.hiccup if self.calls % 5 == 0 else 0.0)

    def reset(self) -> None:
        self.calls = -1


def test_medians_shrug_off_disturbances(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Clock(monkeypatch, hiccup=1.0)
    curve = measure_curve(engine, [1, 2, 4], [0, 32], budget_s=1e9)  # type: ignore[arg-type]
    for used in (0, 32):
        for width in (1, 2, 4):
            assert curve.step_s(width, used) == pytest.approx(0.01 + 0.001 * width + 1e-5 * used)
    assert engine.calls == -1  # the engine's caches are given back empty


def test_noisy_times_are_measured_longer_until_the_budget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_ROUNDS", 20)
    counts: list[Callable[[], int]] = []
    for hiccup, budget in ((0.0, 1e9), (0.05, 1e9), (0.05, 0.0)):
        told: list[int] = []
        measure_curve(
            Clock(monkeypatch, hiccup),  # type: ignore[arg-type]
            [1, 2],
            [0],
            budget_s=budget,
            advance=told.append,
        )
        counts.append(lambda told=told: sum(told))  # type: ignore[misc]
    quiet, noisy, short = (count() for count in counts)
    assert quiet == short == 2 * (timing.MIN_ROUNDS + timing.WARM_UP) < noisy


def test_noise_is_the_notch_of_a_box_plot() -> None:
    assert noise_of([1.0] * 9) == 0.0
    assert noise_of([0.9, 1.0, 1.1] * 3) == pytest.approx(1.57 * 0.2 / 3, rel=0.1)


def test_used_lengths_fit_the_window() -> None:
    assert used_lengths(4096, 32) == [64, 256, 1024, 2048, 4064]
    assert used_lengths(128, 4) == [64, 124]
    assert used_lengths(32, 4) == [28]


def test_trees_grow_with_the_width_while_it_pays(bundle: Bundle) -> None:
    options = TuneOptions(name="here", threads=1)
    profile = tune_bundle(bundle.path, options, Log()).profile
    table = AcceptanceTable(acceptance=((0.6, 0.2), (0.6, 0.2)), tried=(100, 60))
    draft = replace(lookup_size("recycling"), depth=2)
    cheap = replace(profile.cost, seconds=((0.01, 0.0101, 0.0102),) * len(profile.cost.used))
    tuned = with_trees(replace(profile, cost=cheap, acceptance={"recycling": table}, drafts={}, host_s=0.0), [draft])
    assert [tree.width for tree in tuned.trees["recycling"]] == [2, 4]
    assert [len(tree.paths) for tree in tuned.trees["recycling"]] == [1, 3]
    assert (tuned.drafter, tuned.width) == ("recycling", 4)
    assert tuned.trees["recycling"][0].tau == pytest.approx(1.6)


def test_sizes_of_a_bundle(bundle: Bundle) -> None:
    """Two layers of width 64, 4 heads of 16 of which 2 are of keys, an MLP of 96 and 320 tied rows, in fp32."""
    size = bundle_size(bundle)
    blocks = 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)
    assert (size.block_elements, size.head_elements, size.head_bytes) == (blocks, 320 * 64, 4 * 320 * 64)
    assert size.block_bytes == pytest.approx(4 * blocks, rel=0.02)  # norms
    assert size.weight_bytes <= size.stored_bytes <= 1.3 * size.weight_bytes
    assert (size.heads, size.intermediate_size, size.row_bytes) == (4, 96, 2 * 2 * 2 * 16 * 4)
    kinds = {info.name: drafter_size(bundle, info) for info in bundle.manifest.drafters}
    assert {name: draft.ranks for name, draft in kinds.items()} == {"suffix": 1, "ngram": 1, "recycling": 8}


def test_query_heads_are_counted_and_not_taken_to_fill_the_hidden_size(bundle: Bundle) -> None:
    """As Gemma's: wider than the hidden size together."""
    target = bundle.manifest.target
    for name, elements in (("weight", 1), ("weight.codes", 2)):
        query = Initializer(f"layers.0.attention.q_proj.{name}", elements, (64, 6 * target.head_dim), None)
        assert graph_size(target, [query], 0).heads == 6
    assert graph_size(target, [Initializer("layers.0.qkv", 1, (64, 6 * target.head_dim), None)], 0).heads == 4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"\xff\xfe"),
        ("empty.txt", b"\n \n"),
        ("a.jsonl", b'{"prompt": 3}\n'),
        ("b.jsonl", b'{"other": "x"}\n'),
        ("c.jsonl", b'{"turns": []}\n'),
        ("d.jsonl", b"not json\n"),
        ("e.jsonl.gz", b"not gzip"),
    ],
)
def test_prompt_files_that_are_none(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=name):
        read_prompts(tmp_path / name, 4)


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt {number}" for number in range(10)))
    assert read_prompts(path, 2) == ["prompt 0", "prompt 5"]
    assert len(read_prompts(path, 100)) == 10
