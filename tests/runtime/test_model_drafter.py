"""A draft model on toy engines: it proposes what it would write after the whole sequence, at one call a draft."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest

from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import DraftRequest, Observation
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.model_files import ModelOptions
from specexport.runtime.errors import BundleError
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.tree import Tree
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import decode, reference

V, SLOTS, DEPTH = 23, 96, 4
TARGET = ToyModel(V, seed=3)
#: The same language, but nothing surprises it.
DRAFT = ToyModel(V, seed=3, surprise=1 << 60)
SAME = np.arange(V)
GREEDY = SamplingParams()
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, seed=5),
    "penalised": SamplingParams(temperature=0.6, seed=6, repetition_penalty=1.3, top_k=9),
}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 1, 4, 1, 5, 8], [3, 1], [2, 7, 1] * 28)


def drafter_of(model: ToyModel = DRAFT, slots: int = SLOTS, to_target: Any = SAME, **more: Any) -> ModelDrafter:
    more = {"depth": DEPTH, "prefill_chunk": 5} | more
    return ModelDrafter(FakeEngine(model, slots), to_target, V, **more)


def engine_of(drafter: ModelDrafter) -> FakeEngine:
    engine = drafter._engine
    assert isinstance(engine, FakeEngine)
    return engine


def drawn(
    model: ToyModel,
    known: list[int],
    count: int,
    to_target: np.ndarray = SAME,
    params: SamplingParams = GREEDY,
    prompt: int = 0,
) -> list[tuple[int, np.ndarray]]:
    """What the model writes after ``known``, recomputed whole for each token: the target's ids, and the chances they
    were drawn with. The first ``prompt`` tokens of ``known`` are the prompt."""
    to_draft = {int(theirs): ours for ours, theirs in enumerate(to_target) if theirs >= 0}
    tokens, written = [to_draft[token] for token in known if token in to_draft], []
    sampler = Sampler(params, V)
    sampler.begin(known[:prompt])
    for token in known[prompt:]:
        sampler.push(token)
    while len(written) < count and known[-1] in to_draft:
        logits = model.after(tokens)[: len(to_target)]
        if to_target[logits.argmax()] < 0:
            break
        row = np.full(V, -np.inf, np.float32)
        for value, theirs in zip(logits, to_target, strict=True):
            if theirs >= 0:
                row[theirs] = value
        position = len(known) + len(written)
        written.append((sampler.pick(row, position), sampler.probs(row, position)))
        sampler.push(written[-1][0])
        tokens.append(to_draft[written[-1][0]])
    return written


def ahead(*arguments: Any) -> list[int]:
    """Only the tokens of it."""
    return [token for token, _ in drawn(*arguments)]


class Checked:
    """A draft model whose every proposal is compared with a recompute of the whole sequence."""

    name = "checked"

    def __init__(self, inner: ModelDrafter, model: ToyModel, to_target: np.ndarray = SAME) -> None:
        self.inner, self.model, self.to_target = inner, model, to_target
        self.drafts = 0

    def begin_sampling(self, params: SamplingParams) -> None:
        self.params = params
        self.inner.begin_sampling(params)

    def begin(self, tokens: Any, first: int) -> None:
        self.prompt = len(tokens)
        self.known = [*tokens, first]
        self.inner.begin(tokens, first)

    def propose(self, request: DraftRequest) -> Tree:
        engine = engine_of(self.inner)
        before = len(engine.calls)
        tree = self.inner.propose(request)
        wanted = min(request.max_nodes - 1, request.max_depth, DEPTH, engine.slots + 1 - len(self.known))
        expected = drawn(self.model, self.known, wanted, self.to_target, self.params, self.prompt)
        assert tree.tokens.tolist() == [request.root, *(token for token, _ in expected)]
        for node, (_, chances) in enumerate(expected):
            if self.params.temperature == 0:
                assert tree.draft_probs is None
            else:
                assert tree.draft_probs is not None and np.array_equal(tree.draft_probs(node), chances)
        assert len(tree) == 1 or (len(tree.scores) == len(tree) and (np.diff(tree.scores) <= 0).all())
        assert len(engine.calls) - before <= max(0, wanted), "one call a draft"
        self.drafts += len(expected)
        return tree

    def observe(self, observation: Observation) -> None:
        self.known += observation.emitted
        self.inner.observe(observation)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("model", [TARGET, DRAFT, ToyModel(V, seed=8)], ids=["itself", "close", "stranger"])
def test_prompts_in_a_row_to_the_end_of_the_context(model: ToyModel, name: str) -> None:
    """Whatever was accepted, rejected or rewound before, nothing of it is left in what is drafted next."""
    checked = Checked(drafter_of(model), model)
    decoder = Decoder(FakeEngine(TARGET, SLOTS), checked, prefill_chunk=7)
    for prompt in PROMPTS:
        tokens, statistics = decode(decoder, TARGET, prompt, PARAMS[name], None)
        assert tokens == reference(TARGET, prompt, PARAMS[name], SLOTS + 1 - len(prompt))
        assert statistics.finish_reason == "context"
    assert checked.drafts > 50


@pytest.mark.parametrize("name", PARAMS)
def test_the_target_itself_is_always_right(name: str) -> None:
    """At any temperature and with any penalty: it draws with the same noise and the same history."""
    drafter = drafter_of(TARGET)
    decoder = Decoder(FakeEngine(TARGET, SLOTS), drafter, max_nodes=drafter.max_nodes)
    tokens, statistics = decode(decoder, TARGET, PROMPTS[0], PARAMS[name], 1 + 6 * (DEPTH + 1))
    assert tokens == reference(TARGET, PROMPTS[0], PARAMS[name], 1 + 6 * (DEPTH + 1))
    assert statistics.tau == DEPTH + 1
    # A last draft that came true goes with the bonus token into the first call of the next step.
    sizes = [size for size, _ in engine_of(drafter).calls]
    assert sizes[2:] == [1] * DEPTH + 5 * ([2] + [1] * (DEPTH - 1))


def test_a_shared_prefix_is_not_computed_again() -> None:
    drafter = drafter_of()
    drafter.begin(PROMPTS[0], 7)
    assert [size for size, _ in engine_of(drafter).calls] == [5, 4]
    drafter.propose(DraftRequest(7, 9, 9))
    engine_of(drafter).calls.clear()
    drafter.begin([*PROMPTS[0], 7, 0, 0, 0], 1)
    assert [size for size, _ in engine_of(drafter).calls] == [3]
    drafter.begin([*PROMPTS[0], 7, 0, 0, 0, 1, 2], 1)  # the last root was never run
    assert [size for size, _ in engine_of(drafter).calls] == [3, 2]
    known = [*PROMPTS[0], 7, 0, 0, 0, 1, 2, 1]
    ahead_of_it = drafter.propose(DraftRequest(1, 9, 9)).tokens.tolist()[1:]
    assert ahead_of_it == ahead(DRAFT, known, DEPTH)
    engine_of(drafter).calls.clear()
    drafter.begin([*known, *ahead_of_it], 5)  # nor was the last draft
    assert [size for size, _ in engine_of(drafter).calls] == [1]
    engine_of(drafter).calls.clear()
    drafter.begin(PROMPTS[0][:4], 1)
    assert engine_of(drafter).calls == []
    assert drafter.propose(DraftRequest(1, 9, 9)).tokens.tolist()[1:] == ahead(DRAFT, [*PROMPTS[0][:4], 1], DEPTH)


def test_proposing_changes_no_later_proposal() -> None:
    drafter = drafter_of()
    drafter.begin(PROMPTS[0], 7)
    whole = ahead(DRAFT, [*PROMPTS[0], 7], DEPTH)
    for nodes, depth in ((2, 9), (9, 9), (4, 1), (1, 5), (9, 0), (9, 3)):
        tree = drafter.propose(DraftRequest(7, nodes, depth))
        assert tree.tokens.tolist() == [7, *whole[: min(nodes - 1, depth)]]
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


def test_scores_are_log_probabilities() -> None:
    drafter = drafter_of()
    drafter.begin(PROMPTS[0], 7)
    tree = drafter.propose(DraftRequest(7, 9, 9))
    assert len(tree) == DEPTH + 1
    known, total = [*PROMPTS[0], 7], 0.0
    for token, score in zip(tree.tokens[1:], tree.scores[1:], strict=True):
        row = DRAFT.after(known).astype(np.float64)
        total += row[token] - np.log(np.exp(row).sum())
        assert score == pytest.approx(total, abs=1e-5)
        known.append(int(token))


def test_steps_that_were_drafted_by_others_or_not_at_all() -> None:
    """Proposals may be skipped and their trees cut or replaced: what counts is what was emitted."""
    choose = random.Random(1)
    drafter = drafter_of(slots=1000)
    known = list(PROMPTS[0])
    drafter.begin(known, 7)
    known.append(7)
    for _ in range(160):
        if choose.random() < 0.7:
            right = ahead(DRAFT, known, DEPTH)
            tree = drafter.propose(DraftRequest(known[-1], choose.randint(1, DEPTH + 1), 9))
            assert tree.tokens.tolist()[1:] == right[: len(tree) - 1]
            emitted = right[: choose.randint(0, DEPTH)]
        else:
            tree, emitted = Tree.chain([known[-1]]), []
        if choose.random() < 0.8 or not emitted:
            emitted = [*emitted, *(choose.randrange(V) for _ in range(choose.randint(1, 4)))]
        known += emitted
        drafter.observe(Observation(emitted, tree, [0], lambda node: np.zeros(V, np.float32)))


def test_past_its_context_it_says_so_once_and_proposes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    checked = Checked(drafter_of(slots=30), DRAFT)
    decoder = Decoder(FakeEngine(TARGET, SLOTS), checked)
    with caplog.at_level(logging.WARNING):
        for prompt in (PROMPTS[0], PROMPTS[3], PROMPTS[1]):
            before, caplog.records[:] = checked.drafts, []
            tokens, _ = decode(decoder, TARGET, prompt, SamplingParams(), None)
            assert tokens == reference(TARGET, prompt, SamplingParams(), SLOTS + 1 - len(prompt))
            assert [record.getMessage() for record in caplog.records] == [
                "model: past its context of 30 tokens, decoding plainly"
            ]
            assert (checked.drafts > before) == (len(prompt) < 30)


@pytest.mark.parametrize("name", PARAMS)
def test_a_mapped_vocabulary(name: str) -> None:
    """Ids in another order, three the target lacks, four that the draft model lacks."""
    ids = np.random.default_rng(0).permutation(V)
    to_target = np.concatenate([ids[:10], [-1, -1], ids[10 : V - 4], [-1]])
    model = ToyModel(len(to_target) + 2, seed=4)  # two rows more are padding
    checked = Checked(drafter_of(model, to_target=to_target), model, to_target)
    decoder = Decoder(FakeEngine(TARGET, SLOTS), checked)
    for prompt in PROMPTS:
        tokens, _ = decode(decoder, TARGET, prompt, PARAMS[name], None)
        assert tokens == reference(TARGET, prompt, PARAMS[name], SLOTS + 1 - len(prompt))
    assert checked.drafts > 50


def test_a_prompt_of_words_it_does_not_know() -> None:
    to_target = np.arange(4)
    model = ToyModel(4, seed=1)
    checked = Checked(drafter_of(model, to_target=to_target), model, to_target)
    decoder = Decoder(FakeEngine(TARGET, SLOTS), checked)
    for prompt in ([9, 8, 9], [9, 8, 9, 1, 7, 2]):
        tokens, _ = decode(decoder, TARGET, prompt, SamplingParams(), 60)
        assert tokens == reference(TARGET, prompt, SamplingParams(), 60)


def test_a_broken_draft_model_leaves_it_to_the_target(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of()
    monkeypatch.setattr(engine_of(drafter), "run", lambda *_: np.full((1, V), np.nan, np.float32))
    decoder = Decoder(FakeEngine(TARGET, SLOTS), drafter)
    with caplog.at_level(logging.WARNING):
        tokens, statistics = decode(decoder, TARGET, [1, 2, 3], GREEDY, 30)
    assert tokens == reference(TARGET, [1, 2, 3], GREEDY, 30)
    assert statistics.tau == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("model: no draft, ")


OPTIONS: dict[str, Any] = {
    "depth": 5,
    "slots": 64,
    "vocab_size": 32,
    "valid_vocab": 30,
    "vocabulary": None,
    "architecture": "llama",
    "source": "model",
    "revision": None,
    "fingerprint": "sha256:0",
    "cache_bytes": 1,
}


WRONG = (
    *(("depth", value) for value in (0, 65, "5", True)),
    *(("slots", value) for value in (None, 1 << 25)),
    *(("vocab_size", 1.0), ("valid_vocab", 33), ("valid_vocab", 0)),
)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_options_out_of_bounds(name: str, value: Any) -> None:
    ModelOptions(**OPTIONS)
    with pytest.raises(BundleError, match=f"{name} is {value!r}, expected an integer from 1"):
        ModelOptions(**OPTIONS | {name: value})
