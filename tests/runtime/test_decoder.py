"""The loop against a cache-free reference: whatever is drafted, tokens and cache are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.runtime.cache import CacheRows
from specexport.runtime.decoder import Block, Decoder
from specexport.runtime.drafters import DRAFTERS, Drafter, DraftRequest, make_drafter
from specexport.runtime.errors import UsageError
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from specexport.runtime.tree import Tree
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import AllRight, AllWrong, Bushy, Scripted, decode, never, reference

VOCAB = 29
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 1, 4, 1, 5]
PARAMS = {
    "greedy": SamplingParams(),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    "hot": SamplingParams(temperature=1.0, seed=8),
    "penalties": SamplingParams(
        temperature=0.7, seed=9, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2, top_k=12
    ),
}


def check_cache(engine: FakeEngine, decoder: Decoder, sequence: list[int]) -> None:
    """The committed rows are the committed tokens, and those begin the sequence."""
    rows = [*range(decoder.rows.write), *decoder.rows.commit]
    assert engine.tokens[rows].tolist() == decoder.committed == sequence[: len(rows)]
    assert engine.positions[rows].tolist() == list(range(len(rows)))


def check_run(
    model: ToyModel, drafter: Drafter | None, params: SamplingParams, count: int, nodes: int = 8, chunk: int = 7
) -> RunStatistics:
    """One prompt, with the cache looked at after every step."""
    engine = FakeEngine(model, 200)
    decoder = Decoder(engine, drafter, max_nodes=nodes, prefill_chunk=chunk)
    expected = reference(model, PROMPT, params, count)
    statistics = RunStatistics()
    sampler = Sampler(params, VOCAB)
    got: list[int] = []
    for block in decoder.decode(PROMPT, sampler, max_tokens=count, stop=never, cancelled=never, statistics=statistics):
        got += block.tokens
        assert got == expected[: len(got)]
        check_cache(engine, decoder, PROMPT + got)
        assert decoder.rows.past == len(PROMPT) + len(got) - 1  # all but the root
    assert got == expected
    assert statistics.tokens == count and statistics.finish_reason == "length"
    assert statistics.target_calls + statistics.prefill_calls == len(engine.calls)
    return statistics


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

    def run(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        tree: NDArray[np.bool_],
        past: int,
        write: int,
        commit: NDArray[np.int64],
        select: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        if self.fault == "commit":
            commit = np.arange(write, past)
        elif self.fault == "tree":
            tree = np.tri(len(tokens), dtype=bool)
        elif self.fault == "order":
            commit = commit[::-1].copy()
        return super().run(tokens, positions, tree, past, write, commit, select)


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


class TestEdges:
    @pytest.mark.parametrize("left", range(8))
    @pytest.mark.parametrize("kind", [AllRight, Bushy])
    def test_the_end_of_the_context(self, left: int, kind: type[Scripted]) -> None:
        """With ``left`` free rows there are ``left + 1`` tokens, drafted or not; the tree shrinks to what fits."""
        model = ToyModel(VOCAB, 8)
        slots = len(PROMPT) + left
        truth = reference(model, PROMPT, PARAMS["hot"], left + 1)
        drafter = kind(truth + [0] * 20, *((3, VOCAB) if kind is Bushy else ()))
        tokens, statistics = decode(Decoder(FakeEngine(model, slots), drafter), model, PROMPT, PARAMS["hot"], None)
        assert tokens == truth and statistics.finish_reason == "context"
        plain, _ = decode(Decoder(FakeEngine(model, slots)), model, PROMPT, PARAMS["hot"], None)
        assert plain == truth

    @pytest.mark.parametrize("count", range(1, 20))
    def test_max_tokens_is_exact(self, count: int) -> None:
        model = ToyModel(VOCAB, 9)
        truth = reference(model, PROMPT, SamplingParams(), 40)
        tokens, statistics = decode(
            Decoder(FakeEngine(model, 200), AllRight(truth), max_nodes=6), model, PROMPT, SamplingParams(), count
        )
        assert tokens == truth[:count] and statistics.tokens == count

    @pytest.mark.parametrize("place", range(12))
    def test_a_stop_token_anywhere_in_a_block(self, place: int) -> None:
        model = ToyModel(VOCAB, 10)
        truth = reference(model, PROMPT, PARAMS["hot"], 60)
        ending = truth[place]
        expected = truth[: truth.index(ending) + 1]
        engine = FakeEngine(model, 200)
        decoder = Decoder(engine, AllRight(truth), max_nodes=6)
        tokens, statistics = decode(decoder, model, PROMPT, PARAMS["hot"], 60, stop=lambda token: token == ending)
        assert tokens == expected and statistics.finish_reason == "stop" and statistics.tokens == len(expected)
        check_cache(engine, decoder, PROMPT + truth)
        # What comes next builds on the rows that are left.
        follow = [*PROMPT, *tokens, 5, 6]
        decoder.drafter = make_drafter("suffix", VOCAB)
        after, statistics = decode(decoder, model, follow, PARAMS["hot"], 20)
        assert after == reference(model, follow, PARAMS["hot"], 20)
        assert statistics.reused_tokens >= len(PROMPT) + len(tokens) - 1

    def test_stop_is_asked_once_a_token_in_order(self) -> None:
        model = ToyModel(VOCAB, 10)
        truth = reference(model, PROMPT, SamplingParams(), 40)
        asked: list[int] = []

        def stop(token: int) -> bool:
            asked.append(token)
            return False

        decode(Decoder(FakeEngine(model, 200), Bushy(truth, 1, VOCAB)), model, PROMPT, SamplingParams(), 40, stop)
        assert asked == truth

    def test_padded_rows_of_logits_are_never_sampled(self) -> None:
        model = ToyModel(VOCAB, 11)
        prompt = [token % 9 for token in PROMPT]
        decoder = Decoder(FakeEngine(model, 200), make_drafter("recycling", 9), valid_vocab=9)
        tokens, _ = decode(decoder, model, prompt, PARAMS["hot"], 60, valid_vocab=9)
        assert max(tokens) < 9 and tokens == reference(model, prompt, PARAMS["hot"], 60, valid_vocab=9)


class TestInterruption:
    @pytest.mark.parametrize("calls", range(8))
    def test_cancelled_between_calls(self, calls: int) -> None:
        """Three calls prefill, the others decode; what was computed stays usable."""
        model = ToyModel(VOCAB, 12)
        truth = reference(model, PROMPT, SamplingParams(), 60)
        engine = FakeEngine(model, 200)
        decoder = Decoder(engine, Bushy(truth, calls, VOCAB), prefill_chunk=8)
        tokens, statistics = decode(
            decoder, model, PROMPT, SamplingParams(), 60, cancelled=lambda: len(engine.calls) >= calls
        )
        assert len(engine.calls) == calls and statistics.finish_reason == "cancelled"
        assert tokens == truth[: len(tokens)] and bool(tokens) == (calls >= 3)
        check_cache(engine, decoder, PROMPT + truth)
        again, statistics = decode(decoder, model, PROMPT, SamplingParams(), 60)
        assert again == truth and statistics.reused_tokens == min(8 * calls, len(PROMPT) - 1)

    def test_a_consumer_that_walks_away(self) -> None:
        model = ToyModel(VOCAB, 12)
        truth = reference(model, PROMPT, SamplingParams(), 60)
        engine = FakeEngine(model, 200)
        decoder = Decoder(engine, Bushy(truth, 3, VOCAB))
        blocks = decoder.decode(
            PROMPT,
            Sampler(SamplingParams(), VOCAB),
            max_tokens=60,
            stop=never,
            cancelled=never,
            statistics=RunStatistics(),
        )
        for _ in range(5):
            next(blocks)
        blocks.close()  # type: ignore[attr-defined]
        check_cache(engine, decoder, PROMPT + truth)
        assert decode(decoder, model, PROMPT, SamplingParams(), 60)[0] == truth

    @pytest.mark.parametrize("blocks_first", [1, 4])
    def test_a_newer_run_ends_an_older_one(self, blocks_first: int) -> None:
        model = ToyModel(VOCAB, 12)
        decoder = Decoder(FakeEngine(model, 200), make_drafter("suffix", VOCAB))

        def begin(prompt: list[int]) -> Iterator[Block]:
            return decoder.decode(
                prompt,
                Sampler(SamplingParams(), VOCAB),
                max_tokens=40,
                stop=never,
                cancelled=never,
                statistics=RunStatistics(),
            )

        older = begin(PROMPT)
        for _ in range(blocks_first):
            next(older)
        newer = begin(PROMPT[:6])
        tokens = list(next(newer).tokens)
        with pytest.raises(UsageError, match="ended by a newer one"):
            next(older)
        for block in newer:
            tokens += block.tokens
        assert tokens == reference(model, PROMPT[:6], SamplingParams(), 40)

    def test_a_failing_engine_leaves_an_empty_cache(self) -> None:
        model = ToyModel(VOCAB, 13)

        class Breaks(FakeEngine):
            def run(self, *args: Any) -> NDArray[np.float32]:
                if len(self.calls) == 6:
                    self.tokens[:] = 0
                    self.calls.append((0, 0))
                    raise RuntimeError("device lost")
                return super().run(*args)

        decoder = Decoder(Breaks(model, 200), make_drafter("suffix", VOCAB))
        with pytest.raises(RuntimeError, match="device lost"):
            decode(decoder, model, PROMPT, SamplingParams(), 60)
        assert decoder.rows == CacheRows() and decoder.committed == []
        tokens, statistics = decode(decoder, model, PROMPT, SamplingParams(), 60)
        assert tokens == reference(model, PROMPT, SamplingParams(), 60) and statistics.reused_tokens == 0

    def test_a_drafter_that_changes_the_root_is_refused(self) -> None:
        model = ToyModel(VOCAB, 13)

        class Liar(Scripted):
            def propose(self, request: DraftRequest) -> Tree:
                return Tree.chain([request.root + 1])

        with pytest.raises(ValueError, match="scripted changed the root"):
            decode(Decoder(FakeEngine(model, 200), Liar([])), model, PROMPT, SamplingParams(), 9)

    def test_a_drafter_that_proposes_too_much_is_cut(self) -> None:
        model = ToyModel(VOCAB, 14)
        truth = reference(model, PROMPT, SamplingParams(), 50)

        class Greedy(AllRight):
            def ahead(self, request: DraftRequest) -> list[int]:
                return self.truth[self.done : self.done + 30]

        engine = FakeEngine(model, len(PROMPT) + 40)
        tokens, _ = decode(Decoder(engine, Greedy(truth), max_nodes=5), model, PROMPT, SamplingParams(), 35)
        assert tokens == truth[:35] and max(size for size, rows in engine.calls if rows > 1) == 5


def test_times_leave_out_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once a reading, and a consumer that lets it run on between blocks."""
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr("specexport.runtime.decoder.perf_counter", tick)
    model = ToyModel(VOCAB, 15)

    def run(pause: float) -> RunStatistics:
        statistics = RunStatistics()
        for _ in Decoder(FakeEngine(model, 200), make_drafter("ngram", VOCAB)).decode(
            PROMPT, Sampler(SamplingParams(), VOCAB), max_tokens=30, stop=never, cancelled=never, statistics=statistics
        ):
            clock[0] += pause
        return statistics

    quick, slow = run(0.0), run(1e6)
    assert (quick.decode_s, quick.draft_s, quick.verify_s) == (slow.decode_s, slow.draft_s, slow.verify_s)
    assert 0 < quick.verify_s < quick.decode_s and sum(quick.time_share.values()) == pytest.approx(1)


