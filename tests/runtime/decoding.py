"""What the tests of the decode loop share: prompts, settings, and a run whose cache is looked at after every step."""

from __future__ import annotations

from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import Drafter
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import never, reference

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
