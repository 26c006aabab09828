"""The loop against a cache-free reference: whatever is drafted, tokens and cache are those of plain decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.runtime.cache import CacheRows
from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import DRAFTERS, Drafter, make_drafter
from specexport.runtime.engine import Step
from specexport.runtime.errors import UsageError
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from tests.runtime.decoding import PARAMS, PROMPT, VOCAB, check_cache, check_run
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import AllRight, AllWrong, Bushy, decode, never, reference


class TestIdentity:
    @pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
    @pytest.mark.parametrize("name", sorted(DRAFTERS))
    @pytest.mark.parametrize("seed", range(3))
    def test_lookup_drafters(self, name: str, params: SamplingParams, seed: int) -> None:
        statistics = check_run(ToyModel(VOCAB, seed), make_drafter(name, VOCAB), params, 120)
        if params.temperature == 0:
            assert sum(statistics.accepted) > 0 and statistics.tau > 1

    @pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
    @pytest.mark.parametrize("seed", range(6))
    def test_random_trees_where_any_branch_wins(self, params: SamplingParams, seed: int) -> None:
        model = ToyModel(VOCAB, seed)
        truth = reference(model, PROMPT, params, 120)
        moved: list[tuple[int, ...]] = []

        class Watched(Bushy):
            def observe(self, observation: Any) -> None:
                super().observe(observation)
                if list(observation.path) != list(range(len(observation.path))):
                    moved.append(tuple(observation.path))

        statistics = check_run(model, Watched(truth, seed, VOCAB), params, 120, nodes=4 + 3 * seed)
        assert len(moved) > 5 and statistics.tau > 1

    def test_plain(self) -> None:
        statistics = check_run(ToyModel(VOCAB, 1), None, PARAMS["hot"], 60)
        assert statistics.tau == 1 and statistics.target_calls == 59 and statistics.tree_sizes == {1: 59}

    def test_accept_all(self) -> None:
        model = ToyModel(VOCAB, 2)
        truth = reference(model, PROMPT, PARAMS["hot"], 65)
        statistics = check_run(model, AllRight(truth), PARAMS["hot"], 65)
        assert statistics.tau == 8 and statistics.target_calls == 8
        assert statistics.acceptance_by_depth == [1.0] * 7

    def test_accept_none(self) -> None:
        model = ToyModel(VOCAB, 2, surprise=1)
        params = SamplingParams(logit_bias={token: -np.inf for token in range(5)})
        truth = reference(model, PROMPT, params, 30)
        statistics = check_run(model, AllWrong(truth), params, 30)
        assert statistics.tau == 1 and statistics.acceptance_by_depth == [0.0]

    @pytest.mark.parametrize("chunk", [1, 3, 19, 20, 21, 500])
    def test_any_prefill_chunk(self, chunk: int) -> None:
        check_run(ToyModel(VOCAB, 3), make_drafter("suffix", VOCAB), PARAMS["nucleus"], 30, chunk=chunk)

    def test_prefill_asks_for_one_row_of_logits(self) -> None:
        model = ToyModel(VOCAB, 3)
        engine = FakeEngine(model, 64)
        decode(Decoder(engine, prefill_chunk=8), model, PROMPT, SamplingParams(), 1)
        assert engine.calls == [(8, 1), (8, 1), (4, 1)]


class Ignores(FakeEngine):
    """An engine with a planted fault."""

    def __init__(self, model: ToyModel, slots: int, fault: str) -> None:
        super().__init__(model, slots)
        self.fault = fault

    def run(self, step: Step) -> NDArray[np.float32]:
        if self.fault == "commit":
            step = step._replace(commit=np.arange(step.write, step.past))
        elif self.fault == "tree":
            step = step._replace(tree=np.tri(len(step.tokens), dtype=bool))
        elif self.fault == "order":
            step = step._replace(commit=step.commit[::-1].copy())
        return super().run(step)


@pytest.mark.parametrize("fault", ["commit", "tree", "order"])
def test_a_planted_fault_is_seen(fault: str) -> None:
    """The identity tests mean nothing unless a broken commit or mask changes the tokens."""
    model = ToyModel(VOCAB, 4)
    truth = reference(model, PROMPT, SamplingParams(), 120)
    for engine, same in ((Ignores(model, 200, "nothing"), True), (Ignores(model, 200, fault), False)):
        decoder = Decoder(engine, Bushy(truth, 5, VOCAB), max_nodes=10)
        tokens, _ = decode(decoder, model, PROMPT, SamplingParams(), 120)
        if fault != "order" or same:
            assert (tokens == truth) == same
        else:
            # Attention does not see the order of rows; later truncation by position does.
            rows = [*range(decoder.rows.write), *decoder.rows.commit]
            assert engine.positions[rows].tolist() != list(range(len(rows)))


def test_wrong_bookkeeping_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel(VOCAB, 4)
    truth = reference(model, PROMPT, SamplingParams(), 120)
    right = CacheRows.accept

    def lazy(self: CacheRows, path: Any) -> CacheRows:
        return CacheRows(right(self, path).past)  # as if every path were in place

    monkeypatch.setattr(CacheRows, "accept", lazy)
    tokens, _ = decode(Decoder(FakeEngine(model, 200), Bushy(truth, 5, VOCAB)), model, PROMPT, SamplingParams(), 120)
    assert tokens != truth


class TestPositionsAndHistory:
    """The noise of a token is keyed by its absolute position, so where prompt ends and output begins is no matter."""

    @pytest.mark.parametrize("name", ["none", *sorted(DRAFTERS)])
    @pytest.mark.parametrize("taken", [1, 2, 9, 30])
    def test_output_given_back_as_prompt_goes_on_the_same(self, name: str, taken: int) -> None:
        params = SamplingParams(temperature=1.0, seed=8, repetition_penalty=1.2)
        model = ToyModel(VOCAB, 15)
        whole, _ = decode(Decoder(FakeEngine(model, 200), make_drafter(name, VOCAB)), model, PROMPT, params, 60)
        for decoder in (Decoder(FakeEngine(model, 200)), Decoder(FakeEngine(model, 200), make_drafter(name, VOCAB))):
            rest, _ = decode(decoder, model, PROMPT + whole[:taken], params, 60 - taken)
            assert rest == whole[taken:]
        other = SamplingParams(temperature=1.0, seed=9, repetition_penalty=1.2)
        assert decode(decoder, model, PROMPT, other, 60)[0] != whole

    @pytest.mark.parametrize("seed", range(3))
    def test_min_tokens_and_logprobs_do_not_depend_on_the_tree(self, seed: int) -> None:
        """Stop ids are held off node by node, and each token is reported with the row it was picked from."""
        model = ToyModel(VOCAB, seed)
        stops = {3, 7, 11}
        params = SamplingParams(temperature=1.5, seed=seed, min_tokens=25, max_tokens=60, logprobs=3)

        def run(drafter: Drafter | None) -> tuple[list[int], list[Any]]:
            blocks = Decoder(FakeEngine(model, 200), drafter, max_nodes=10).decode(
                PROMPT,
                Sampler(params, VOCAB, stop_ids=stops),
                max_tokens=60,
                stop=lambda token: token in stops,
                cancelled=never,
                statistics=RunStatistics(),
            )
            tokens, logprobs = [], []
            for block in blocks:
                assert block.logprobs is not None and len(block.logprobs) == len(block.tokens)
                tokens += block.tokens
                logprobs += block.logprobs
            return tokens, logprobs

        tokens, logprobs = run(None)
        assert 25 < len(tokens) <= 60 and not stops & set(tokens[:25])
        sequence = PROMPT + tokens
        for index, (chosen, best) in enumerate(logprobs, len(PROMPT)):
            row = model.after(sequence[:index]).astype(np.float64)
            row -= np.log(np.exp(row).sum())
            assert chosen == pytest.approx(row[sequence[index]])
            assert [token for token, _ in best] == np.argsort(-row, kind="stable")[:3].tolist()
        for drafter in (AllRight(tokens), Bushy(tokens, seed, VOCAB), make_drafter("recycling", VOCAB)):
            assert run(drafter) == (tokens, logprobs)


class TestPrompts:
    @pytest.mark.parametrize("name", ["none", *sorted(DRAFTERS)])
    def test_a_conversation_reuses_what_it_shares(self, name: str) -> None:
        model = ToyModel(VOCAB, 5)
        engine = FakeEngine(model, 300)
        decoder = Decoder(engine, make_drafter(name, VOCAB), prefill_chunk=16)
        prompt = PROMPT
        for turn in range(5):
            cached = decoder.committed
            engine.calls.clear()
            tokens, statistics = decode(decoder, model, prompt, PARAMS["nucleus"], 30)
            assert tokens == reference(model, prompt, PARAMS["nucleus"], 30)
            assert statistics.reused_tokens == len(cached)
            computed = sum(size for size, selected in engine.calls[: statistics.prefill_calls])
            assert computed == len(prompt) - len(cached) > 0
            check_cache(engine, decoder, prompt + tokens)
            prompt = [*prompt, *tokens, 7, turn, 2]

    def test_the_same_prompt_again_recomputes_one_token(self) -> None:
        model = ToyModel(VOCAB, 5)
        decoder = Decoder(FakeEngine(model, 300), make_drafter("ngram", VOCAB))
        first, _ = decode(decoder, model, PROMPT, PARAMS["hot"], 40)
        again, statistics = decode(decoder, model, PROMPT, PARAMS["hot"], 40)
        assert again == first and statistics.reused_tokens == len(PROMPT) - 1

    @pytest.mark.parametrize("shared", range(15, 60, 4))
    def test_a_prompt_that_leaves_the_answer_midway(self, shared: int) -> None:
        """Also where the fork lies among rows that still wait to be moved."""
        model = ToyModel(VOCAB, 6)
        truth = reference(model, PROMPT, SamplingParams(), 40)
        engine = FakeEngine(model, 300)
        decoder = Decoder(engine, Bushy(truth, shared, VOCAB), max_nodes=12)
        tokens, _ = decode(decoder, model, PROMPT, SamplingParams(), 40)
        fork = [*(PROMPT + tokens)[:shared], 11, 12, 13]
        decoder.drafter = None
        assert decode(decoder, model, fork, SamplingParams(), 20)[0] == reference(model, fork, SamplingParams(), 20)

    def test_any_sequence_of_integers_is_a_prompt(self) -> None:
        model = ToyModel(VOCAB, 5)
        decoder = Decoder(FakeEngine(model, 700), prefill_chunk=64)
        prompt = PROMPT * 20
        expected = reference(model, prompt, SamplingParams(), 5)
        for form in (tuple(prompt), np.array(prompt), prompt):
            tokens, _ = decode(decoder, model, form, SamplingParams(), 5)  # type: ignore[arg-type]
            assert tokens == expected and all(type(token) is int for token in decoder.committed)

    def test_an_unrelated_and_a_shorter_prompt(self) -> None:
        model = ToyModel(VOCAB, 7)
        decoder = Decoder(FakeEngine(model, 300), make_drafter("recycling", VOCAB))
        for prompt, reused in ((PROMPT, 0), ([8, 8, 1], 0), (PROMPT, 0), (PROMPT[:5], 4), ([3], 0), ([3, 1], 1)):
            tokens, statistics = decode(decoder, model, prompt, PARAMS["hot"], 25)
            assert tokens == reference(model, prompt, PARAMS["hot"], 25)
            assert statistics.reused_tokens == reused

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "prompt is empty"),
            ([1] * 65, "65 tokens and the context 64"),
            ([1, 25, 2], "token 25 is outside.*0 to 24"),
            ([1, -1], "token -1"),
        ],
    )
    def test_impossible_prompts(self, prompt: list[int], message: str) -> None:
        model = ToyModel(VOCAB, 7)
        decoder = Decoder(FakeEngine(model, 64), valid_vocab=25)
        with pytest.raises(UsageError, match=message):
            decode(decoder, model, prompt, SamplingParams(), 5)
        assert decode(decoder, model, [1, 2], SamplingParams(), 1, valid_vocab=25)[1].tokens == 1

    def test_impossible_settings(self) -> None:
        engine = FakeEngine(ToyModel(VOCAB, 7), 64)
        with pytest.raises(UsageError, match="max_nodes >= 1 and prefill_chunk >= 1, got 0 and 256"):
            Decoder(engine, max_nodes=0)
        with pytest.raises(UsageError, match="got 8 and 0"):
            Decoder(engine, prefill_chunk=0)
        with pytest.raises(UsageError, match="max_tokens is 0"):
            decode(Decoder(engine), engine.model, [1], SamplingParams(), 0)
