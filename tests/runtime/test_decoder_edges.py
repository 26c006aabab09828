"""The decode loop at its edges: full windows, stops, interruptions, and decoders that share an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.runtime.cache import CacheRows
from specexport.runtime.decoder import Block, Decoder
from specexport.runtime.drafters import DraftRequest, make_drafter
from specexport.runtime.engine import Step
from specexport.runtime.errors import UsageError
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from specexport.runtime.tree import Tree
from tests.runtime.decoding import PARAMS, PROMPT, VOCAB, check_cache
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import AllRight, Bushy, Scripted, decode, never, reference


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
            def run(self, step: Step) -> NDArray[np.float32]:
                if len(self.calls) == 6:
                    self.tokens[:] = 0
                    self.calls.append((0, 0))
                    raise RuntimeError("device lost")
                return super().run(step)

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