def test_layouts_kept_are_bounded() -> None:
    model = ToyModel(VOCAB, 16)
    truth = reference(model, PROMPT, SamplingParams(), 150)
    decoder = Decoder(FakeEngine(model, 200), Bushy(truth, 4, VOCAB), max_nodes=12)
    most = 0
    make: Callable[[Tree], Any] = decoder._layout

    def watched(tree: Tree) -> Any:
        nonlocal most
        layout = make(tree)
        most = max(most, len(decoder._layouts))
        return layout

    decoder._layout = watched  # type: ignore[method-assign]
    for _ in range(3):
        decode(decoder, model, PROMPT, SamplingParams(), 150)
    assert 10 < most <= 64


def test_decoders_may_take_turns_on_one_engine() -> None:
    """Rows that another decoder wrote are never taken for a shared prefix."""
    model = ToyModel(40, seed=5)
    engine = FakeEngine(model, slots=96)
    first, second = Decoder(engine), Decoder(engine)

    def run(decoder: Decoder, prompt: list[int]) -> list[int]:
        sampler = Sampler(SamplingParams(max_tokens=12), 40)
        blocks = decoder.decode(
            prompt, sampler, max_tokens=12, stop=never, cancelled=lambda: False, statistics=RunStatistics()
        )
        return [token for block in blocks for token in block.tokens]

    prompts = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 7], [5]]
    expected = [run(Decoder(FakeEngine(model, slots=96)), prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert run(first, prompt) == tokens
        assert run(second, [8, 8, 8, 8, 8, 8]) == run(Decoder(FakeEngine(model, slots=96)), [8] * 6)


def test_a_generation_ends_when_another_decoder_takes_the_engine() -> None:
    engine = FakeEngine(ToyModel(40, seed=5), slots=96)
    first, second = Decoder(engine), Decoder(engine)

    def begin(decoder: Decoder) -> Iterator[Block]:
        sampler = Sampler(SamplingParams(max_tokens=12), 40)
        return decoder.decode(
            [1, 2], sampler, max_tokens=12, stop=never, cancelled=lambda: False, statistics=RunStatistics()
        )

    older, newer = begin(first), begin(second)
    next(older)
    next(newer)
    with pytest.raises(UsageError, match="ended by a newer one"):
        next(older)
    assert len(list(newer)) > 0
