"""What a bundle says of its heads before one was asked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.runtime import expected
from specexport.runtime.acceptance_table import ACCEPTANCE_FILE, Acceptance, AcceptanceTable
from specexport.runtime.auto import AUTO, make_controller
from specexport.runtime.bundle import Bundle
from specexport.runtime.costs import DraftShare
from specexport.runtime.device_profile import write_acceptance
from specexport.runtime.engine import find_engine
from specexport.runtime.expected import draft_shares, row_share, trained_priors
from specexport.runtime.initializers import Initializer
from specexport.runtime.manifest import FileInfo
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session
from tests.e2e.test_heads import write_words
from tests.exporter.heads.writers import TARGET_CONFIG, Random, every, llama_tensors
from tests.tiny import write_checkpoint

ENGINE, AGREEMENT, DEPTH = "onnxruntime-cpu", [0.9, 0.8, 0.7, 0.6], 3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny target with two EAGLE-3 heads, one of which says how it was trained."""
    folder = tmp_path_factory.mktemp("expected")
    target = write_checkpoint(folder / "target", TARGET_CONFIG, llama_tensors(Random(1)))
    write_words(target)
    tiny = dict(every())["eagle3"]
    ours, foreign = tiny.write(folder / "ours"), tiny.write(folder / "foreign")
    config = json.loads((ours / "config.json").read_text())
    config["specexport_training"] = {"held_out": {"agreement": AGREEMENT}}
    (ours / "config.json").write_text(json.dumps(config))
    options = BuildOptions(
        str(target), folder / "bundle", window=64, heads=(f"ours={ours}", f"foreign={foreign}"), check=False
    )
    draft = replace(options.draft, depth=DEPTH, topk=2, nodes=6)
    return build(replace(options, draft=draft), Progress(quiet=True)).bundle


def of(bundle: Bundle) -> tuple[dict[str, DraftShare], dict[str, tuple[float, float]]]:
    """Shares, and what is expected of heads at a tenth of a step a node."""
    shares = draft_shares(bundle)
    return shares, {name: (prior.more, prior.cost) for name, prior in trained_priors(bundle, shares, 0.1).items()}


def test_a_build_keeps_what_training_noted_as_deep_as_it_drafts(built: Bundle) -> None:
    assert {info.name: info.agreement for info in built.manifest.drafters if info.agreement} == {
        "ours": tuple(AGREEMENT[:DEPTH])
    }


def test_a_draft_costs_what_it_reads_once_a_depth(built: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        Initializer("embedding.codes", 3, (1000, 64), "target.onnx.data"),
        Initializer("layers.0.mlp.up_proj.weight.codes", 3, (64, 1280), "drafter.onnx.data"),
        Initializer("lm_head.codes", 3, (500, 64), "drafter.onnx.data"),
    ]
    monkeypatch.setattr(expected, "initializers", lambda path: tensors)
    files = built.manifest.files | {"target.onnx.data": FileInfo(bytes=1_000_000, sha256="0" * 64)}
    medusa = replace(built.manifest.drafters[0], name="medusa", kind="medusa", options={"heads": 3, "k": 2})
    drafters = (*built.manifest.drafters, medusa)
    shares = draft_shares(replace(built, manifest=replace(built.manifest, files=files, drafters=drafters)))
    assert set(shares) == {"ours", "foreign", "medusa"} and shares["ours"] == shares["foreign"]
    step, products = 16e6 + 1_000_000 + files["target.onnx"].bytes, 64 * 1280
    read = 8e6 + products + 500 * 64
    assert (shares["ours"].draft, shares["medusa"].draft) == pytest.approx((DEPTH * read / step, read / step))
    assert shares["ours"].row == pytest.approx(0.06 * products / step)


def test_what_grows_in_one_operator_reads_its_matrices_once_and_again_what_no_cache_holds(
    built: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(elements: int, *grown: str) -> float:
        tensors = [Initializer("layers.0.mlp.up_proj.weight.codes", 3, (64, elements // 64), "drafter.onnx.data")]
        monkeypatch.setattr(expected, "initializers", lambda path: tensors)
        files = {info.graph for info in built.manifest.drafters if info.name in grown}
        return draft_shares(built, files.__contains__)["ours"].draft

    small, large = 1_000_000 // 64 * 64, 32_000_000
    assert share(small, "ours") / share(small, "foreign") == pytest.approx(
        (small + 6e6 * DEPTH) / ((small + 8e6) * DEPTH)
    )
    again = (DEPTH - 1) * (large - 16e6)
    assert share(large, "ours") / share(large) == pytest.approx((large + 6e6 * DEPTH + again) / ((large + 8e6) * DEPTH))


def test_rows_in_use_cost_what_reading_them_does(built: Bundle) -> None:
    target = built.manifest.target
    files = built.manifest.files["target.onnx"].bytes  # so small that its weights lie in it
    read = 1000 * target.layers * 2 * target.kv_heads * target.head_dim * 4
    assert row_share(built) == pytest.approx(read / (16e6 + files))
    short = replace(target, windows=(None,) + (100,) * (target.layers - 1))
    windowed = replace(built, manifest=replace(built.manifest, target=short))
    assert row_share(windowed) / row_share(built) == pytest.approx(
        (1000 + 100 * (target.layers - 1)) / (1000 * target.layers)
    )


def test_a_chain_of_the_best_length_is_expected(built: Bundle) -> None:
    shares, priors = of(built)
    draft = shares["ours"].draft
    lengths = [(0.9, draft + 0.1), (0.9 + 0.72, draft + 0.2), (0.9 + 0.72 + 0.504, draft + 0.3)]
    best = max(lengths, key=lambda found: (1 + found[0]) / (1 + found[1]))
    assert priors == {"ours": pytest.approx(best)}


def test_acceptance_that_was_counted_goes_first_and_a_damaged_table_is_passed_over(built: Bundle) -> None:
    table = AcceptanceTable(acceptance=((0.5, 0.2),), tried=(100,))
    write_acceptance(built, Acceptance(measured_on="4 prompts", drafters={"foreign": table}))
    shares, priors = of(built)
    assert priors["foreign"] == pytest.approx((0.5, shares["foreign"].draft + 0.1)) and "ours" in priors
    (built.path / ACCEPTANCE_FILE).write_text("{")
    assert set(of(built)[1]) == {"ours"}
    (built.path / ACCEPTANCE_FILE).unlink()


def test_what_is_expected_changes_who_is_asked_and_no_token(built: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "_CALL_BYTES", 0.0)  # beside a target as small as this no draft pays
    engine = find_engine(ENGINE)(built.path, threads=1)
    params, prompt = SamplingParams(max_tokens=40), [3, 1, 4, 1, 5]
    plain = Session(built, drafter="none", engine=engine).generate(prompt, params)
    controller = make_controller(built, engine, ENGINE, 1)
    praised = Session(built, drafter=AUTO, engine=engine).generate(prompt, params)
    assert controller.drafters[-2:] == ("ours", "foreign")
    infos = [replace(info, agreement=(0.0,) * DEPTH if info.graph else ()) for info in built.manifest.drafters]
    blamed = replace(built, manifest=replace(built.manifest, drafters=tuple(infos)))
    unasked = Session(blamed, drafter=AUTO, engine=engine).generate(prompt[:], SamplingParams(max_tokens=20))
    assert praised.token_ids == plain.token_ids and unasked.token_ids == plain.token_ids[:20]
    asked = {name for name in praised.statistics.decisions if name != "lookups"}
    assert asked and set(unasked.statistics.decisions) == {"lookups"}
