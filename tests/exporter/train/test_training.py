"""Training: what is trained is what drafts, it learns, and a killed run goes on as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.exporter.graph_file import load_state
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.exporter.heads.trees import DynamicTree
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.exporter.train import recurrent
from specexport.exporter.train.autograd import HeadLoss, head_loss
from specexport.exporter.train.corpus import Example
from specexport.exporter.train.heads import lm_head
from specexport.exporter.train.recurrent import RecurrentTrainer
from specexport.exporter.train.rows import pack
from specexport.exporter.train.run import RunOptions, draft_vocabulary, prepare, train
from specexport.exporter.train.trainer import Trainer
from specexport.runtime.errors import CheckpointError, UsageError
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session
from tests.exporter.train.conftest import QUIET, Tiny

METHODS = ("eagle3", "eagle1", "medusa")


def trainer_of(tiny: Tiny, method: str, work: Path, **changes: int | float) -> Trainer:
    options = tiny.with_method(method, work / "heads")
    options = replace(options, train=replace(options.train, **changes))  # type: ignore[arg-type]
    ids = draft_vocabulary(tiny.corpus, tiny.opened, options.draft_vocab)
    work.mkdir(exist_ok=True)
    return prepare(options, tiny.opened, tiny.corpus, ids, None, work)[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_learns_and_is_loaded_strictly(method: str, tiny: Tiny, tmp_path: Path) -> None:
    """Held-out loss falls, agreement rises, and our strict reader finds nothing to complain about."""
    options = shared(tiny, method, tmp_path)
    figures = train(replace(options, train=replace(options.train, visits=6000)), QUIET)
    first, last = figures["history"][0], figures["history"][-1]
    assert last["loss"] < first["loss"]
    assert last["tau"] > first["tau"]
    head = open_head(str(options.output), target=tiny.opened.config)
    assert head.record.method == method
    assert not head.warnings
    said = json.loads((options.output / "config.json").read_text())["specexport_training"]
    assert said["target_fingerprint"] == tiny.opened.fingerprint
    assert said["chat_template_sha256"] == tiny.opened.template_hash
    assert said["captures"] == list(head.record.captures)


def shared(tiny: Tiny, method: str, folder: Path) -> RunOptions:
    """Options of a run with a checkpoint of its own, on the corpus that is there."""
    return tiny.with_method(method, folder / "heads", work=shared_work(tiny, folder / "work"))


def shared_work(tiny: Tiny, work: Path) -> Path:
    work.mkdir()
    (work / tiny.corpus.directory.name).symlink_to(tiny.corpus.directory)
    return work


@pytest.mark.parametrize(
    "method", ["eagle3", pytest.param("eagle1", marks=pytest.mark.slow), pytest.param("medusa", marks=pytest.mark.slow)]
)
def test_a_trained_head_drafts_in_a_bundle(method: str, tiny: Tiny, tmp_path: Path) -> None:
    options = shared(tiny, method, tmp_path)
    train(options, QUIET)
    heads = (str(options.output),)
    bundle = build(
        BuildOptions(source=options.target, output=tmp_path / "bundle", window=128, heads=heads), QUIET
    ).bundle
    prompt = tiny.corpus[options.train.held_out - 1].tokens[:20].tolist()
    params = SamplingParams(max_tokens=24)
    plain = Session(bundle, drafter="none").generate(prompt, params)
    drafted = Session(bundle).generate(prompt, params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.drafter == method
    assert drafted.statistics.tau > 1.0


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_rows_of_the_targets_lm_head_need_not_be_in_the_file(precision: str, tiny: Tiny, tmp_path: Path) -> None:
    """A head that leaves them out drafts like the same head with them."""
    options = shared(tiny, "eagle3", tmp_path)
    options = replace(options, share_lm_head=True, train=replace(options.train, head_lr=0.0, visits=600))
    train(options, QUIET)
    stored = load_file(options.output / "model.safetensors")
    assert "lm_head.weight" not in stored
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((options.output / "config.json").read_text())
    assert config["specexport"].pop("lm_head") == "target"
    (whole / "config.json").write_text(json.dumps(config))
    ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
    rows = lm_head(tiny.opened.model(8).target)[ids].float().clone()
    save_file({**stored, "lm_head.weight": rows}, whole / "model.safetensors")
    proposals = []
    for heads in (options.output, whole):
        made = build(
            BuildOptions(
                source=options.target,
                output=tmp_path / f"bundle-{heads.name}",
                window=128,
                heads=(str(heads),),
                precision=PrecisionOptions(precision=precision),
            ),
            QUIET,
        )
        session = Session(made.bundle, drafter="eagle3", threads=1)
        result = session.generate(tiny.corpus[5].tokens[:20].tolist(), SamplingParams(max_tokens=24))
        proposals.append((result.token_ids, result.statistics.accepted))
    assert proposals[0] == proposals[1]
    further = replace(options, share_lm_head=False, init=str(options.output), output=tmp_path / "further")
    if precision == "fp32":
        train(replace(further, work=shared_work(tiny, tmp_path / "again")), QUIET)
        assert "lm_head.weight" not in load_file(further.output / "model.safetensors")
    with pytest.raises(UsageError, match=r"--head-lr 0\.1"):
        train(replace(options, train=replace(options.train, head_lr=0.1)), QUIET)


def test_a_head_cannot_bring_an_lm_head_and_name_the_targets(tiny: Tiny, tmp_path: Path) -> None:
    options = shared(tiny, "eagle3", tmp_path)
    train(replace(options, train=replace(options.train, visits=300)), QUIET)
    path = options.output / "config.json"
    config = json.loads(path.read_text())
    for said, complaint in (("target", "the file has 'lm_head.weight'"), ("draft", "lm_head is 'draft'")):
        path.write_text(json.dumps({**config, "specexport": {**config["specexport"], "lm_head": said}}))
        with pytest.raises(CheckpointError, match=complaint):
            open_head(str(options.output), target=tiny.opened.config)


def test_the_trained_module_and_the_drafter_propose_the_same(tiny: Tiny, tmp_path: Path) -> None:
    """Unrolled along a text that follows the drafter's own chain, each step has the drafter's log probabilities."""
    options = tiny.with_method("eagle3", tmp_path / "heads", dtype="fp32", work=tmp_path)
    ids = draft_vocabulary(tiny.corpus, tiny.opened, options.draft_vocab)
    trainer, record, parameters = prepare(options, tiny.opened, tiny.corpus, ids, None, tmp_path)
    trainer.run(QUIET)
    from specexport.exporter.train.heads import save_head

    save_head(options.output, record, parameters, {}, target_name="tiny", dtype="fp32")
    head = open_head(str(options.output), target=tiny.opened.config)
    depth, slots = 4, 64
    assert head.record.method == "eagle3"
    drafter = RecurrentDrafter(head.record, slots, torch.float32, DynamicTree(depth, 1, depth), valid_vocab=300)
    learner = trainer.learner
    assert isinstance(learner, RecurrentTrainer)
    with torch.no_grad():
        load_state(drafter, drafter.values(head.weights))
        drafter.embedding.copy_(learner.drafter.embedding)
        example, row = tiny.corpus[3], 26
        width = tiny.opened.config.hidden_size * 3
        caches = [torch.zeros(shape) for shape in record.cache_shapes(slots).values()]  # type: ignore[union-attr]
        tokens, parents, scores, *_ = drafter(
            example.features[None, : row + 1, :width].float(),
            example.tokens[None, 1 : row + 2],
            torch.tensor([0]),
            torch.zeros(depth, drafter.valid_rows),
            *caches,
        )
        assert parents.tolist() == list(range(depth))
        followed = torch.cat([example.tokens[: row + 2], tokens, tokens[:1]])
        learn = torch.arange(len(followed)) >= int(example.learn.nonzero()[0])
        states = torch.zeros(len(followed), example.features.shape[1])
        states[: row + 1] = example.features[: row + 1].float()
        packed = pack([tiny.corpus[1], Example(followed, learn, states)], depth)
        place = int((packed.learnt == row + packed.spans[1].all.start).nonzero())
        path = 0.0
        for step, (read, _) in enumerate(learner.states(packed, depth)):
            logprobs = torch.log_softmax(read[place] @ learner.drafter.lm_head.t(), dim=-1)
            path += float(logprobs.max())
            assert int(ids[logprobs.argmax()]) == int(tokens[step])
            assert abs(path - float(scores[step])) < 1e-5 * max(1.0, abs(path))


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(method: str, tiny: Tiny, tmp_path: Path) -> None:
    whole = trainer_of(tiny, method, tmp_path / "whole", visits=2000)
    whole.run(QUIET)
    cut = trainer_of(tiny, method, tmp_path / "cut", visits=2000)
    for _ in range(3):
        cut._step()
    cut.save()
    cut._step()  # lost
    again = trainer_of(tiny, method, tmp_path / "cut", visits=2000)
    assert again.place.step == 3
    again.run(QUIET)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, again.parameters[name]), name
    assert again.history[-1]["loss"] == whole.history[-1]["loss"]


def test_a_run_that_is_done_changes_nothing_and_another_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    first = trainer_of(tiny, "eagle3", tmp_path / "a", visits=600)
    first.run(QUIET)
    second = trainer_of(tiny, "eagle3", tmp_path / "a", visits=600)
    second.run(QUIET)
    assert second.place == first.place
    with pytest.raises(CheckpointError, match=r"of a run with lr = 0.002, now it is 0.1"):
        trainer_of(tiny, "eagle3", tmp_path / "a", lr=0.1)


def test_the_draft_vocabulary_is_the_targets_most_frequent_and_its_maps_agree(tiny: Tiny, tmp_path: Path) -> None:
    counts: dict[int, int] = {}
    for tokens, learn in tiny.corpus.learned():
        for token, written in zip(tokens.tolist(), learn.tolist(), strict=True):
            counts[token] = counts.get(token, 0) + (4 if written else 1)
    ids = draft_vocabulary(tiny.corpus, tiny.opened, 12).tolist()
    stops = tiny.opened.chat.files.stop_ids
    assert ids == sorted(ids)
    assert set(stops) <= set(ids)
    least = min(counts.get(token, 0) for token in ids if token not in stops)
    assert least >= max(count for token, count in counts.items() if token not in ids)
    options = tiny.with_method("eagle3", tmp_path / "heads", work=tmp_path)
    ids = draft_vocabulary(tiny.corpus, tiny.opened, 200)
    _, record, parameters = prepare(options, tiny.opened, tiny.corpus, ids, None, tmp_path)
    from specexport.exporter.train.heads import save_head

    save_head(options.output, record, parameters, {}, target_name="tiny")
    tensors = load_file(options.output / "model.safetensors")
    assert torch.equal(torch.arange(200) + tensors["d2t"], ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert tensors["t2d"].dtype == torch.bool


def test_steps_by_hand(tiny: Tiny) -> None:
    """Rows, aims and masks of a short text: tokens 0..6, of which 3..6 were written by the target."""
    tokens = torch.arange(7)
    packed = pack([Example(tokens, tokens >= 3, torch.arange(7.0)[:, None])], 3)
    assert packed.learnt.tolist() == [2, 3, 4]  # row 2 reads token 3 and predicts token 4
    assert packed.context.tolist() == [0, 1, 5]
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert packed.ahead.tolist() == [[3, 4, 5, 6], [4, 5, 6, 0], [5, 6, 0, 0]]
    assert packed.valid.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    assert (packed.spans[0].mask == 0).tolist() == [[j <= i for j in range(6)] for i in (2, 3, 4)]


@pytest.mark.parametrize("soft", [True, False])
def test_the_loss_and_its_gradients_are_torchs(soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadLoss, "CHUNK", 3)
    generator = torch.Generator().manual_seed(0)
    states, table = (torch.randn(n, 5, generator=generator, requires_grad=True) for n in (8, 11))
    weights = torch.rand(8, generator=generator)
    wanted = torch.softmax(torch.randn(8, 11, generator=generator), -1) if soft else torch.arange(8)
    loss, best = head_loss(states, table, wanted, weights, torch.float32)
    logits = states @ table.t()
    right = (torch.nn.functional.cross_entropy(logits, wanted, reduction="none") * weights).sum()
    assert torch.equal(best, logits.argmax(-1))
    mine = torch.autograd.grad(2 * loss, (states, table))
    theirs = torch.autograd.grad(2 * right, (states, table))
    assert torch.allclose(loss, right, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))


def test_gradients_of_the_operators() -> None:
    from specexport.exporter import ops

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    cos, sin = (random(6, 2).detach() for _ in range(2))
    positions = torch.tensor([[0, 2, 5]])
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, 1e-5), (random(2, 3, 4), random(4)))
    assert torch.autograd.gradcheck(lambda x: ops.rotary(x, cos, sin, positions), (random(1, 2, 3, 6),))
    assert torch.autograd.gradcheck(ops.linear_transposed, (random(3, 4), random(5, 4)))


def test_a_head_goes_on_from_another(tiny: Tiny, tmp_path: Path) -> None:
    first = replace(tiny.with_method("eagle3", tmp_path / "first", dtype="fp32"), work=tiny.options.work)
    figures = train(first, QUIET)
    second = replace(shared(tiny, "eagle3", tmp_path), init=str(tmp_path / "first"))
    again = train(second, QUIET)
    assert again["history"][0]["loss"] == pytest.approx(figures["history"][-1]["loss"], abs=1e-3)
    with pytest.raises(UsageError, match="of the method eagle3, not medusa"):
        train(replace(second, method="medusa"), QUIET)


def test_aims_are_left_out_where_the_vocabulary_ends(tiny: Tiny, tmp_path: Path) -> None:
    """A token outside the draft vocabulary never counts as agreed."""
    trainer = trainer_of(tiny, "eagle3", tmp_path)
    learner = trainer.learner
    assert isinstance(learner, RecurrentTrainer)
    packed = pack([tiny.corpus[0]], 2)
    outside = packed.ahead.clone()
    outside[:, 1:] = next(i for i in range(300) if i not in set(learner.drafter.record.draft_to_target.tolist()))  # type: ignore[union-attr]
    loss, hits = learner.losses(replace(packed, ahead=outside), 2)
    assert not hits.any()
    assert float(loss.detach()) == 0.0
    assert recurrent.DECAY < 1
